from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minitrainer.data import draw_order
from minitrainer.data.sampling import iterate_order, order_length, sampling_of, tell_epoch
from minitrainer.errors import LoaderError
from tests.data.shares import Items, global_states

SIZE = 16


class OwnRng(Sampler[int]):
    """Shuffles by generators that it keeps, of each library."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.numpy_rng = np.random.default_rng(1)
        self.old_numpy_rng = np.random.RandomState(1)
        self.torch_rng = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.rng.shuffle(order)
        order = self.numpy_rng.permutation(order).tolist()
        order = self.old_numpy_rng.permutation(order).tolist()
        return iter([order[i] for i in torch.randperm(SIZE, generator=self.torch_rng)])

    def __len__(self) -> int:
        return SIZE


class GlobalRng(Sampler[int]):
    """Shuffles by the global generators."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        yield from np.random.permutation(order).tolist()

    def __len__(self) -> int:
        return SIZE


class Buckets(Sampler[list[int]]):
    """A batch sampler over another sampler that fills one list again and again."""

    def __init__(self, sampler: Any, size: int = 3) -> None:
        self.sampler = sampler
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.size:
                yield batch
                batch.clear()
        if batch:
            yield batch

    def __len__(self) -> int:
        return (len(self.sampler) + self.size - 1) // self.size


