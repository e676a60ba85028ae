"""What one rank evaluates: whole batches in stride, so that every sample counts once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from minitrainer.data.digest import Share
from minitrainer.data.items import Keys, placed
from minitrainer.data.loading import (
    Layout,
    PlannedLoader,
    check_loader,
    counted,
    is_map_style,
    rounds_of,
)
from minitrainer.data.sampling import gather, iterate_order, order_length, sampling_of
from minitrainer.data.streaming import Stream
from minitrainer.data.transfer import count_samples
from minitrainer.errors import EmptyDataError
from minitrainer.step import MicroBatch

_logger = logging.getLogger(__name__)


class EvaluationData:
    """A loader for validation, test or prediction, shared out over the ranks.

    The batches are those of one process, whatever the number of ranks, and rank r takes every
    `world_size`-th from the r-th on: nothing is padded, nothing is dropped that the loader itself
    does not drop, and ranks may have different numbers of batches. The order is that of the
    loader's sampler, drawn under (seed, "order", 0): the same in every evaluation.

    Args:
        loader: A torch DataLoader, or an iterable of batches.
        stage: What it is for, such as "validation"; for messages.
        rank: This rank.
        world_size: The number of ranks.
        seed: The seed of the run.
        limit: The most batches per rank, or a fraction of them.

    Raises:
        LoaderError: The loader is of a kind that cannot be used or shared.
        EmptyDataError: The loader has no samples.
        SettingError: The limit makes no sense.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        stage: str,
        rank: int,
        world_size: int,
        seed: int,
        limit: int | float | None = None,
    ) -> None:
        check_loader(loader, stage)
        self._layout = Layout(rank, world_size, seed)
        self._source = _source_of(loader, self._layout, stage)
        length = self._source.num_batches
        if length == 0:
            raise EmptyDataError(
                f"The {stage} loader has no samples.",
                "A mean over nothing is no number.",
                "Check the path or the filter of its dataset.",
            )
        rounds = None if length is None else -(-length // world_size)
        self._limit = rounds_of(limit, rounds, stage)

    @property
    def num_total_batches(self) -> int | None:
        """Batches of all ranks, within the limit; None when unknown."""
        length = self._source.num_batches
        if length is None or self._limit is None:
            return length
        return min(length, self._limit * self._layout.world_size)

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank, within the limit; None when unknown."""
        total = self.num_total_batches
        rank, world_size, _ = self._layout
        return None if total is None else len(range(rank, total, world_size))

    @property
    def num_samples(self) -> int | None:
        """Samples of all ranks, within the limit; None when unknown."""
        total = self.num_total_batches
        return None if total is None else self._source.num_samples(total)

    def share(self) -> Share | None:
        """Return which samples this rank was dealt in the newest pass, for `coverage`.

        Once, and only where a sampler of known length names the samples; None otherwise.
        """
        return self._source.share(self.num_total_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the batches of this rank; `batch_idx` counts the batches of all ranks."""
        rank, world_size, _ = self._layout
        if self._limit == 0:
            return
        batch_idx = rank
        for batch, samples in self._source.read(self._limit):
            yield MicroBatch(batch, batch_idx, samples)
            batch_idx += world_size


class _Source(Protocol):
    """Batches dealt out whole; `num_batches` counts those of all ranks, None when unknown."""

    num_batches: int | None

    def num_samples(self, num_batches: int) -> int | None:
        """Return the samples of the first so many batches of all ranks, None when unknown."""
        ...

    def read(self, limit: int | None) -> Iterator[tuple[Any, int]]:
        """Yield the batches of this rank, at most `limit`, with their numbers of samples."""
        ...

    def share(self, num_batches: int | None) -> Share | None:
        """Return what this rank has read of so many batches, None if nobody knows."""
        ...


def _source_of(loader: Any, layout: Layout, stage: str) -> _Source:
    if isinstance(loader, list | tuple):
        return _Listed(loader, layout)
    if is_map_style(loader):
        return _Sampled(loader, layout, stage)
    return _Streamed(loader, layout, stage)


class _Sampled:
    """A loader of a map-style dataset: only this rank's batches are fetched."""

    def __init__(self, loader: DataLoader[Any], layout: Layout, stage: str) -> None:
        self._user_loader = loader
        self._layout = layout
        self._sampling = sampling_of(loader)
        self._length = order_length(loader)
        self._loader = PlannedLoader(loader, layout, tells_epoch=False)
        self._was_read = False
        self.num_batches = self._length
        if self._sampling.unit == "sample" and self._length is not None:
            size, drop_last = self._sampling.batch_size, self._sampling.drop_last
            self.num_batches = (self._length + (0 if drop_last else size - 1)) // size
            if drop_last and self._length % size:
                _logger.info(
                    "The %s loader has drop_last=True: %d of %d samples are left out.",
                    stage,
                    self._length % size,
                    self._length,
                )

    def num_samples(self, num_batches: int) -> int | None:
        if self._sampling.unit != "sample" or self._length is None:
            return None
        return min(self._length, num_batches * self._sampling.batch_size)

    def read(self, limit: int | None) -> Iterator[tuple[Any, int]]:
        self._was_read = True
        rank, world_size, _ = self._layout
        return self._loader.fetch_counted(
            islice(islice(self._batches(), rank, None, world_size), limit), 0
        )

    def share(self, num_batches: int | None) -> Share | None:
        if not self._was_read or self._length is None or self._sampling.unit == "key":
            return None
        batches = islice(self._batches(), num_batches)
        return self._loader.share(lambda: [key for batch in batches for key in batch.keys])

    def _batches(self) -> Iterator[Keys]:
        _, unit, size, drop_last = self._sampling
        units = iterate_order(self._user_loader, self._layout.seed, 0, ahead=size)
        if unit == "sample":
            units = gather(units, size, drop_last=drop_last)
        return placed(units, 0, are_batches=unit != "key")


class _Unplanned:
    """Batches of which nothing but themselves tells which samples are in them."""

    def share(self, num_batches: int | None) -> Share | None:
        return None


class _Listed(_Unplanned):
    """A list of batches."""

    def __init__(self, batches: Sequence[Any], layout: Layout) -> None:
        self._batches = batches
        self._layout = layout
        self.num_batches: int | None = len(batches)

    def num_samples(self, num_batches: int) -> int | None:
        return sum(count_samples(batch) for batch in self._batches[:num_batches])

    def read(self, limit: int | None) -> Iterator[tuple[Any, int]]:
        rank, world_size, _ = self._layout
        return counted(self._batches[rank::world_size][:limit])


class _Streamed(_Unplanned):
    """Batches that can only be read one after the other."""

    def __init__(self, loader: Any, layout: Layout, stage: str) -> None:
        self._layout = layout
        self._stream = Stream(loader, layout, stage)
        self.num_batches = self._stream.num_batches

    def num_samples(self, num_batches: int) -> int | None:
        return None

    def read(self, limit: int | None) -> Iterator[tuple[Any, int]]:
        rank, world_size, _ = self._layout
        batches = self._stream.open(0)
        if not self._stream.dealt_by_source:
            batches = islice(batches, rank, None, world_size)
        return counted(islice(batches, limit))
