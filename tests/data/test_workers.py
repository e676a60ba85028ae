"""What worker processes draw and hear; map-style data."""

from __future__ import annotations

import logging
import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from tests.data.shares import evaluate, train


class Draws(Dataset[torch.Tensor]):
    """An item is what the generators of numpy, random and torch give in the worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [np.random.rand(), random.random(), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor(drawn, dtype=torch.float64)


class Told(Dataset[int]):
    """An item is the epoch that its copy of the dataset has been told."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("persistent", [False, True])
def test_first_draws_of_rank_worker_and_epoch_are_distinct(*, persistent: bool) -> None:
    """Case B26: 2 ranks x 2 workers x 2 epochs, seed 7; a second run gives the same 8."""

    def run() -> list[list[float]]:
        first_draws = []
        for rank in range(2):
            loader = DataLoader(Draws(), num_workers=2, persistent_workers=persistent)
            data = train(loader, rank=rank, ranks=2)
            for epoch in range(2):
                batches = [b.batch[0].tolist() for b in data.epoch(epoch)]
                first_draws += batches[:2]  # the first of each of the two workers
        return first_draws

    drawn = run()
    assert len(drawn) == 8
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 8
    assert run() == drawn


def workers() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def test_plain_persistent_workers_never_hear_of_the_epoch() -> None:
    dataset = Told()
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=True)
    seen = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        seen.append([batch.tolist() for batch in loader])
    assert seen == [[[0] * 2] * 2] * 3


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_reaches_the_workers(
    *, nested: bool, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B29: persistent workers, 3 epochs: those seen in workers are exactly 0, 1, 2."""
    dataset: Dataset[int] = Subset(Told(), range(4)) if nested else Told()
    loader = DataLoader(
        dataset, batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    with caplog.at_level(logging.INFO):
        data = train(loader)
    assert not caplog.records
    seen = [[b.batch.tolist() for b in data.epoch(0)]]
    pids = workers()
    seen += [[b.batch.tolist() for b in data.epoch(epoch)] for epoch in (1, 2)]
    assert seen == [[[epoch] * 2] * 2 for epoch in range(3)]
    assert workers() == pids
    assert len(pids) == num_workers
    rest = data.epoch(7, samples_seen=2, batch_idx=1)
    assert [b.batch.tolist() for b in rest] == [[7, 7]]


def test_the_epoch_changes_with_the_batch_and_not_before() -> None:
    """Batches that are fetched ahead, when an epoch is left early, are of that epoch."""

    class Telling(Told):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self.calls = getattr(self, "calls", 0) + 1

        def __getitem__(self, index: int) -> Any:
            return self.epoch, self.calls

        def __len__(self) -> int:
            return 24

    loader = DataLoader(Telling(), 2, num_workers=2, persistent_workers=True, prefetch_factor=4)
    data = train(loader)
    assert next(iter(data.epoch(5))).batch[0].tolist() == [5, 5]
    for calls, epoch in enumerate((6, 7), start=2):
        batches = [b.batch for b in data.epoch(epoch)]
        assert {tuple(b[0].tolist()) for b in batches} == {(epoch, epoch)}
        assert {tuple(b[1].tolist()) for b in batches} == {(calls, calls)}  # told once for each


def test_workers_of_an_evaluation_are_started_anew_where_the_epoch_matters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody tells them, but the dataset may be the one that is trained on."""
    dataset = Told()
    with caplog.at_level(logging.INFO):
        data = evaluate(DataLoader(dataset, 2, num_workers=1, persistent_workers=True))
    assert ["persistent_workers is switched off" in r.message for r in caplog.records] == [True]
    training = train(DataLoader(dataset, 2))
    for epoch in range(2):
        training.epoch(epoch)
        assert [b.batch.tolist() for b in data] == [[epoch] * 2] * 2


def test_persistent_workers_live_on_where_they_can() -> None:
    class Process(Draws):
        def __getitem__(self, index: int) -> Any:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            return torch.tensor(info.seed)

    data = train(DataLoader(Process(), num_workers=1, persistent_workers=True))
    # A worker that is started anew gets another seed.
    seeds = {int(b.batch) for epoch in range(2) for b in data.epoch(epoch)}
    assert len(seeds) == 1
    data = train(DataLoader(Process(), num_workers=1))
    assert len({int(b.batch) for epoch in range(2) for b in data.epoch(epoch)}) == 2


def test_evaluation_does_not_tell_a_shared_dataset_of_another_epoch() -> None:
    dataset = Told()
    train(DataLoader(dataset)).epoch(3)
    assert [b.batch.item() for b in evaluate(DataLoader(dataset))] == [3] * 4


def test_an_epoch_left_early_does_not_disturb_the_next() -> None:
    loader = DataLoader(Draws(), num_workers=2, persistent_workers=True)
    data = train(loader)
    next(iter(data.epoch(0)))
    assert len(list(data.epoch(1))) == 8
