"""Data: what samplers and loaders of plain torch do when several processes use them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    random_split,
)

import minitrainer as mt
from tests.pitfalls.plain import codes
from tests.ranks import run_ranks
from tests.toys import Idx, Values, loader, quiet


def test_plain_order_is_the_same_in_every_epoch() -> None:
    """D21: without `set_epoch` each epoch has the order of the first."""
    sampler = DistributedSampler(range(16), 2, 0, shuffle=True, seed=0)
    epochs = [list(sampler), list(sampler)]
    assert epochs[0] == epochs[1]
    sampler.set_epoch(1)
    assert list(sampler) != epochs[0]


class Told(Dataset[int]):
    """An item is the epoch that its copy of the dataset has been told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return self.epoch


def test_plain_persistent_workers_never_hear_of_the_epoch() -> None:
    """D22: each worker holds the copy that it was started with."""
    dataset = Told()
    data = DataLoader(dataset, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        seen += [int(item) for item in data]
    assert seen == [0, 0, 0]


def test_plain_training_shares_are_padded_or_cut() -> None:
    """D23: 5 samples on 2 ranks: one of them twice, or one of them never."""

    def drawn(*, drop_last: bool) -> list[int]:
        samplers = [
            DistributedSampler(range(5), 2, rank, shuffle=False, drop_last=drop_last)
            for rank in (0, 1)
        ]
        return sorted(item for sampler in samplers for item in sampler)

    assert drawn(drop_last=False) == [0, 0, 1, 2, 3, 4]
    assert drawn(drop_last=True) == [0, 1, 2, 3]


def test_plain_ranks_draw_the_same_samples() -> None:
    """D24: a sampler that knows nothing of ranks, under the one seed of the script."""

    def rank() -> list[int]:
        torch.manual_seed(0)
        return [int(i) for i in WeightedRandomSampler([1.0] * 8, 8)]

    first, second = run_ranks(rank)
    assert first == second


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def test_plain_stream_is_read_whole_by_everybody() -> None:
    """D25: 12 items, 2 ranks with 2 workers each: 48."""
    items = [int(item) for _rank in range(2) for item in DataLoader(Stream(), num_workers=2)]
    assert len(items) == 48


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_plain_workers_of_all_ranks_draw_the_same() -> None:
    """D26: one seed on all ranks, so the same augmentations in worker 0 of each."""
    drawn = []
    for _rank in range(2):
        torch.manual_seed(7)
        drawn.append([item.item() for item in DataLoader(Noise(), num_workers=1)])
    assert drawn[0] == drawn[1]


def test_plain_seeds_are_one_or_the_other() -> None:
    """D27: one seed: the same dropout on all ranks; a seed per rank: other initial weights."""

    def rank(*, per_rank: bool) -> tuple[float, list[float]]:
        torch.manual_seed(int(os.environ["RANK"]) if per_rank else 0)
        weight = torch.nn.Linear(1, 1).weight.item()
        return weight, torch.nn.functional.dropout(torch.ones(32)).tolist()

    first, second = run_ranks(lambda: rank(per_rank=False))
    assert first[1] == second[1]
    first, second = run_ranks(lambda: rank(per_rank=True))
    assert first[0] != second[0]


class Split(mt.DataModule):
    """Ten items, split at random in setup."""

    def setup(self, stage: str) -> None:
        self.train, self.val = random_split(Values(range(10)), [6, 4])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train)


def test_a_random_split_is_the_same_on_all_ranks() -> None:
    """D28: drawn by each process for itself, validation samples of one are trained by another."""

    def plain() -> list[int]:
        torch.manual_seed(int(os.environ["RANK"]))  # or none at all
        return sorted(random_split(range(10), [6, 4])[1].indices)  # type: ignore[arg-type]

    first, second = run_ranks(plain)
    assert first != second

    def with_minitrainer() -> tuple[list[int], list[int]]:
        torch.manual_seed(int(os.environ["RANK"]))
        module, data = Idx(), Split()
        quiet().fit(module, data)
        return module.items(), sorted(data.val.indices)

    (trained_0, held_0), (trained_1, held_1) = run_ranks(with_minitrainer)
    assert held_0 == held_1
    assert sorted(trained_0 + trained_1 + held_0) == list(range(10))


