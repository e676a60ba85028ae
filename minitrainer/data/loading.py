"""The user's loaders, made ready to be shared over ranks: what is fetched is ours to say."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from minitrainer.data.sampling import hearers, replaced_samplers, sampling_of
from minitrainer.data.seeding import derive_seed
from minitrainer.data.transfer import count_samples
from minitrainer.errors import LoaderError, SettingError

_logger = logging.getLogger(__name__)


class Layout(NamedTuple):
    """Which share of the data this process is to take, and the seed of the run."""

    rank: int
    world_size: int
    seed: int


def check_loader(loader: Any, stage: str) -> None:
    """Raise LoaderError for what is not one loader.

    Args:
        loader: What the user gave.
        stage: What it is for, such as "train".
    """
    what = f"The {stage} loader is of type {type(loader).__name__}."
    fix = "Give a torch DataLoader, or an iterable of batches."
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise LoaderError(what, "A dataset has no batches.", "Wrap it in a torch DataLoader.")
    if isinstance(loader, str | bytes | Mapping) or not hasattr(type(loader), "__iter__"):
        raise LoaderError(what, "It is not an iterable of batches.", fix)
    if isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader):
        raise LoaderError(what, f"It holds {len(loader)} loaders, and only one can be used.", fix)


def is_map_style(loader: Any) -> bool:
    """Return whether what is fetched can be planned: a DataLoader of a map-style dataset."""
    return is_stock(loader) and not isinstance(loader.dataset, IterableDataset)


def rounds_of(limit: int | float | None, num_batches: int | None, stage: str) -> int | None:
    """Return the most micro-batches per rank that a limit allows, None for no limit.

    Args:
        limit: A number of micro-batches per rank, or a fraction of an epoch from 0.0 to 1.0,
            which leaves at least one unless it is 0.
        num_batches: The micro-batches per rank of a whole epoch, None when unknown.
        stage: What is limited, for the message.

    Raises:
        SettingError: The limit is of another kind, or a fraction of an unknown number.
    """
    if limit is None:
        return None
    what = f"The limit on {stage} batches is {limit!r}."
    fix = "Give a whole number of batches, or a fraction from 0.0 to 1.0."
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    is_fraction = isinstance(limit, float) and 0.0 <= limit <= 1.0
    if not is_count and not is_fraction:
        raise SettingError(what, "That is neither a number of batches nor a fraction.", fix)
    if isinstance(limit, int):
        return limit
    if num_batches is None:
        raise SettingError(
            what,
            "The loader has no length, so a fraction of it cannot be told.",
            "Give a whole number of batches.",
        )
    return max(1, int(num_batches * limit)) if limit > 0 else 0


def counted(batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Yield each batch with its number of samples, told from its contents."""
    for batch in batches:
        yield batch, count_samples(batch)


class PlannedLoader:
    """A copy of a map-style loader that fetches what it is told, in that order.

    It draws nothing from the global random states. `in_order=False` is not kept: which samples
    are in which batch is what a resumed run, and the other ranks, go by.

    Args:
        loader: The user's loader.
        layout: The share of this process.
    """

    def __init__(self, loader: DataLoader[Any], layout: Layout) -> None:
        self._plan = _Plan()
        self._generator = torch.Generator()
        self._layout = layout
        tell_changes(loader)
        self._keys_are_batches = sampling_of(loader).unit == "key"
        if self._keys_are_batches:
            sampling = {"batch_size": None, "sampler": self._plan}
        else:
            sampling = {"batch_sampler": self._plan}
        self._loader = rebuild(loader, self._generator, **sampling)

    def fetch(self, keys: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Return an iterator over the batches of these keys; workers start at once.

        Args:
            keys: Lists of indices, or with `batch_size=None` single indices; read as needed.
            epoch: The epoch, which seeds the workers along with the rank.
        """
        self._plan.keys = keys
        seed, rank = self._layout.seed, self._layout.rank
        self._generator.manual_seed(derive_seed(seed, "workers", epoch, rank))
        return iter(self._loader)

    def fetch_counted(self, keys: Iterable[Any], epoch: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches of these keys, each with its number of samples."""
        if self._keys_are_batches:
            yield from counted(self.fetch(keys, epoch))
            return
        sizes: deque[int] = deque()
        for batch in self.fetch(_noting(keys, sizes), epoch):
            yield batch, sizes.popleft()


class _Plan:
    """A batch sampler, or sampler, that yields what was last put into `keys`."""

    keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


def _noting(shares: Iterable[Any], sizes: deque[int]) -> Iterator[Any]:
    # Loaders with workers take keys long before they give the batches.
    for share in shares:
        sizes.append(len(share))
        yield share


def is_stock(loader: Any) -> bool:
    """Return whether it is a DataLoader that iterates as torch's own, so that it can be rebuilt."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def rebuild(
    loader: DataLoader[Any], generator: torch.Generator, **sampling: Any
) -> DataLoader[Any]:
    """Return a loader with the settings of another one.

    Args:
        loader: The user's loader.
        generator: What seeds the workers, instead of the global generator of torch.
        **sampling: How to sample and batch, and settings that differ.
    """
    settings: dict[str, Any] = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        # torch warns of pinned memory where there is nothing to pin for.
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers and not hearers(loader.dataset),
        "generator": generator,
    }
    return DataLoader(**{**settings, **sampling})


def tell_changes(loader: DataLoader[Any]) -> None:
    """Log which settings of the user's loader are not kept as they are, and why."""
    if loader.persistent_workers and hearers(loader.dataset):
        _logger.info(
            "persistent_workers is switched off: workers that live on hold a copy of %s that "
            "would never hear of set_epoch.",
            type(loader.dataset).__name__,
        )
    if not loader.in_order:
        _logger.info("in_order=False is ignored: the order of samples is part of the run.")
    for sampler in replaced_samplers(loader):
        _logger.info(
            "%s is replaced by the plain order it deals out (shuffle=%s): the trainer shares it "
            "over the ranks, without padding.",
            type(sampler).__name__,
            sampler.shuffle,
        )
