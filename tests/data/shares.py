"""Data whose items are their own index, and the shares of all ranks in one process.

Nothing in minitrainer.data communicates, so ranks need no processes here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from minitrainer.data import EvaluationData, TrainingData
from minitrainer.step import MicroBatch

Make = Callable[[], Any]


class Items(Dataset[int]):
    """Item i is i; `asked` is what was asked for in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class Flow(IterableDataset[int]):
    """Yields 0..size-1, without telling how many."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for item in range(self.size):
            self.asked.append(item)
            yield item


class SizedFlow(Flow):
    def __len__(self) -> int:
        return self.size


class Again:
    """An iterable of batches without a length, which can be read more than once."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.asked += 1
            yield batch


def items_loader(size: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Items(size), **settings)


def train(loader: Any, *, rank: int = 0, ranks: int = 1, seed: int = 7, **other: Any) -> Any:
    return TrainingData(loader, rank=rank, world_size=ranks, seed=seed, **other)


def evaluate(loader: Any, *, rank: int = 0, ranks: int = 1, seed: int = 7, **other: Any) -> Any:
    settings = {"stage": "validation", **other}
    return EvaluationData(loader, rank=rank, world_size=ranks, seed=seed, **settings)


def values(micro_batch: MicroBatch) -> list[int]:
    return [] if micro_batch.dry else torch.as_tensor(micro_batch.batch).flatten().tolist()


def shares(
    make: Make,
    ranks: int,
    epoch: int = 0,
    *,
    most: int | None = None,
    limit: int | float | None = None,
    seed: int = 7,
    **resume: int,
) -> list[list[MicroBatch]]:
    """The micro-batches of every rank, each with a loader of its own as in a real run."""
    return [
        list(
            islice(
                train(make(), rank=rank, ranks=ranks, limit=limit, seed=seed).epoch(
                    epoch, **resume
                ),
                most,
            )
        )
        for rank in range(ranks)
    ]


def rounds(dealt: list[list[MicroBatch]]) -> list[list[int]]:
    """The items of each round, all ranks together in the order that the sampler drew."""
    found = []
    for one_round in zip(*dealt, strict=True):
        by_rank = [values(micro_batch) for micro_batch in one_round]
        found.append([item for row in zip_longest(*by_rank) for item in row if item is not None])
    return found


def flat(dealt: list[list[int]]) -> list[int]:
    return [item for part in dealt for item in part]


def global_states() -> list[Any]:
    """The global random states of this process, comparable."""
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest]
