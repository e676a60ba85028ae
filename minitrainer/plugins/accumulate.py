"""Gradient accumulation by windows that are known before their first backward.

Pitfall: a counter with `% N` drops the last, shorter window or divides it by N, leaks half a
window into the next epoch, and reduces gradients over ranks on the wrong micro-batch.
Fix: the epoch is cut into windows beforehand, so that "sync now" and each micro-batch's weight
are data; the gradient is sum(weight * grad) / sum(weight) over the whole window and all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minitrainer.errors import SettingError
from minitrainer.protocols import EpochData
from minitrainer.step import MicroBatch


class Accumulator:
    """Take one optimizer step per `size` micro-batches.

    Args:
        size: Micro-batches per window; or a mapping from the epoch where a size begins to that
            size, for example `{0: 1, 10: 4}`. Before the first epoch named the size is 1.

    Raises:
        SettingError: A size is not a whole number of at least 1, or an epoch is negative.
    """

    def __init__(self, size: int | Mapping[int, int] = 1) -> None:
        sizes = dict(size) if isinstance(size, Mapping) else {0: size}
        for epoch, value in sizes.items():
            if not _is_count(value, 1) or not _is_count(epoch, 0):
                raise SettingError(
                    f"accumulate got {size!r}.",
                    "A window has at least one micro-batch, from an epoch counted from 0.",
                    "Give a whole number, or a mapping like {0: 1, 10: 4}.",
                )
        self._sizes = dict(sorted(sizes.items()))

    def window_size(self, epoch: int) -> int:
        """Return the number of micro-batches of a full window in this epoch."""
        size = 1
        for start, value in self._sizes.items():
            if start <= epoch:
                size = value
        return size

    def windows(self, data: EpochData, epoch: int, world_size: int) -> Iterator[_Window]:
        """Cut the epoch into windows, fetching micro-batches one by one.

        A window must be iterated to its end before the next one is asked for.
        """
        size = self.window_size(epoch)
        if data.num_batches is None:
            return _unsized(data, size, world_size)
        return _sized(data, data.num_batches, size, world_size)


class _Window:
    """Micro-batches still to be fetched, `length` at most."""

    __slots__ = ("_length", "_lookahead", "_share", "expected_weight", "is_last")

    def __init__(
        self, lookahead: _Lookahead, length: int, expected_weight: float, world_size: int
    ) -> None:
        self._lookahead = lookahead
        self._length = length
        self._share = expected_weight / world_size
        self.expected_weight = expected_weight
        self.is_last = False

    def __iter__(self) -> Iterator[MicroBatch]:
        share, lookahead = self._share, self._lookahead
        for position in range(1, self._length + 1):
            batch, batch_idx, samples, dry, _, _ = lookahead.take()
            sync = position == self._length or lookahead.is_exhausted
            yield MicroBatch(batch, batch_idx, samples, dry, share, sync)
            if sync:
                self.is_last = self.is_last or lookahead.is_exhausted
                return


class _Lookahead:
    """An iterator that can tell, where asked to, whether another micro-batch follows.

    Looking ahead fetches a batch early, so it is done only where the length is unknown.
    """

    __slots__ = ("_ahead", "_source", "is_exhausted")

    def __init__(self, source: Iterator[MicroBatch], *, ahead: bool) -> None:
        self._source = source
        self._ahead = next(source, None) if ahead else None
        self.is_exhausted = ahead and self._ahead is None

    def take(self) -> MicroBatch:
        current = self._ahead
        if current is None:
            return next(self._source)
        self._ahead = next(self._source, None)
        self.is_exhausted = self._ahead is None
        return current


def _sized(data: EpochData, num_batches: int, size: int, world_size: int) -> Iterator[_Window]:
    lookahead = _Lookahead(iter(data), ahead=False)
    first = data.first_batch_idx
    end = first + num_batches
    for start in range(first, end, size):
        stop = min(start + size, end)
        expected = float(sum(data.total_samples(batch_idx) for batch_idx in range(start, stop)))
        window = _Window(lookahead, stop - start, expected, world_size)
        window.is_last = stop == end
        yield window


def _unsized(data: EpochData, size: int, world_size: int) -> Iterator[_Window]:
    # On several ranks dry micro-batches follow for ever, so the last window needs no telling
    # apart; on one rank it does, and one batch is fetched ahead for that.
    lookahead = _Lookahead(iter(data), ahead=world_size == 1)
    expected = float(size * data.total_samples(data.first_batch_idx))
    while not lookahead.is_exhausted:
        window = _Window(lookahead, size, expected, world_size)
        yield window


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
