"""The order of the samples of an epoch: a pure function of (seed, epoch), alike on all ranks.

Whatever sampler the user gave draws it, under random states of its own. The ranks are dealt their
shares of that one order, so a sampler need not know of ranks at all.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from minitrainer.data.seeding import PrivateRng, derive_seed
from minitrainer.errors import LoaderError

Unit = Literal["sample", "batch", "key"]


class Sampling(NamedTuple):
    """What is drawn from to get the order of a map-style loader.

    `unit` is what `source` yields: with "sample" the index of one sample, which we gather into
    batches of `batch_size`; with "batch" (a batch sampler of the user's) the indices of a batch;
    with "key" (`batch_size=None`) an index whose item is a whole batch already.
    """

    source: Iterable[Any]
    unit: Unit
    batch_size: int = 1
    drop_last: bool = False


def sampling_of(loader: DataLoader[Any]) -> Sampling:
    """Return what must be drawn from for a loader of a map-style dataset.

    A `DistributedSampler` stands for the plain order that it would deal out.

    Raises:
        LoaderError: A sampler of another kind deals out the share of one rank only.
    """
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        sampling = Sampling(_undealt(loader.sampler), "key")
    elif type(batch_sampler) is BatchSampler:
        # Not loader.sampler: that one is a dummy where a BatchSampler was given as batch_sampler.
        size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        sampling = Sampling(_undealt(batch_sampler.sampler), "sample", size, drop_last)
    else:
        sampling = Sampling(batch_sampler, "batch")
    refuse_dealing(sampling.source, replaceable=True)
    return sampling


def order_length(loader: DataLoader[Any]) -> int | None:
    """Return how many units the order of an epoch has, None when its sampler does not know."""
    source = sampling_of(loader).source
    with _Draw(source, 0, 0).active():
        return length_of(source)


def draw_order(loader: DataLoader[Any], seed: int, epoch: int) -> list[Any]:
    """Return the whole order of an epoch, one entry for each unit of `sampling_of(loader)`.

    `set_epoch(epoch)` of the samplers is called before. While they draw, the global generators
    of torch, numpy and random and all generators that the samplers hold are seeded by
    (seed, "order", epoch); afterwards everything is as it was. A sampler that has another
    source of randomness must offer `set_epoch`, or its order cannot be drawn again on resume.
    One that goes on after twice its length is taken to have no end; its epoch is its length.

    Args:
        loader: A loader of a map-style dataset, whose sampler has a length.
        seed: The seed of the run.
        epoch: The epoch, from 0.
    """
    sampling = sampling_of(loader)
    tell_samplers(sampling.source, seed=seed, epoch=epoch)
    with _Draw(sampling.source, seed, epoch).active():
        length = len(cast(Sized, sampling.source))
        order = list(islice(_copies(sampling), 2 * length + 1))
    return order[:length] if len(order) > 2 * length else order


def iterate_order(loader: DataLoader[Any], seed: int, epoch: int, *, ahead: int) -> Iterator[Any]:
    """Yield what `draw_order` returns, also for samplers that may have no end.

    Args:
        loader: A loader of a map-style dataset.
        seed: The seed of the run.
        epoch: The epoch, from 0.
        ahead: How many units are drawn at once from a sampler without a length; changing the
            random states to and fro has its price.
    """
    if order_length(loader) is not None:
        yield from draw_order(loader, seed, epoch)
        return
    sampling = sampling_of(loader)
    tell_samplers(sampling.source, seed=seed, epoch=epoch)
    draw = _Draw(sampling.source, seed, epoch)
    with draw.active():
        units = iter(_copies(sampling))
    while True:
        with draw.active():
            drawn = list(islice(units, ahead))
        if not drawn:
            return
        yield from drawn


def gather(samples: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield lists of `size` samples; the last one may be shorter, or is dropped."""
    while gathered := list(islice(samples, size)):
        if drop_last and len(gathered) < size:
            return
        yield gathered


def length_of(source: Any) -> int | None:
    """Return `len(source)`, None when it has none or does not know."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def refuse_dealing(*sources: Any, replaceable: bool) -> None:
    """Raise LoaderError if a sampler deals out the share of one rank by itself.

    Args:
        *sources: Samplers and batch samplers.
        replaceable: Whether a `DistributedSampler` can be replaced, and so is allowed.
    """
    for sampler in _nested(*sources):
        if replaceable and _is_plain_distributed(sampler):
            continue
        num_replicas = getattr(sampler, "num_replicas", 1)
        if isinstance(num_replicas, int) and num_replicas > 1:
            raise LoaderError(
                f"The sampler {type(sampler).__name__} deals out the share of one rank in "
                f"{num_replicas}.",
                "The trainer shares the order out over the ranks itself, so that share would be "
                "split once more and most samples would never be seen.",
                "Give a sampler of the whole order, or build this one with num_replicas=1.",
            )


def replaced_samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the `DistributedSampler`s of a loader, which the trainer does not need."""
    return [s for s in _nested(loader.sampler, loader.batch_sampler) if _is_plain_distributed(s)]


def tell_epoch(source: Any, epoch: int) -> None:
    """Call `set_epoch` of a dataset, and of the datasets that it is made of.

    Args:
        source: A dataset, or any iterable of batches.
        epoch: The epoch, from 0.
    """
    for dataset in hearers(source):
        dataset.set_epoch(epoch)


def tell_samplers(*samplers: Any, seed: int, epoch: int) -> None:
    """Call `set_epoch` of samplers, and of those that they hold.

    Args:
        *samplers: Samplers and batch samplers.
        seed: The seed of the run; the global random states stay as they are.
        epoch: The epoch, from 0.
    """
    with PrivateRng(derive_seed(seed, "order", epoch)):
        for sampler in _nested(*samplers):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)


