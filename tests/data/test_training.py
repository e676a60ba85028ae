from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from minitrainer.data import draw_order
from minitrainer.errors import BatchSizeError, EmptyDataError, LoaderError, SettingError
from minitrainer.step import MicroBatch
from tests.data.shares import (
    Items,
    flat,
    global_states,
    items_loader,
    rounds,
    shares,
    train,
    values,
)


class Uneven(Sampler[list[int]]):
    """Batches of 1, 2, 3, 1, 2, 3, ... items, shuffled."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        length = 1
        while order:
            yield order[:length]
            order = order[length:]
            length = length % 3 + 1

    def __len__(self) -> int:
        full, rest = divmod(self.size, 6)
        return 3 * full + (0, 1, 2, 2, 3, 3)[rest]


def uneven(size: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Items(size), batch_sampler=Uneven(size), **settings)


class Ready(Dataset[torch.Tensor]):
    """Items that are whole batches already: item i is i repeated i + 1 times."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


def test_21_samples_on_2_ranks() -> None:
    """Case B105 (counts): N=21, bs 2, 2 ranks: 11 and 10 items, 6 batches on both."""
    first, second = shares(lambda: items_loader(21, batch_size=2), 2)
    assert [values(b) for b in first] == [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18], [20]]
    assert [values(b) for b in second] == [[1, 3], [5, 7], [9, 11], [13, 15], [17, 19], []]
    assert [b.samples for b in first] == [2, 2, 2, 2, 2, 1]
    assert [b.samples for b in second] == [2, 2, 2, 2, 2, 0]
    assert second[-1] == MicroBatch(None, 5, 0, dry=True)
    assert [b.batch_idx for b in first] == [0, 1, 2, 3, 4, 5]
    assert all(b[4:] == MicroBatch(None, 0, 0)[4:] for b in first)  # the window sets the rest
    for rank in range(2):
        data = train(items_loader(21, batch_size=2), rank=rank, ranks=2)
        assert (data.num_batches, data.num_samples, data.num_dropped) == (6, 21, 0)
        assert data.batch_size == 2
        epoch = data.epoch(0)
        assert (epoch.num_batches, epoch.first_batch_idx) == (6, 0)
        assert [epoch.total_samples(i) for i in range(6)] == [4, 4, 4, 4, 4, 1]


@pytest.mark.parametrize(("size", "totals"), [(6, [1] * 6), (10, [4, 4, 2])])
def test_the_last_batch_keeps_its_own_count(size: int, totals: list[int]) -> None:
    """Cases B39 and B40 (counts): 6 batches of one; B32: N=10, bs 4 gives 4, 4 and 2."""
    data = train(items_loader(size, batch_size=totals[0]))
    for number in range(2):
        epoch = data.epoch(number)
        assert [epoch.total_samples(i) for i in range(len(totals))] == totals
        assert [b.samples for b in epoch] == totals


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 20, 21])
def test_each_sample_is_trained_once_in_the_drawn_order(
    size: int, batch_size: int, ranks: int
) -> None:
    def make() -> DataLoader[Any]:
        return items_loader(size, batch_size=batch_size, shuffle=True)

    dealt = shares(make, ranks, epoch=3)
    order = draw_order(make(), 7, 3)
    assert flat(rounds(dealt)) == order
    assert sorted(order) == list(range(size))
    epoch = train(make(), ranks=ranks).epoch(3)
    assert [len(r) for r in rounds(dealt)] == [
        epoch.total_samples(i) for i in range(epoch.num_batches)
    ]
    for share in dealt:
        assert [b.samples for b in share] == [len(values(b)) for b in share]
        assert all(b.dry == (b.samples == 0) for b in share)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [5, 16, 21])
def test_drop_last_drops_the_round_that_is_not_full(size: int, ranks: int) -> None:
    def make() -> DataLoader[Any]:
        return items_loader(size, batch_size=2, drop_last=True)

    whole = size - size % (2 * ranks)
    if whole == 0:
        with pytest.raises(EmptyDataError, match=r"5 samples, and drop_last drops them all\."):
            train(make(), ranks=ranks)
        return
    dealt = shares(make, ranks)
    assert flat(rounds(dealt)) == list(range(whole))
    assert {b.samples for share in dealt for b in share} == {2}
    data = train(make(), ranks=ranks)
    assert (data.num_samples, data.num_dropped) == (whole, size - whole)
    assert data.num_batches == len(dealt[0])


