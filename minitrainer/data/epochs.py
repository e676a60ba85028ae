"""The micro-batches of one rank in (the rest of) one epoch: with counts known before, or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from minitrainer.step import MicroBatch


class PlannedEpoch:
    """Micro-batches whose numbers of samples are known before anything is fetched.

    Args:
        fetch: Starts fetching the batches of this rank.
        samples: The number of samples of each of them.
        totals: The samples of each micro-batch over all ranks; where it is longer than
            `samples`, this rank is dry.
        first_batch_idx: The `batch_idx` of the first micro-batch.
    """

    def __init__(
        self,
        fetch: Callable[[], Iterable[Any]],
        *,
        samples: Sequence[int],
        totals: Sequence[int],
        first_batch_idx: int,
    ) -> None:
        self.num_batches: int | None = len(totals)
        self.first_batch_idx = first_batch_idx
        self._fetch = fetch
        self._samples = samples
        self._totals = totals

    def total_samples(self, batch_idx: int) -> int:
        """Return the samples of that micro-batch over all ranks."""
        return self._totals[batch_idx - self.first_batch_idx]

    def __iter__(self) -> Iterator[MicroBatch]:
        batch_idx = self.first_batch_idx
        if self._samples:
            for batch, samples in zip(self._fetch(), self._samples, strict=True):
                yield MicroBatch(batch, batch_idx, samples)
                batch_idx += 1
        while batch_idx < self.first_batch_idx + len(self._totals):
            yield MicroBatch(None, batch_idx, 0, dry=True)
            batch_idx += 1


class CountedEpoch:
    """Micro-batches whose samples are counted as they come.

    When `num_batches` is None, dry micro-batches follow the last batch for ever on more than one
    rank: the loop ends the epoch when all ranks are dry.

    Args:
        batches: The batches of this rank, each with its number of samples.
        world_size: The number of ranks.
        num_batches: The micro-batches of every rank, None when unknown.
        most: At most so many micro-batches; no more batches are fetched, and all ranks end.
        first_batch_idx: The `batch_idx` of the first micro-batch.
        guess: What to take for the samples of a batch that has not been seen.
    """

    def __init__(
        self,
        batches: Iterable[tuple[Any, int]],
        *,
        world_size: int,
        num_batches: int | None,
        most: int | None,
        first_batch_idx: int,
        guess: int,
    ) -> None:
        if num_batches is not None and most is not None:
            num_batches = min(num_batches, most)
        self.num_batches = num_batches
        self.first_batch_idx = first_batch_idx
        self._most = num_batches if num_batches is not None else most
        self._batches = batches
        self._world_size = world_size
        self._guess = guess

    def total_samples(self, batch_idx: int) -> int:
        """Return a guess, equal on all ranks, as the scale of their losses rests on it.

        On one rank it is the size of the newest batch, so exact for the one fetched last.
        """
        return self._guess * self._world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        batch_idx = self.first_batch_idx
        # Not kept: what fetches ends with its last batch, not with this object.
        batches, self._batches = self._batches, ()
        for batch, samples in islice(batches, self._most):
            if self._world_size == 1:
                self._guess = samples
            yield MicroBatch(batch, batch_idx, samples)
            batch_idx += 1
        if self.num_batches is None and self._world_size == 1:
            return
        while self._most is None or batch_idx < self.first_batch_idx + self._most:
            yield MicroBatch(None, batch_idx, 0, dry=True)
            batch_idx += 1