def hearers(source: Any) -> list[Any]:
    """Return the datasets in a dataset (subsets, concatenations) that have a `set_epoch`."""
    found: list[Any] = []
    todo = [source]
    seen: set[int] = set()
    while todo:
        dataset = todo.pop()
        if id(dataset) in seen:
            continue
        seen.add(id(dataset))
        if callable(getattr(dataset, "set_epoch", None)):
            found.append(dataset)
        held = getattr(dataset, "__dict__", {})
        parts = held.get("datasets")
        todo.extend(parts if isinstance(parts, list | tuple) else ())
        if held.get("dataset") is not None:
            todo.append(held["dataset"])
    return found


class _Draw:
    """Samplers made ready to draw one epoch, again and again if drawn in parts."""

    def __init__(self, source: Iterable[Any], seed: int, epoch: int) -> None:
        order_seed = derive_seed(seed, "order", epoch)
        self._rng = PrivateRng(order_seed)
        self._twins = [
            (sampler, name, twin)
            for sampler in _nested(source)
            for name, value in list(_attributes(sampler).items())
            if (twin := _twin(value, order_seed)) is not None
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the samplers draw from their own seeded streams while this is open."""
        originals = [(sampler, name, vars(sampler)[name]) for sampler, name, _ in self._twins]
        with self._rng:
            try:
                for sampler, name, twin in self._twins:
                    setattr(sampler, name, twin)
                yield
            finally:
                for sampler, name, original in originals:
                    setattr(sampler, name, original)


class _WholeOrder(Sampler[int]):
    """What a `DistributedSampler` deals out, undealt: no padding, nothing dropped."""

    def __init__(self, dealt: DistributedSampler[Any]) -> None:
        self._dataset: Any = dealt.dataset
        self._shuffle = dealt.shuffle

    def __iter__(self) -> Iterator[int]:
        size = len(self)
        return iter(torch.randperm(size).tolist() if self._shuffle else range(size))

    def __len__(self) -> int:
        return len(self._dataset)


def _copies(sampling: Sampling) -> Iterable[Any]:
    if sampling.unit == "batch":
        # Some batch samplers fill one list again and again.
        return map(list, sampling.source)
    return sampling.source


def _undealt(sampler: Any) -> Any:
    return _WholeOrder(sampler) if _is_plain_distributed(sampler) else sampler


def _is_plain_distributed(sampler: Any) -> bool:
    return (
        isinstance(sampler, DistributedSampler)
        and type(sampler).__iter__ is DistributedSampler.__iter__
    )


def _attributes(sampler: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(sampler, "__dict__", {})
    return attributes


def _nested(*sources: Any) -> list[Any]:
    """Return samplers and the samplers that they hold."""
    found: list[Any] = []
    todo = list(sources)
    while todo:
        sampler = todo.pop()
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        for name, value in _attributes(sampler).items():
            if isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                todo.append(value)
    return found


def _twin(value: Any, seed: int) -> Any | None:
    """Return a seeded generator, or an undealt sampler, for one that a sampler holds."""
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).manual_seed(seed)
    if isinstance(value, random.Random):
        return random.Random(seed)
    if _is_plain_distributed(value):
        return _WholeOrder(value)
    # A generator of numpy can only be there where numpy has been imported.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return numpy.random.default_rng(seed)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return numpy.random.RandomState(seed % 2**32)
    return None