@pytest.mark.parametrize(
    ("layout", "num_workers"), [((1, 4), 0), ((1, 2), 2), ((2, 2), 0), ((4, 1), 0), ((2, 3), 0)]
)
def test_a_resume_goes_on_with_exactly_the_samples_not_seen(
    layout: tuple[int, int], num_workers: int
) -> None:
    """Case B66: shuffled, stopped after 20 of 64 samples of epoch 1, on any layout."""

    def make(batch_size: int) -> DataLoader[Any]:
        data = Items(64)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        return DataLoader(data, batch_size, sampler=sampler, num_workers=num_workers)

    ranks, batch_size = layout
    before = flat(rounds(shares(lambda: make(2), 2, epoch=1, most=5)))
    after = shares(lambda: make(batch_size), ranks, epoch=1, samples_seen=20, batch_idx=5)
    assert len(before) == 20
    assert before + flat(rounds(after)) == draw_order(make(2), 7, 1)
    assert sorted(before + flat(rounds(after))) == list(range(64))
    assert after[0][0].batch_idx == 5


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_on_the_same_layout_is_the_original_plan(*, ranks: int, drop_last: bool) -> None:
    def make() -> DataLoader[Any]:
        return items_loader(21, batch_size=2, shuffle=True, drop_last=drop_last)

    whole = shares(make, ranks, epoch=1)
    size = 2 * ranks
    for done in range(len(whole[0]) + 1):
        rest = shares(make, ranks, epoch=1, samples_seen=min(21, done * size), batch_idx=done)
        assert [[b[1:] for b in share] for share in rest] == [
            [b[1:] for b in share[done:]] for share in whole
        ]
        assert rounds(rest) == rounds(whole)[done:]
        data = train(make(), ranks=ranks).epoch(1, samples_seen=done * size, batch_idx=done)
        assert data.num_batches == len(whole[0]) - done
        assert data.first_batch_idx == done
        totals = [data.total_samples(i) for i in range(done, len(whole[0]))]
        assert totals == [len(r) for r in rounds(whole)[done:]]


def test_the_first_batch_after_a_save_at_step_3() -> None:
    """Case B60 (data): 20 items, bs 2: goes on with items 6, 7 at batch_idx 3, 7 more calls."""
    dataset = Items(20)
    data = train(DataLoader(dataset, batch_size=2)).epoch(0, samples_seen=6, batch_idx=3)
    rest = list(data)
    assert (values(rest[0]), rest[0].batch_idx, len(rest)) == ([6, 7], 3, 7)
    assert dataset.asked == list(range(6, 20))  # nothing is fetched to be skipped


def test_a_weighted_sampler_keeps_its_weights_on_2_ranks() -> None:
    """Case B23: weight 0 is never seen, 4 draws per rank, ranks draw different streams."""

    def make() -> DataLoader[Any]:
        return items_loader(8, sampler=WeightedRandomSampler([1.0] * 4 + [0.0] * 4, 8))

    for epoch in range(5):
        first, second = ([values(b) for b in share] for share in shares(make, 2, epoch))
        assert len(first) == len(second) == 4
        assert set(flat(first) + flat(second)) <= {0, 1, 2, 3}
        assert flat(rounds(shares(make, 2, epoch))) == draw_order(make(), 7, epoch)
    streams = [
        [flat([values(b) for b in share]) for share in shares(make, 2, epoch)] for epoch in range(5)
    ]
    assert any(first != second for first, second in streams)
    assert len({str(stream) for stream in streams}) > 1


def test_a_distributed_sampler_is_replaced_with_one_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(rank: int = 0) -> DataLoader[Any]:
        sampler = DistributedSampler(Items(5), 2, rank, shuffle=False)
        return items_loader(5, batch_size=1, sampler=sampler)

    assert rounds(shares(make, 2)) == [[0, 1], [2, 3], [4]]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        data = train(make(), ranks=2)
        list(data.epoch(0))
        list(data.epoch(1))
    assert [r.message.startswith("DistributedSampler is replaced") for r in caplog.records] == [
        True
    ]


