"""How each kind of training data is dealt out in rounds, one micro-batch of every rank a round."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, dropwhile, islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from minitrainer.data.digest import Share
from minitrainer.data.epochs import CountedEpoch, PlannedEpoch
from minitrainer.data.items import Keys, placed
from minitrainer.data.loading import (
    Layout,
    PlannedLoader,
    counted,
    is_map_style,
    rounds_of,
)
from minitrainer.data.sampling import (
    draw_order,
    gather,
    iterate_order,
    order_length,
    sampling_of,
)
from minitrainer.data.streaming import Stream
from minitrainer.data.transfer import count_samples
from minitrainer.errors import EmptyDataError
from minitrainer.protocols import EpochData

Limit = int | float | None
_END = object()


class Deal(Protocol):
    """One kind of training data, shared out; the values are those of `TrainingData`."""

    num_batches: int | None
    num_samples: int | None
    num_dropped: int | None
    batch_size: int | None

    def epoch(self, epoch: int, samples_seen: int, batch_idx: int) -> EpochData:
        """Return what is left of an epoch behind `samples_seen` samples of all ranks."""
        ...

    def share(self) -> Share | None:
        """Return what this rank was dealt in the first whole epoch, None if nobody knows."""
        ...


def deal_of(loader: Any, layout: Layout, limit: Limit) -> Deal:
    """Return how a loader is dealt out."""
    if isinstance(loader, list | tuple):
        return _ListDeal(loader, layout, limit)
    if not is_map_style(loader):
        return _StreamDeal(loader, layout, limit)
    unit = sampling_of(loader).unit
    length = order_length(loader)
    if unit == "sample" and length is not None:
        return _SampleDeal(loader, length, layout, limit)
    if unit == "batch" and length is not None:
        return _BatchDeal(loader, length, layout, limit)
    return _UncountedDeal(loader, length, layout, limit)


class _SampleDeal:
    """A sampler of samples with a length: the order alone tells every round."""

    def __init__(self, loader: DataLoader[Any], length: int, layout: Layout, limit: Limit) -> None:
        sampling = sampling_of(loader)
        self._user_loader = loader
        self._layout = layout
        self._drop_last = sampling.drop_last
        self.batch_size: int | None = sampling.batch_size
        self._round = sampling.batch_size * layout.world_size
        self.num_dropped: int | None = length % self._round if self._drop_last else 0
        kept = length - self.num_dropped
        if kept == 0:
            raise _nothing(length, self._round)
        self._limit = rounds_of(limit, _rounds(kept, self._round), "train")
        self.num_samples: int | None = self._within_limit(kept)
        self.num_batches: int | None = _rounds(self.num_samples, self._round)
        self._loader = PlannedLoader(loader, layout, tells_epoch=True)
        self._order: Callable[[], Sequence[Any]] | None = None

    def epoch(self, epoch: int, samples_seen: int, batch_idx: int) -> EpochData:
        rank, world_size, seed = self._layout
        size = self._round
        order = draw_order(self._user_loader, seed, epoch)
        rest = max(0, self._within_limit(len(order)) - samples_seen)
        if self._drop_last:
            rest -= rest % size
        full_rounds, tail = divmod(rest, size)
        own_tail = len(range(rank, tail, world_size))
        stop = samples_seen + rest
        self._order = None if samples_seen else lambda: order[:stop]
        keys = (
            Keys(epoch, first, world_size, order[first : min(start + size, stop) : world_size])
            for start in range(samples_seen, stop, size)
            if (first := start + rank) < stop
        )
        return PlannedEpoch(
            partial(self._loader.fetch, keys, epoch),
            samples=[size // world_size] * full_rounds + [own_tail] * (own_tail > 0),
            totals=[size] * full_rounds + [tail] * (tail > 0),
            first_batch_idx=batch_idx,
        )

    def share(self) -> Share | None:
        order, self._order = self._order, None
        return self._loader.share(order)

    def _within_limit(self, num_samples: int) -> int:
        if self._limit is None:
            return num_samples
        return min(num_samples, self._limit * self._round)


class _BatchDeal:
    """A batch sampler of the user's with a length: its batches are dealt out whole."""

    def __init__(self, loader: DataLoader[Any], length: int, layout: Layout, limit: Limit) -> None:
        if length == 0:
            raise _nothing(0)
        self._user_loader = loader
        self._layout = layout
        num_batches = _rounds(length, layout.world_size)
        self._limit = rounds_of(limit, num_batches, "train")
        self.num_batches: int | None = _least(num_batches, self._limit)
        # A batch sampler tells the sizes of its batches only when it is drawn.
        self.num_samples: int | None = None
        self.num_dropped: int | None = 0
        self.batch_size: int | None = None
        self._loader = PlannedLoader(loader, layout, tells_epoch=True)
        self._order: Callable[[], Sequence[Any]] | None = None

    def epoch(self, epoch: int, samples_seen: int, batch_idx: int) -> EpochData:
        batches = draw_order(self._user_loader, self._layout.seed, epoch)
        last = None if self._limit is None else self._limit * self._layout.world_size
        self._order = None if samples_seen else lambda: list(chain(*batches[:last]))
        return _deal_whole(
            list(placed(batches, epoch, are_batches=True)),
            list(map(len, batches)),
            partial(self._loader.fetch, epoch=epoch),
            layout=self._layout,
            limit=self._limit,
            samples_seen=samples_seen,
            batch_idx=batch_idx,
        )

    def share(self) -> Share | None:
        order, self._order = self._order, None
        return self._loader.share(order)


