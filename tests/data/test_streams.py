from __future__ import annotations

import logging
import multiprocessing
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

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
    rounds,
    shares,
    train,
    values,
)


class Shuffled(Flow):
    """Shuffles by the global generators, at the start and by a buffer as it goes on."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        yield from np.random.permutation(order).tolist()


class Buffered(Flow):
    def __iter__(self) -> Iterator[int]:
        waiting = list(range(self.size))
        while waiting:
            yield waiting.pop(random.randrange(min(3, len(waiting))))


class Aware(Flow):
    """Shares its items out over the workers, as the manual of torch shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.size, step))


class Sharded(Aware):
    """Shares its items out over ranks and workers."""

    shards_itself = True

    def __init__(self, rank: int, sizes: list[int]) -> None:
        super().__init__(sizes[rank])
        self.first = 100 * rank

    def __iter__(self) -> Iterator[int]:
        return (self.first + item for item in super().__iter__())


class OwnLoader(DataLoader[Any]):
    """A loader that cannot be rebuilt, because it does something else."""

    def __iter__(self) -> Any:
        return (batch + 100 for batch in super().__iter__())


BATCHES = [torch.arange(i, i + i % 3 + 1) for i in range(7)]  # of 1, 2, 3, 1, 2, 3, 1 samples


@pytest.mark.parametrize("sized", [False, True])
def test_one_rank_takes_an_iterable_as_it_is(*, sized: bool) -> None:
    class Sized(Again):
        def __len__(self) -> int:
            return len(self.batches)

    source = Sized(BATCHES) if sized else Again(BATCHES)
    data = train(source)
    assert data.num_batches == (7 if sized else None)
    for _ in range(2):
        epoch = data.epoch(0)
        assert epoch.num_batches == data.num_batches
        for number, micro_batch in enumerate(epoch):
            assert micro_batch == MicroBatch(BATCHES[number], number, len(BATCHES[number]))
            assert epoch.total_samples(number) == len(BATCHES[number])
            # No batch is asked for before its turn.
            assert source.asked % 7 == (number + 1) % 7


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_iterable_is_dealt_by_batches_then_ranks_run_dry(ranks: int) -> None:
    for rank, share in enumerate(shares(lambda: Again(BATCHES), ranks, most=6)):
        own = BATCHES[rank::ranks]
        assert [b.batch for b in share[: len(own)]] == own
        assert [b.samples for b in share] == [len(b) for b in own] + [0] * (6 - len(own))
        assert [b.dry for b in share] == [False] * len(own) + [True] * (6 - len(own))
        assert [b.batch_idx for b in share] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stream_resumes_behind_the_samples_seen(ranks: int) -> None:
    """The first 4 batches hold 7 samples; the rest is dealt anew, on any number of ranks."""
    rest = shares(lambda: Again(BATCHES), ranks, samples_seen=7, batch_idx=2, most=3)
    for rank, share in enumerate(rest):
        own = BATCHES[4 + rank :: ranks]
        assert [b.batch for b in share if not b.dry] == own
        assert share[0].batch_idx == 2


KINDS = [
    *(
        (kind, workers, False)
        for kind in (Flow, SizedFlow, Aware, Shuffled, Buffered)
        for workers in (0, 2)
    ),
    *[(SizedFlow, 0, True), (SizedFlow, 2, True), (Flow, 1, True)],
]


