from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from minitrainer.data import draw_order
from minitrainer.errors import EmptyDataError, LoaderError, SettingError
from minitrainer.step import MicroBatch
from tests.data.shares import (
    Again,
    Flow,
    Items,
    SizedFlow,
    evaluate,
    flat,
    global_states,
    items_loader,
    values,
)

BATCHES = [torch.arange(i, i + i % 3 + 1) for i in range(7)]


def all_ranks(make: Any, ranks: int, **settings: Any) -> list[MicroBatch]:
    """The batches of all ranks, in the order of `batch_idx`."""
    found = [
        micro_batch
        for rank in range(ranks)
        for micro_batch in evaluate(make(), rank=rank, ranks=ranks, **settings)
    ]
    return sorted(found, key=lambda b: b.batch_idx)


SHARES = [(size, ranks, 0) for size in (1, 2, 4, 5, 20, 21) for ranks in (1, 2, 3)]


@pytest.mark.parametrize(("size", "ranks", "num_workers"), [*SHARES, (21, 2, 2)])
def test_every_sample_counts_once(size: int, ranks: int, num_workers: int) -> None:
    """Case B31: N items on 2 ranks, bs 4: count N and, for 21, a mean of exactly 10."""

    def make() -> DataLoader[Any]:
        return items_loader(size, batch_size=4, num_workers=num_workers)

    batches = all_ranks(make, ranks)
    alone = [values(b) for b in evaluate(make())]
    assert [values(b) for b in batches] == alone
    assert flat(alone) == list(range(size))
    assert [b.batch_idx for b in batches] == list(range(len(alone)))
    assert [b.samples for b in batches] == [len(batch) for batch in alone]
    assert sum(b.samples for b in batches) == size
    if size == 21:
        assert sum(flat(alone)) / sum(b.samples for b in batches) == 10.0
    numbers = []
    for rank in range(ranks):
        data = evaluate(make(), rank=rank, ranks=ranks)
        assert (data.num_total_batches, data.num_samples) == (len(alone), size)
        assert data.num_batches == len(batches[rank::ranks])
        numbers.append(data.num_batches)
    assert sum(numbers) == len(alone)


def test_the_last_batch_counts_with_its_own_size() -> None:
    """Case B32 (data): N=10, bs 4: batches of 4, 4 and 2, so the mean is 4.5."""
    batches = list(evaluate(items_loader(10, batch_size=4)))
    assert [b.samples for b in batches] == [4, 4, 2]
    means = [sum(values(b)) / b.samples for b in batches]
    assert sum(m * b.samples for m, b in zip(means, batches, strict=True)) / 10 == 4.5


def test_a_distributed_sampler_does_not_pad() -> None:
    """Case B31: a padding sampler given by the user is replaced as well."""

    def make() -> DataLoader[Any]:
        sampler = DistributedSampler(Items(21), 2, 0, shuffle=False)
        return items_loader(21, batch_size=4, sampler=sampler)

    assert flat([values(b) for b in all_ranks(make, 2)]) == list(range(21))


def test_a_shuffled_loader_has_the_same_order_in_every_evaluation() -> None:
    def make() -> DataLoader[Any]:
        return items_loader(21, batch_size=4, shuffle=True)

    data = evaluate(make())
    states = global_states()
    first = [values(b) for b in data]
    assert flat(first) == draw_order(make(), 7, 0) != list(range(21))
    assert [values(b) for b in data] == first
    assert global_states() == states
    assert [values(b) for b in all_ranks(make, 2)] == first