class _Unplanned:
    """Data of which nothing but the batches themselves tells which samples are in them."""

    def share(self) -> Share | None:
        return None


class _ListDeal(_Unplanned):
    """A list of batches, dealt out whole."""

    def __init__(self, batches: Sequence[Any], layout: Layout, limit: Limit) -> None:
        if not batches:
            raise _nothing(0)
        self._batches = batches
        self._layout = layout
        num_batches = _rounds(len(batches), layout.world_size)
        self._limit = rounds_of(limit, num_batches, "train")
        self._sizes = [count_samples(batch) for batch in batches]
        self.num_batches: int | None = _least(num_batches, self._limit)
        self.num_samples: int | None = sum(self._sizes[: self.num_batches * layout.world_size])
        self.num_dropped: int | None = 0
        self.batch_size: int | None = None

    def epoch(self, epoch: int, samples_seen: int, batch_idx: int) -> EpochData:
        return _deal_whole(
            self._batches,
            self._sizes,
            iter,
            layout=self._layout,
            limit=self._limit,
            samples_seen=samples_seen,
            batch_idx=batch_idx,
        )


class _UncountedDeal(_Unplanned):
    """A sampler without a length, or one of batches of unknown size (`batch_size=None`).

    What it draws is dealt out as it comes, and may have no end.
    """

    def __init__(
        self, loader: DataLoader[Any], length: int | None, layout: Layout, limit: Limit
    ) -> None:
        if length == 0:
            raise _nothing(0)
        self._user_loader = loader
        self._layout = layout
        self._sampling = sampling_of(loader)
        self._length = length
        num_batches = None if length is None else _rounds(length, layout.world_size)
        self._limit = rounds_of(limit, num_batches, "train")
        self.num_batches = None if num_batches is None else _least(num_batches, self._limit)
        self.num_samples: int | None = None
        drops = self._sampling.drop_last
        self.num_dropped: int | None = None if drops else 0
        by_sample = self._sampling.unit == "sample"
        self.batch_size: int | None = self._sampling.batch_size if by_sample else None
        self._loader = PlannedLoader(loader, layout, tells_epoch=True)

    def epoch(self, epoch: int, samples_seen: int, batch_idx: int) -> EpochData:
        rank, world_size, _ = self._layout
        units = self._units(epoch)
        keys: Iterator[Keys]
        left = None
        if self._sampling.unit == "sample":
            next(islice(units, samples_seen, samples_seen), None)
            keys = self._shares(units, epoch, samples_seen)
        elif self._sampling.unit == "batch":
            batches = placed(units, epoch, are_batches=True)
            keys = islice(
                dropwhile(lambda batch: batch.first < samples_seen, batches),
                rank,
                None,
                world_size,
            )
        else:
            # Starting to fetch starts workers.
            over = placed(units, epoch, are_batches=False)
            read = self._loader.fetch(over, epoch) if samples_seen else iter(())
            passed = _read_over(read, samples_seen)
            units = placed(self._units(epoch), epoch, are_batches=False)
            keys = islice(units, passed + rank, None, world_size)
            if self._length is not None:
                left = _rounds(self._length - passed, world_size)
        most = _left_of(self._limit, batch_idx)
        return CountedEpoch(
            self._loader.fetch_counted(islice(keys, most), epoch),
            world_size=world_size,
            num_batches=left,
            most=most,
            first_batch_idx=batch_idx,
            guess=self._sampling.batch_size,
        )

    def _units(self, epoch: int) -> Iterator[Any]:
        ahead = self._sampling.batch_size * self._layout.world_size
        return iterate_order(self._user_loader, self._layout.seed, epoch, ahead=ahead)

    def _shares(self, samples: Iterator[Any], epoch: int, start: int) -> Iterator[Keys]:
        rank, world_size, _ = self._layout
        size = self._sampling.batch_size * world_size
        for dealt in gather(samples, size, drop_last=self._sampling.drop_last):
            if rank < len(dealt):
                yield Keys(epoch, start + rank, world_size, dealt[rank::world_size])
            start += len(dealt)