@pytest.mark.parametrize(("kind", "num_workers", "drop_last"), KINDS)
def test_each_item_of_a_stream_is_trained_once(
    *, kind: type[Flow], num_workers: int, drop_last: bool
) -> None:
    def make() -> DataLoader[Any]:
        settings: dict[str, Any] = {"num_workers": num_workers, "drop_last": drop_last}
        return DataLoader(kind(10), batch_size=4, **settings)

    # Each worker makes batches of its own items, and has a last one.
    per_worker = {0: [10], 1: [10], 2: [5, 5]}[num_workers]
    full = sum(n // 4 for n in per_worker)
    expected = full if drop_last else sum(-(-n // 4) for n in per_worker)
    for ranks in (1, 2) if num_workers == 0 else (2,):
        most = None if ranks == 1 or kind is SizedFlow else 3
        dealt = shares(make, ranks, epoch=1, most=most)
        items = [item for share in dealt for b in share for item in values(b)]
        assert len(items) == len(set(items)) == (4 * full if drop_last else 10)
        assert all(b.samples == len(values(b)) for share in dealt for b in share)
        if kind is SizedFlow:
            data = train(make(), ranks=ranks)
            assert data.num_batches == data.epoch(0).num_batches == -(-expected // ranks)
            assert [len(share) for share in dealt] == [data.num_batches] * ranks
            assert train(make()).num_batches == expected


def live(kind: type[Flow]) -> Any:
    class Live:
        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor([item]) for item in kind(9))

    return Live()


def loaded(kind: type[Flow]) -> Any:
    return DataLoader(kind(9), batch_size=2)


def loaded_by_a_worker(kind: type[Flow]) -> Any:
    return DataLoader(kind(9), batch_size=2, num_workers=1)


@pytest.mark.parametrize("kind", [Shuffled, Buffered])
@pytest.mark.parametrize("make", [live, loaded, loaded_by_a_worker])
def test_ranks_see_the_same_order_though_their_generators_differ(
    kind: type[Flow], make: Callable[[type[Flow]], Any]
) -> None:
    dealt = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        states = global_states()
        dealt.append(list(islice(train(make(kind), rank=rank, ranks=2).epoch(0), 6)))
        assert global_states() == states
    items = [item for share in dealt for b in share for item in values(b)]
    assert sorted(items) == list(range(9))
    assert items != list(range(9))


def test_a_stream_that_shuffles_at_its_start_resumes_exactly() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Shuffled(20), batch_size=3, num_workers=2, persistent_workers=True)

    data = train(make())
    for epoch in range(2):
        whole = [values(b) for b in data.epoch(epoch)]
    random.seed(99)
    rest = train(make()).epoch(1, samples_seen=6, batch_idx=2)
    assert [values(b) for b in rest] == whole[2:]
    assert whole != [values(b) for b in train(make()).epoch(0)]


class Noisy(Flow):
    """An item is itself, and what the generators of numpy, random and torch give."""

    def __iter__(self) -> Iterator[Any]:
        for item in range(self.size):
            noise = [np.random.randn(), random.random(), torch.rand(()).item()]
            yield torch.tensor([item, *noise])


def noisily(items: list[torch.Tensor]) -> torch.Tensor:
    """Collate and draw, which must not reach the items to come."""
    np.random.randn()
    torch.rand(len(items))
    return torch.stack(items)


@pytest.mark.parametrize("collate", [None, noisily])
def test_what_is_drawn_for_an_item_of_a_stream_is_the_same_on_every_layout(collate: Any) -> None:
    """Case B26 kind for streams: workers, ranks, batch sizes and a resume."""

    def rows(ranks: int, num_workers: int, size: int, **resume: int) -> list[list[float]]:
        dealt = shares(
            lambda: DataLoader(Noisy(12), size, num_workers=num_workers, collate_fn=collate),
            ranks,
            epoch=1,
            most=12,
            **resume,
        )
        return sorted(
            row for share in dealt for b in share if not b.dry for row in b.batch.tolist()
        )

    before = global_states()
    whole = rows(1, 0, 2)
    assert global_states() == before
    for column in zip(*whole, strict=True):
        assert len(set(column)) == 12
    for ranks, num_workers, size in [(1, 1, 2), (1, 2, 3), (2, 0, 3), (2, 2, 2)]:
        assert rows(ranks, num_workers, size) == whole
    assert rows(1, 0, 2, samples_seen=4, batch_idx=2) == whole[4:]


def test_workers_of_a_dataset_that_shards_itself_draw_each_their_own() -> None:
    class Own(Noisy):
        shards_itself = True

    def noise(rank: int, epoch: int, **resume: int) -> list[list[float]]:
        loader = DataLoader(Own(3), num_workers=2, persistent_workers=True)
        data = train(loader, rank=rank, ranks=2)
        for before in range(epoch):
            list(islice(data.epoch(before), 6))
        return [row for b in islice(data.epoch(epoch, **resume), 6) for row in b.batch.tolist()]

    found = [noise(rank, epoch) for rank in range(2) for epoch in range(2)]
    assert noise(1, 1) == found[3]
    later = [row for rows in found for row in rows if row[0] > 0]  # they start alike, to shuffle
    assert len({row[1] for row in later}) == len(later) == 16


def test_a_dataset_that_shards_itself_is_left_alone() -> None:
    """Case B10 (data): rank 0 has 3 batches, rank 1 has 5: each item once, then dry."""

    def make(rank: int) -> DataLoader[Any]:
        return DataLoader(Sharded(rank, [3, 5]), batch_size=1)

    first, second = (
        [values(b) for b in islice(train(make(rank), rank=rank, ranks=2).epoch(0), 6)]
        for rank in range(2)
    )
    assert first == [[0], [1], [2], [], [], []]
    assert second == [[100], [101], [102], [103], [104], []]
    assert train(make(0), ranks=2).num_batches is None
    rest = train(make(1), rank=1, ranks=2).epoch(0, samples_seen=6, batch_idx=3)
    assert [values(b) for b in islice(rest, 3)] == [[103], [104], []]


def test_a_dataset_that_shards_itself_shares_over_its_workers() -> None:
    loader = DataLoader(Sharded(1, [0, 6]), batch_size=2, num_workers=2)
    batches = [values(b) for b in train(loader).epoch(0)]
    assert batches == [[100, 102], [101, 103], [104], [105]]


def test_the_length_of_a_dataset_that_shards_itself_tells_little() -> None:
    class Sized(Sharded):
        def __len__(self) -> int:
            return self.size

    def num_batches(ranks: int, num_workers: int) -> int | None:
        loader = DataLoader(Sized(0, [6]), batch_size=2, num_workers=num_workers)
        return train(loader, ranks=ranks).num_batches

    assert [num_batches(*layout) for layout in [(1, 0), (1, 1), (1, 2), (2, 0)]] == [
        *(3, 3),
        *(None, None),
    ]


@pytest.mark.parametrize(
    ("ranks", "num_workers", "words"),
    [(1, 0, None), (2, 0, "2 ranks reads"), (1, 2, "2 workers"), (2, 2, "2 ranks x 2 workers")],
)
def test_one_notice_tells_who_reads_the_whole_stream(
    ranks: int, num_workers: int, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        data = train(DataLoader(Flow(4), num_workers=num_workers), ranks=ranks)
        for epoch in range(2):
            next(iter(data.epoch(epoch)))
    messages = [record.message for record in caplog.records]
    assert len(messages) == (words is not None)
    assert all(words in m and "shards_itself" in m for m in messages)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(DataLoader(Sharded(0, [4]), num_workers=num_workers), ranks=ranks)
    assert not caplog.records


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_reaches_the_dataset_of_a_stream(num_workers: int) -> None:
    """Case B29 for streams: persistent workers, 3 epochs."""

    class Told(Flow):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * self.size)

    loader = DataLoader(
        Told(4), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    data = train(loader)
    seen, pids = [], set()
    for epoch in range(3):
        seen.append([values(b) for b in data.epoch(epoch)])
        pids.add(tuple(sorted(child.pid or 0 for child in multiprocessing.active_children())))
    assert seen == [[[epoch] * 2] * 2 for epoch in range(3)]
    assert len(pids) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_limit_ends_all_ranks_alike_and_asks_for_nothing_more(ranks: int) -> None:
    """Case B111 for streams: limit 3 of 10 batches."""
    for rank in range(ranks):
        dataset = Flow(20)
        data = train(DataLoader(dataset, batch_size=2), rank=rank, ranks=ranks, limit=3)
        assert data.num_batches is None
        assert len(list(data.epoch(0))) == 3
        assert dataset.asked == list(range(2 * (2 * ranks + rank + 1)))
    short = shares(lambda: Again(BATCHES[:3]), 2, limit=3)
    assert [[b.dry for b in share] for share in short] == [
        [False, False, True],
        [False, True, True],
    ]
    rest = shares(lambda: Again(BATCHES), 2, limit=3, samples_seen=7, batch_idx=2)
    assert [len(share) for share in rest] == [1, 1]
    nothing = Again(BATCHES)
    assert list(train(nothing, limit=0).epoch(0)) == []
    assert nothing.asked == 0


def test_a_source_is_let_go_when_the_limit_is_reached() -> None:
    class Closing:
        closed = 0

        def __iter__(self) -> Iterator[Any]:
            try:
                yield from BATCHES
            finally:
                self.closed += 1

    source = Closing()
    epoch = train(source, limit=2).epoch(0)
    assert [b.samples for b in epoch] == [1, 2]
    assert source.closed == 1  # workers end here, though the epoch's object lives on


def test_a_fraction_needs_a_length() -> None:
    with pytest.raises(SettingError, match="has no length"):
        train(Again(BATCHES), limit=0.5)
    sized = train(DataLoader(SizedFlow(10), batch_size=2), limit=0.5)
    assert sized.num_batches == sized.epoch(0).num_batches == 2
    assert len(list(sized.epoch(0))) == 2


def test_the_length_of_the_rest_of_a_sized_stream() -> None:
    for ranks, left in ((1, 2), (2, 1)):
        data = train(DataLoader(SizedFlow(10), batch_size=4), ranks=ranks)
        epoch = data.epoch(0, samples_seen=4, batch_idx=1)
        assert epoch.num_batches == len(list(epoch)) == left


def test_a_length_is_taken_at_its_word() -> None:
    class Lying(Again):
        def __len__(self) -> int:
            return 9

    assert [b.dry for b in train(Lying(BATCHES)).epoch(0)] == [False] * 7 + [True] * 2


def test_a_generator_can_be_read_once() -> None:
    data = train(batch for batch in BATCHES)
    assert len(list(data.epoch(0))) == 7
    with pytest.raises(LoaderError, match="The train loader is a generator, which can be read"):
        data.epoch(1)
    evaluation = evaluate(batch for batch in BATCHES)
    assert len(list(evaluation)) == 7
    with pytest.raises(LoaderError, match="The validation loader is a generator"):
        list(evaluation)


def test_an_empty_sized_stream_is_refused() -> None:
    with pytest.raises(EmptyDataError, match="no samples"):
        train(DataLoader(SizedFlow(0)))
    assert list(train(DataLoader(Flow(0))).epoch(0)) == []


def test_a_loader_that_iterates_in_its_own_way_is_dealt_by_batches() -> None:
    def make() -> DataLoader[Any]:
        dataset = Items(7)
        return OwnLoader(dataset, batch_size=2, sampler=RandomSampler(dataset))

    dealt = []
    for rank in range(2):
        torch.manual_seed(rank)
        dealt.append(list(train(make(), rank=rank, ranks=2).epoch(0)))
    assert [len(share) for share in dealt] == [2, 2]
    assert sorted(flat(rounds(dealt))) == list(range(100, 107))

    class Counts(RandomSampler):
        epochs: tuple[int, ...] = ()

        def set_epoch(self, epoch: int) -> None:
            self.epochs += (epoch,)

    sampler = Counts(Items(7))
    train(OwnLoader(Items(7), sampler=sampler)).epoch(4)
    assert sampler.epochs == (4,)
    with pytest.raises(LoaderError, match="DistributedSampler deals out the share"):
        train(OwnLoader(Items(7), sampler=DistributedSampler(Items(7), 2, 0)), ranks=2)


def test_a_raw_iterable_dataset_yields_batches() -> None:
    class Ready(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(BATCHES)

    assert [b.samples for b in train(Ready()).epoch(0)] == [1, 2, 3, 1, 2, 3, 1]


def test_the_guess_of_the_total_is_the_same_on_all_ranks() -> None:
    # Batches of 4 and 2 samples: were it taken from them, the ranks would scale differently.
    for rank in range(2):
        epoch = train(DataLoader(Flow(6), batch_size=4), rank=rank, ranks=2).epoch(0)
        micro_batches = iter(epoch)
        totals = [epoch.total_samples(0)]
        totals += [epoch.total_samples(next(micro_batches).batch_idx) for _ in range(3)]
        assert totals == [8, 8, 8, 8]


def test_the_guess_of_the_total_is_exact_for_the_newest_batch_on_one_rank() -> None:
    epoch = train(DataLoader(Flow(6), batch_size=4)).epoch(0)
    micro_batches = iter(epoch)
    totals = [epoch.total_samples(next(micro_batches).batch_idx) for _ in range(2)]
    assert totals == [4, 2]