def test_batches_of_a_batch_sampler_and_ready_batches_are_dealt_whole() -> None:
    class Ready(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> torch.Tensor:
            return BATCHES[index]

    plan = [[0], [1, 2], [3, 4, 5]]
    batches = all_ranks(lambda: items_loader(6, batch_sampler=plan), 2)
    assert [values(b) for b in batches] == plan
    assert [b.samples for b in batches] == [1, 2, 3]
    data = evaluate(items_loader(6, batch_sampler=plan), ranks=2, rank=1)
    assert (data.num_total_batches, data.num_batches, data.num_samples) == (3, 1, None)
    for make in (lambda: DataLoader(Ready(), batch_size=None), lambda: list(BATCHES)):
        batches = all_ranks(make, 2)
        assert [values(b) for b in batches] == [b.tolist() for b in BATCHES]
        assert [b.samples for b in batches] == [1, 2, 3, 1, 2, 3, 1]
    assert evaluate(list(BATCHES), limit=2).num_samples == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_streams_are_dealt_whole_without_dry_batches(ranks: int) -> None:
    for make in (lambda: Again(BATCHES), lambda: iter(BATCHES)):
        batches = all_ranks(make, ranks)
        assert [values(b) for b in batches] == [b.tolist() for b in BATCHES]
        assert [b.batch_idx for b in batches] == list(range(7))
        assert not any(b.dry for b in batches)
    batches = all_ranks(lambda: DataLoader(Flow(10), batch_size=4), ranks)
    assert flat([values(b) for b in batches]) == list(range(10))
    data = evaluate(DataLoader(SizedFlow(10), batch_size=4), ranks=2, rank=1)
    assert (data.num_total_batches, data.num_batches, data.num_samples) == (3, 1, None)
    assert evaluate(Again(BATCHES)).num_batches is None


def test_a_dataset_that_shards_itself_is_left_alone() -> None:
    class Sharded(Flow):
        shards_itself = True

    data = evaluate(DataLoader(Sharded(3), batch_size=2), rank=1, ranks=2)
    assert [(values(b), b.batch_idx) for b in data] == [([0, 1], 1), ([2], 3)]


class Unsized(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def test_a_sampler_without_a_length_is_followed_to_its_end() -> None:
    def make() -> DataLoader[Any]:
        return items_loader(5, sampler=Unsized(5), batch_size=2)

    assert [values(b) for b in all_ranks(make, 2)] == [[0, 1], [2, 3], [4]]
    assert evaluate(make()).num_total_batches is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("limit", "calls"), [(0.5, 5), (3, 3), (0.01, 1), (0, 0), (0.0, 0), (1.0, 10)]
)
def test_a_limit_counts_batches_of_each_rank(ranks: int, limit: int | float, calls: int) -> None:
    """Case B111 for evaluation: 10 batches for each rank."""
    for rank in range(ranks):
        dataset = Items(20 * ranks)
        data = evaluate(DataLoader(dataset, batch_size=2), rank=rank, ranks=ranks, limit=limit)
        assert (data.num_batches, data.num_total_batches) == (calls, calls * ranks)
        assert data.num_samples == 2 * calls * ranks
        assert len(list(data)) == calls
        assert len(dataset.asked) == 2 * calls
    stream = Again(BATCHES)
    assert len(list(evaluate(stream, limit=3))) == stream.asked == 3
    listed = evaluate(list(BATCHES), rank=1, ranks=2, limit=2)
    assert [b.batch_idx for b in listed] == [1, 3]


def test_only_drop_last_of_the_loader_leaves_samples_out_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        data = evaluate(items_loader(21, batch_size=4, drop_last=True))
        for _ in range(2):
            assert flat([values(b) for b in data]) == list(range(20))
    assert (data.num_total_batches, data.num_samples) == (5, 20)
    assert [record.message for record in caplog.records] == [
        "The validation loader has drop_last=True: 1 of 21 samples are left out."
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        evaluate(items_loader(20, batch_size=4, drop_last=True))
    assert not caplog.records


def test_mistakes_name_the_stage() -> None:
    with pytest.raises(EmptyDataError, match=r"The test loader has no samples\."):
        evaluate(items_loader(0), stage="test")
    with pytest.raises(LoaderError, match="The test loader is of type Items"):
        evaluate(Items(3), stage="test")
    with pytest.raises(SettingError, match="limit on test batches is -1"):
        evaluate(items_loader(3), stage="test", limit=-1)
