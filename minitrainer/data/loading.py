"""The user's loaders, made ready to be shared over ranks: what is fetched is ours to say."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from minitrainer.data.digest import Share
from minitrainer.data.items import Keys, SeededItems, WorkerStart, as_it_is
from minitrainer.data.sampling import hearers, length_of, replaced_samplers, sampling_of
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
        tells_epoch: Whether `set_epoch` of the dataset is called; if not, workers cannot live on.
    """

    def __init__(self, loader: DataLoader[Any], layout: Layout, *, tells_epoch: bool) -> None:
        self._plan = _Plan()
        self._generator = torch.Generator()
        self._layout = layout
        self._asked: list[Keys] | None = []
        tell_changes(loader, hears=tells_epoch)
        self._keys_are_batches = sampling_of(loader).unit == "key"
        self._items = SeededItems(
            loader.dataset,
            loader.collate_fn,
            seed=layout.seed,
            tells_epoch=tells_epoch,
            in_workers=loader.num_workers > 0,
        )
        sampling: dict[str, Any] = {"batch_sampler": self._plan}
        if self._keys_are_batches:
            sampling = {"batch_size": None, "sampler": self._plan}
        self._loader = rebuild(
            loader,
            self._generator,
            hears=tells_epoch,
            dataset=self._items,
            collate_fn=as_it_is,
            worker_init_fn=WorkerStart(loader.worker_init_fn),
            **sampling,
        )

    def fetch(self, keys: Iterable[Keys], epoch: int) -> Iterator[Any]:
        """Return an iterator over the batches of these keys; workers start at once.

        Args:
            keys: What each batch is made of; read as needed.
            epoch: The epoch, which the dataset of this process has been told, and which seeds
                the workers along with the rank.
        """
        if self._asked is not None:
            self._asked = []
            keys = _noting(keys, self._asked)
        self._plan.keys = keys
        self._items.told = epoch
        seed, rank = self._layout.seed, self._layout.rank
        self._generator.manual_seed(derive_seed(seed, "workers", epoch, rank))
        return iter(self._loader)

    def fetch_counted(self, keys: Iterable[Keys], epoch: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches of these keys, each with its number of samples."""
        if self._keys_are_batches:
            yield from counted(self.fetch(keys, epoch))
            return
        # Loaders with workers take keys long before they give the batches.
        taken: deque[Keys] = deque()
        for batch in self.fetch(_noting(keys, taken), epoch):
            yield batch, len(taken.popleft().keys)

    def share(self, order: Callable[[], Sequence[Any]] | None) -> Share | None:
        """Return what was last fetched, as a share of an order; once, as then it is let go.

        Args:
            order: Returns the keys that all ranks have fetched together; None if they have not
                fetched all.
        """
        if order is None or self._asked is None:
            return None
        asked, self._asked = self._asked, None
        dealt = [key for batch in asked for key in batch.keys]
        return Share.of(dealt, order(), length_of(self._items.dataset))


class _Plan:
    """A batch sampler, or sampler, that yields what was last put into `keys`."""

    keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


def _noting(keys: Iterable[Keys], notes: list[Keys] | deque[Keys]) -> Iterator[Keys]:
    for batch in keys:
        notes.append(batch)
        yield batch


def is_stock(loader: Any) -> bool:
    """Return whether it is a DataLoader that iterates as torch's own, so that it can be rebuilt."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def rebuild(
    loader: DataLoader[Any], generator: torch.Generator, *, hears: bool = False, **others: Any
) -> DataLoader[Any]:
    """Return a loader with the settings of another one.

    Args:
        loader: The user's loader.
        generator: What seeds the workers, instead of the global generator of torch.
        hears: Whether copies of the dataset in workers that live on hear of the epoch.
        **others: How to sample and batch, and settings that differ.
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
        "persistent_workers": _live_on(loader, hears=hears),
        "generator": generator,
    }
    return DataLoader(**{**settings, **others})


def tell_changes(loader: DataLoader[Any], *, hears: bool = False) -> None:
    """Log which settings of the user's loader are not kept as they are, and why.

    Args:
        loader: The user's loader.
        hears: Whether copies of the dataset in workers that live on hear of the epoch.
    """
    if loader.persistent_workers and not _live_on(loader, hears=hears):
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


def _live_on(loader: DataLoader[Any], *, hears: bool) -> bool:
    return loader.persistent_workers and (hears or not hearers(loader.dataset))