def test_data_are_prepared_once() -> None:
    """D29: every rank runs the script, so every rank downloads, into the same file."""

    def prepare() -> None:
        with open("downloads", "a") as file:
            file.write("x")

    run_ranks(prepare)
    with open("downloads") as file:
        assert file.read() == "xx"
    os.remove("downloads")

    class Downloading(mt.DataModule):
        def prepare_data(self) -> None:
            prepare()

        def setup(self, stage: str) -> None:
            with open("downloads") as file:
                assert file.read() == "x"

        def train_dataloader(self) -> Any:
            return loader([1.0, 1.0])

    assert run_ranks(lambda: quiet().fit(Idx(), Downloading())) == [None, None]


class Unseeded(Sampler[int]):
    """Begins somewhere else on each rank."""

    def __iter__(self) -> Iterator[int]:
        start = 3 * int(os.environ["RANK"])
        return iter([(start + i) % 8 for i in range(8)])

    def __len__(self) -> int:
        return 8


def test_shares_of_other_orders_are_told_of() -> None:
    """D30: ranks that deal themselves shares of different orders lose and repeat samples."""
    shares = [list(DistributedSampler(range(8), 2, rank, seed=rank)) for rank in (0, 1)]
    assert len(set(shares[0] + shares[1])) < 8

    def rank() -> tuple[list[int], list[str]]:
        messages: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                messages.extend([record.getMessage()] * (record.levelno == logging.WARNING))

        logging.getLogger("minitrainer").addHandler(Keep())
        module = Idx()
        quiet().fit(module, DataLoader(Values(range(8)), sampler=Unseeded()))
        return module.items(), messages

    (first, messages), (second, none) = run_ranks(rank)
    assert len(set(first + second)) < 8
    assert [message[:5] for message in messages] == ["[D30]"]
    assert none == []


def test_plain_shuffle_beside_a_sampler_is_refused() -> None:
    """D31: and with the sampler alone nothing tells that it does not shuffle."""
    sampler = DistributedSampler(range(8), 2, 0, shuffle=False)
    with pytest.raises(ValueError, match="mutually exclusive") as raised:
        DataLoader(Values(range(8)), sampler=sampler, shuffle=True)
    assert codes(str(raised.value)) == ["D31"]
    assert list(sampler) == [0, 2, 4, 6]


def test_plain_shares_of_shares() -> None:
    """D32: a dataset that keeps every second sample, shared out once more: 4 of 8 are trained."""
    trained = []
    for rank in (0, 1):
        own = list(range(8))[rank::2]
        trained += [own[i] for i in DistributedSampler(own, 2, rank, shuffle=False)]
    assert len(set(trained)) == 4


class Killed(Dataset[int]):
    """Its worker gets the signal of a full /dev/shm."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGBUS)
        return 0


def test_plain_worker_without_shared_memory() -> None:
    """D34: torch guesses the cause, and does not say what to do."""
    with pytest.raises(RuntimeError) as raised:
        list(DataLoader(Killed(), num_workers=1))
    assert codes(str(raised.value)) == ["D34"]


class Counting(Dataset[int]):
    """An item is how many were read before it."""

    read = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return self.read - 1


def test_plain_state_of_a_dataset_is_that_of_its_worker() -> None:
    """D33: with 2 workers each counts for itself."""
    assert [int(item) for item in DataLoader(Counting())] == [0, 1, 2, 3]
    assert [int(item) for item in DataLoader(Counting(), num_workers=2)] == [0, 0, 1, 1]