class _StreamDeal(_Unplanned):
    """Batches that can only be read one after the other."""

    def __init__(self, loader: Any, layout: Layout, limit: Limit) -> None:
        self._layout = layout
        self._stream = Stream(loader, layout, "train")
        length = self._stream.num_batches
        if length == 0:
            raise _nothing(0)
        num_batches = None if length is None else _rounds(length, layout.world_size)
        self._limit = rounds_of(limit, num_batches, "train")
        self.num_batches = None if num_batches is None else _least(num_batches, self._limit)
        self.num_samples: int | None = None
        self.num_dropped: int | None = None if getattr(loader, "drop_last", False) else 0
        self.batch_size: int | None = self._stream.batch_size

    def epoch(self, epoch: int, samples_seen: int, batch_idx: int) -> EpochData:
        rank, world_size, _ = self._layout
        batches = self._stream.open(epoch)
        if self._stream.dealt_by_source:
            # How much of `samples_seen` was this rank's nobody knows; on the same number of
            # ranks it was so many batches.
            own: Iterator[Any] = islice(batches, batch_idx, None) if samples_seen else batches
            left = None
        else:
            passed = _read_over(batches, samples_seen)
            own = islice(batches, rank, None, world_size)
            length = self._stream.num_batches
            left = None if length is None else _rounds(length - passed, world_size)
        return CountedEpoch(
            counted(own),
            world_size=world_size,
            num_batches=left,
            most=_left_of(self._limit, batch_idx),
            first_batch_idx=batch_idx,
            guess=self.batch_size or 1,
        )


def _deal_whole(
    batches: Sequence[Any],
    sizes: Sequence[int],
    fetch: Callable[[Sequence[Any]], Iterable[Any]],
    *,
    layout: Layout,
    limit: int | None,
    samples_seen: int,
    batch_idx: int,
) -> PlannedEpoch:
    """Deal out batches of known sizes in stride, behind those that hold `samples_seen`."""
    rank, world_size, _ = layout
    first = bisect_left([0, *accumulate(sizes)], samples_seen) if samples_seen else 0
    last = len(sizes) if limit is None else limit * world_size
    rest = sizes[first:last]
    starts = range(0, len(rest), world_size)
    return PlannedEpoch(
        lambda: fetch(batches[first + rank : last : world_size]),
        samples=rest[rank::world_size],
        totals=rest if world_size == 1 else [sum(rest[i : i + world_size]) for i in starts],
        first_batch_idx=batch_idx,
    )


def _read_over(batches: Iterator[Any], samples_seen: int) -> int:
    """Read batches until so many samples have gone by; return how many batches they were."""
    passed = 0
    while samples_seen > 0 and (batch := next(batches, _END)) is not _END:
        samples_seen -= count_samples(batch)
        passed += 1
    return passed


def _rounds(amount: int, size: int) -> int:
    return -(-amount // size)


def _least(number: int, limit: int | None) -> int:
    return number if limit is None else min(number, limit)


def _left_of(limit: int | None, batch_idx: int) -> int | None:
    return None if limit is None else max(0, limit - batch_idx)


def _nothing(num_samples: int, round_size: int = 0) -> EmptyDataError:
    if num_samples:
        return EmptyDataError(
            f"The train loader has {num_samples} samples, and drop_last drops them all.",
            f"One micro-batch of every rank takes {round_size} samples, and only full ones are "
            "kept.",
            "Use a smaller batch size, fewer ranks, or drop_last=False.",
        )
    return EmptyDataError(
        "The train loader has no samples.",
        "There is nothing to train on.",
        "Check the path or the filter of its dataset.",
    )