@pytest.mark.parametrize(("ranks", "num_workers"), [(1, 0), (1, 2), (2, 0), (3, 0)])
def test_batches_of_a_batch_sampler_are_dealt_whole(ranks: int, num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return uneven(15, num_workers=num_workers)

    batches = draw_order(make(), 7, 2)
    assert [len(batch) for batch in batches] == [1, 2, 3, 1, 2, 3, 1, 2]
    dealt = shares(make, ranks, epoch=2)
    for rank, share in enumerate(dealt):
        own = [values(b) for b in share if not b.dry]
        assert own == batches[rank::ranks]
        assert [b.samples for b in share if not b.dry] == [len(batch) for batch in own]
        assert len(share) == -(-8 // ranks)
    data = train(make(), ranks=ranks)
    assert (data.num_batches, data.num_dropped) == (-(-8 // ranks), 0)
    assert (data.batch_size, data.num_samples) == (None, None)
    epoch = data.epoch(2)
    assert [epoch.total_samples(i) for i in range(epoch.num_batches)] == [
        sum(map(len, batches[i : i + ranks])) for i in range(0, 8, ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_batches_of_a_batch_sampler_resume_on_any_layout(ranks: int) -> None:
    batches = draw_order(uneven(15), 7, 1)
    seen = sum(map(len, batches[:4]))
    rest = shares(lambda: uneven(15), ranks, epoch=1, samples_seen=seen, batch_idx=2)
    for rank, share in enumerate(rest):
        assert [values(b) for b in share if not b.dry] == batches[4 + rank :: ranks]
        assert share[0].batch_idx == 2


def test_a_stock_batch_sampler_is_dealt_by_samples() -> None:
    def make() -> DataLoader[Any]:
        return items_loader(5, batch_sampler=BatchSampler(range(5), 2, drop_last=False))

    assert rounds(shares(make, 2)) == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_items_that_are_batches_are_dealt_whole_and_counted(ranks: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Ready(), batch_size=None, shuffle=True)

    order = draw_order(make(), 7, 0)
    for rank, share in enumerate(shares(make, ranks)):
        assert [values(b)[0] for b in share if not b.dry] == order[rank::ranks]
        assert all(b.samples == len(values(b)) for b in share)
        assert len(share) == -(-5 // ranks)
    data = train(make(), ranks=ranks)
    assert data.num_batches == data.epoch(0).num_batches == -(-5 // ranks)
    assert data.epoch(0).total_samples(0) == ranks  # a guess: one sample for each batch
    seen = sum(index + 1 for index in order[:2])
    for other in (1, 2, 3):
        rest = shares(make, other, samples_seen=seen, batch_idx=2 // ranks)
        for rank, share in enumerate(rest):
            assert [values(b)[0] for b in share if not b.dry] == order[2 + rank :: other]
            assert len(share) == -(-3 // other)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_list_of_batches_is_dealt_whole_with_true_counts(ranks: int) -> None:
    batches = [torch.arange(i, i + i % 3 + 1) for i in range(7)]
    sizes = [1, 2, 3, 1, 2, 3, 1]
    for rank in range(ranks):
        data = train(batches, rank=rank, ranks=ranks)
        assert (data.num_batches, data.num_samples) == (-(-7 // ranks), 13)
        epoch = data.epoch(0)
        share = list(epoch)
        own = [b.batch for b in share if not b.dry]
        assert all(a is b for a, b in zip(own, batches[rank::ranks], strict=True))
        assert [b.samples for b in share if not b.dry] == sizes[rank::ranks]
        assert [epoch.total_samples(i) for i in range(len(share))] == [
            sum(sizes[i : i + ranks]) for i in range(0, 7, ranks)
        ]
    rest = list(train(batches).epoch(0, samples_seen=6, batch_idx=3))
    assert [b.batch_idx for b in rest] == [3, 4, 5, 6]
    assert rest[0].batch is batches[3]
    assert train(batches, limit=2).num_samples == 3


class Endless(Sampler[int]):
    drawn = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            for item in torch.randperm(5).tolist():
                self.drawn += 1
                yield item


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_endless_sampler_is_dealt_up_to_the_limit(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        workers = {"num_workers": num_workers}
        return items_loader(5, sampler=Endless(), batch_size=2, **workers)

    data = train(make(), ranks=2, limit=4)
    assert data.num_batches is data.epoch(0).num_batches is None
    assert data.num_samples is None
    assert data.epoch(0).total_samples(0) == 4
    whole = rounds(shares(make, 2, limit=4))
    assert [len(r) for r in whole] == [4, 4, 4, 4]
    assert sorted(flat(whole)[:5]) == sorted(flat(whole)[5:10]) == [0, 1, 2, 3, 4]
    rest = shares(make, 1, limit=4, samples_seen=8, batch_idx=2)
    assert flat(rounds(rest)) == flat(whole)[8:12]
    assert [b.batch_idx for b in rest[0]] == [2, 3]
    # Workers are not set to fetch batches that the limit will never take.
    sampler = Endless()
    limited = items_loader(5, sampler=sampler, batch_size=2, num_workers=num_workers)
    assert len(list(train(limited, limit=1).epoch(0))) == 1
    assert sampler.drawn == 2


class Unsized(Sampler[Any]):
    """Comes to an end, but does not tell where."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units

    def __iter__(self) -> Iterator[Any]:
        return iter(self.units)


def test_ranks_run_dry_for_ever_when_the_length_is_unknown() -> None:
    def make() -> DataLoader[Any]:
        return items_loader(5, sampler=Unsized([0, 1, 2, 3, 4]), batch_size=2)

    first, second = shares(make, 2, most=5)
    assert [values(b) for b in first] == [[0, 2], [4], [], [], []]
    assert [values(b) for b in second] == [[1, 3], [], [], [], []]
    assert [b.batch_idx for b in second] == [0, 1, 2, 3, 4]
    assert [b.dry for b in second] == [False, True, True, True, True]
    assert [values(b) for b in shares(make, 1)[0]] == [[0, 1], [2, 3], [4]]
    limited = shares(make, 2, limit=3)
    assert [len(share) for share in limited] == [3, 3]


def test_unsized_samplers_of_batches_resume_behind_the_samples_seen() -> None:
    def batches() -> DataLoader[Any]:
        return items_loader(6, batch_sampler=Unsized([[0], [1, 2], [3, 4], [5]]))

    def keys() -> DataLoader[Any]:
        return DataLoader(Ready(), batch_size=None, sampler=Unsized([0, 1, 2, 3]))

    def dropped() -> DataLoader[Any]:
        return items_loader(5, sampler=Unsized([0, 1, 2, 3, 4]), batch_size=2, drop_last=True)

    assert [values(b) for b in shares(batches, 1, samples_seen=3)[0]] == [[3, 4], [5]]
    first, second = shares(batches, 2, most=2)
    assert [values(b) for b in first] == [[0], [3, 4]]
    assert [b.samples for b in second] == [2, 1]
    assert [values(b)[0] for b in shares(keys, 1, samples_seen=3)[0]] == [2, 3]
    assert [values(b) for b in shares(dropped, 1)[0]] == [[0, 1], [2, 3]]
    assert train(dropped()).num_dropped is None


@pytest.mark.parametrize(
    ("limit", "calls"), [(0.5, 5), (3, 3), (0.01, 1), (0, 0), (0.0, 0), (1.0, 10), (99, 10)]
)
def test_a_limit_is_exact_and_asks_for_nothing_more(limit: int | float, calls: int) -> None:
    """Case B111: 10 batches, limit 0.5, 3, 0.01, 0; not one item too many is asked for."""
    dataset = Items(20)
    data = train(DataLoader(dataset, batch_size=2), limit=limit)
    assert data.num_batches == data.epoch(0).num_batches == calls
    assert data.num_samples == 2 * calls
    assert [b.batch_idx for b in data.epoch(0)] == list(range(calls))
    assert dataset.asked == list(range(2 * calls))


def test_a_limit_counts_micro_batches_of_each_rank() -> None:
    dealt = shares(lambda: items_loader(21, batch_size=2), 2, limit=3)
    assert rounds(dealt) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    rest = shares(lambda: items_loader(21, batch_size=2), 2, limit=3, samples_seen=8, batch_idx=2)
    assert rounds(rest) == [[8, 9, 10, 11]]
    rest = shares(lambda: items_loader(21, batch_size=2), 2, limit=3, samples_seen=10)
    assert rounds(rest) == [[10, 11]]
    dealt = shares(lambda: uneven(15), 2, limit=2)
    assert [len(share) for share in dealt] == [2, 2]


@pytest.mark.parametrize("limit", [True, False, -1, -0.5, 1.5, float("nan"), "3"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(SettingError, match="limit on train batches"):
        train(items_loader(4), limit=limit)


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(SettingError, match="has no length"):
        train(items_loader(5, sampler=Endless()), limit=0.5)


@pytest.mark.parametrize(
    "loader",
    [
        items_loader(0),
        DataLoader(Items(0), batch_sampler=Uneven(0)),
        DataLoader(Items(0), batch_size=None),
        [],
    ],
)
def test_an_empty_loader_is_refused(loader: Any) -> None:
    with pytest.raises(EmptyDataError, match=r"The train loader has no samples\."):
        train(loader)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (Items(3), "A dataset has no batches"),
        ({"a": [1]}, "not an iterable of batches"),
        ("text", "not an iterable of batches"),
        (None, "not an iterable of batches"),
        (lambda: iter([1]), "not an iterable of batches"),
        ([items_loader(3), items_loader(3)], "2 loaders"),
    ],
)
def test_what_is_not_a_loader_is_refused(loader: Any, why: str) -> None:
    with pytest.raises(LoaderError, match=why):
        train(loader)


def test_a_list_with_a_batch_that_cannot_be_counted_is_refused_at_once() -> None:
    with pytest.raises(BatchSizeError, match="type float"):
        train([torch.zeros(2), 3.5])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_leaves_the_global_random_states_alone(num_workers: int) -> None:
    torch.manual_seed(11)
    data = train(items_loader(8, shuffle=True, batch_size=2, num_workers=num_workers))
    states = global_states()
    for epoch in range(2):
        assert len(list(data.epoch(epoch))) == 4
    assert global_states() == states


def test_settings_of_the_users_loader_are_kept() -> None:
    def collate(items: list[int]) -> list[int]:
        return [item + 100 for item in items]

    loader = items_loader(4, batch_size=2, collate_fn=collate)
    assert [b.batch for b in train(loader).epoch(0)] == [[100, 101], [102, 103]]

    class Bulk(Items):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    assert [values(b) for b in train(DataLoader(Bulk(3), batch_size=2)).epoch(0)] == [[0, -1], [-2]]


def test_settings_of_the_users_workers_are_kept() -> None:
    def configure(worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.offset = 100 * (worker + 1)

    class Offset(Items):
        offset = 0

        def __getitem__(self, index: int) -> int:
            return self.offset + index

    sampler = Endless()
    settings = {"num_workers": 2, "prefetch_factor": 1, "worker_init_fn": configure}
    loader = DataLoader(Offset(5), batch_size=2, sampler=sampler, **settings)
    micro_batches = iter(train(loader).epoch(0))
    assert [min(values(next(micro_batches))) // 100 for _ in range(2)] == [1, 2]
    assert sampler.drawn == 2 * (2 + 2)  # one batch ahead for each of the two workers


def test_pinning_without_a_gpu_and_out_of_order_batches_are_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Warnings are errors here: torch would warn of pinned memory that cannot be had.
    if torch.cuda.is_available():
        pytest.skip("pinned memory is kept where there is a GPU")
    loader = items_loader(6, batch_size=2, pin_memory=True, num_workers=2, in_order=False)
    with caplog.at_level(logging.INFO):
        assert flat([values(b) for b in train(loader).epoch(0)]) == list(range(6))
    assert [r.message for r in caplog.records] == [
        "in_order=False is ignored: the order of samples is part of the run."
    ]