class Endless(Sampler[int]):
    """Random indices without an end."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        while True:
            random.random()
            yield int(torch.randint(SIZE, (), generator=self.generator))


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Items(SIZE), **settings)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(99)


RANDOM_LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: loader(shuffle=True),
    "shuffle with the user's generator": lambda: loader(shuffle=True, generator=generator()),
    "random": lambda: loader(sampler=RandomSampler(Items(SIZE), generator=generator())),
    "replacement": lambda: loader(
        sampler=RandomSampler(Items(SIZE), replacement=True, num_samples=40)
    ),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "subset": lambda: loader(sampler=SubsetRandomSampler(range(SIZE), generator=generator())),
    "own generators": lambda: loader(sampler=OwnRng()),
    "global generators": lambda: loader(sampler=GlobalRng()),
    "batches": lambda: loader(batch_sampler=Buckets(RandomSampler(Items(SIZE)))),
    "batches, user's generator": lambda: loader(
        batch_sampler=Buckets(RandomSampler(Items(SIZE), generator=generator()))
    ),
    "batches of one that deals": lambda: loader(
        batch_sampler=Buckets(DistributedSampler(Items(SIZE), 2, 1))
    ),
    "keys": lambda: loader(batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("name", RANDOM_LOADERS)
def test_the_order_is_a_function_of_seed_and_epoch_alone(name: str) -> None:
    make = RANDOM_LOADERS[name]
    order = draw_order(make(), 7, 1)
    used = make()
    assert draw_order(used, 7, 0) != order
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)
    assert draw_order(used, 7, 1) == order
    assert draw_order(used, 7, 1) == order
    assert draw_order(used, 8, 1) != order
    assert list(iterate_order(used, 7, 1, ahead=4)) == order


@pytest.mark.parametrize("name", RANDOM_LOADERS)
def test_drawing_leaves_every_generator_as_it_was(name: str) -> None:
    used, untouched = RANDOM_LOADERS[name](), RANDOM_LOADERS[name]()
    states = global_states()
    draw_order(used, 7, 0)
    order_length(used)
    assert global_states() == states

    def draws(each: DataLoader[Any]) -> list[Any]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        source = each.batch_sampler if each.batch_sampler is not None else each.sampler
        return [list(part) if isinstance(part, list) else part for part in source]

    # Generators that the samplers hold go on as if nothing had been drawn.
    assert draws(used) == draws(untouched)


def test_an_order_without_repetition_has_each_sample_once() -> None:
    for name in ("shuffle", "random", "subset", "own generators", "global generators", "keys"):
        assert sorted(draw_order(RANDOM_LOADERS[name](), 7, 3)) == list(range(SIZE)), name
    assert draw_order(loader(), 7, 3) == list(range(SIZE))
    assert draw_order(loader(sampler=[3, 1, 3]), 7, 3) == [3, 1, 3]
    assert len(draw_order(RANDOM_LOADERS["replacement"](), 7, 0)) == 40


def test_units_and_lengths_are_told() -> None:
    plain = sampling_of(loader(batch_size=4, drop_last=True))
    assert plain[1:] == ("sample", 4, True)
    # Here torch leaves batch_size None and a dummy sampler in the loader.
    stock = loader(batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, drop_last=False))
    assert sampling_of(stock)[1:] == ("sample", 2, False)
    assert draw_order(stock, 7, 0) == [0, 1, 2, 3, 4]
    assert order_length(stock) == 5
    buckets = loader(batch_sampler=Buckets(range(5), 2))
    assert sampling_of(buckets).unit == "batch"
    assert draw_order(buckets, 7, 0) == [[0, 1], [2, 3], [4]]
    assert order_length(buckets) == 3
    assert sampling_of(loader(batch_size=None)).unit == "key"
    assert order_length(loader(sampler=Endless())) is None


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_distributed_sampler_stands_for_the_plain_order(*, shuffle: bool, rank: int) -> None:
    dealt = DistributedSampler(Items(5), 2, rank, shuffle=shuffle, seed=rank, drop_last=rank == 1)
    used = DataLoader(Items(5), sampler=dealt)
    order = draw_order(used, 7, 0)
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert (order != [0, 1, 2, 3, 4]) == shuffle
    assert order == draw_order(
        DataLoader(Items(5), sampler=DistributedSampler(Items(5), 2, 1 - rank, shuffle=shuffle)),
        7,
        0,
    )
    assert order_length(used) == 5


def test_a_batch_sampler_over_a_distributed_sampler_gets_the_whole_order() -> None:
    dealt = DistributedSampler(Items(5), 2, 0, shuffle=False)
    used = loader(batch_sampler=Buckets(dealt, 2))
    assert draw_order(used, 7, 0) == [[0, 1], [2, 3], [4]]
    assert order_length(used) == 3
    assert used.batch_sampler.sampler is dealt


def test_a_sampler_that_deals_by_itself_in_another_way_is_refused() -> None:
    class Repeating(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([0, 0, 1, 1])

    with pytest.raises(LoaderError, match=r"Repeating deals out the share of one rank in 2\."):
        draw_order(loader(sampler=Repeating(Items(4), 2, 0)), 7, 0)
    with pytest.raises(LoaderError, match="Repeating"):
        draw_order(loader(batch_sampler=Buckets(Repeating(Items(4), 2, 0))), 7, 0)
    assert draw_order(loader(sampler=Repeating(Items(4), 1, 0)), 7, 0) == [0, 0, 1, 1]


def test_set_epoch_reaches_every_sampler_before_it_draws() -> None:
    class ByEpoch(Sampler[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            random.random()
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 4)

        def __len__(self) -> int:
            return 4

    assert draw_order(loader(sampler=ByEpoch()), 7, 5) == [5, 5, 5, 5]
    buckets = Buckets(ByEpoch(), 2)
    states = global_states()
    assert draw_order(loader(batch_sampler=buckets), 7, 6) == [[6, 6], [6, 6]]
    assert global_states() == states
    assert buckets.epochs == [6]


def test_an_endless_sampler_is_drawn_as_far_as_needed_and_alike() -> None:
    def first(ahead: int, disturb: bool = False) -> list[int]:
        found = []
        used = loader(sampler=Endless(generator()))
        for item in islice(iterate_order(used, 7, 2, ahead=ahead), 20):
            found.append(item)
            if disturb:
                random.random()
                torch.rand(1)
        return found

    states = global_states()
    whole = first(ahead=1)
    assert global_states() == states
    assert first(ahead=7, disturb=True) == whole
    assert len(set(whole)) > 4


def test_a_sampler_without_an_end_but_with_a_length_ends_there() -> None:
    class Infinite(Endless):
        def __len__(self) -> int:
            return 5

    class Modest(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0], [1], [2], [3]])

        def __len__(self) -> int:
            return 2  # some batch samplers only know a lower bound

    assert len(draw_order(loader(sampler=Infinite()), 7, 0)) == 5
    assert draw_order(loader(batch_sampler=Modest()), 7, 0) == [[0], [1], [2], [3]]


def test_the_epoch_reaches_the_datasets_that_a_dataset_is_made_of() -> None:
    class Told(Items):
        epochs: tuple[int, ...] = ()

        def set_epoch(self, epoch: int) -> None:
            self.epochs += (epoch,)

    told = [Told(2), Told(3), Told(4)]
    tell_epoch(ConcatDataset([Subset(told[0], [0]), told[1], Items(3), told[1]]), 4)
    assert [dataset.epochs for dataset in told] == [(4,), (4,), ()]


def test_drawing_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        draw_order(RANDOM_LOADERS["batches of one that deals"](), 7, 0)
    assert not caplog.records
