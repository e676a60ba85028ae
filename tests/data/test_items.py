"""What is random in a sample follows from (seed, epoch, place in the order) alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from minitrainer.data import items
from minitrainer.step import MicroBatch
from tests.data.shares import Items, evaluate, global_states, shares, train

SIZE = 12
Drawn = dict[int, list[float]]


class Augmented(Dataset[torch.Tensor]):
    """Item i is i, and what the generators of numpy, random and torch give."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        normal = np.random.randn()  # leaves a second number waiting inside
        return torch.tensor([index, normal, random.random(), torch.rand(()).item()])


class Rarely(Augmented):
    """Only item 7 is random."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index == 7 else torch.tensor([index, 0.0, 0.0, 0.0])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(SIZE).tolist()


def drawn(dealt: list[list[MicroBatch]]) -> Drawn:
    """What was drawn for each item, all ranks together; each item once."""
    rows = [
        row for share in dealt for b in share if not b.dry for row in b.batch.view(-1, 4).tolist()
    ]
    found = {int(row[0]): row[1:] for row in rows}
    assert len(found) == len(rows)
    return found


def by_samples(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), shuffle=True, **{"batch_size": 2, **settings})


def by_batches(**settings: Any) -> DataLoader[Any]:
    size = settings.pop("batch_size", 2)

    class Batches(BatchSampler):  # a batch sampler that is not torch's own is dealt whole
        pass

    sampler = Batches(range(SIZE), size, drop_last=False)
    return DataLoader(Augmented(), batch_sampler=sampler, **settings)


def by_keys(**settings: Any) -> DataLoader[Any]:
    settings.pop("batch_size", None)
    return DataLoader(Augmented(), batch_size=None, shuffle=True, **settings)


def nested(**settings: Any) -> DataLoader[Any]:
    return DataLoader(
        Subset(Augmented(), range(SIZE)), shuffle=True, **{"batch_size": 2, **settings}
    )


def rarely(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Rarely(), shuffle=True, **{"batch_size": 2, **settings})


KINDS = [by_samples, by_batches, by_keys, nested, rarely]


def test_plain_torch_augments_otherwise_on_another_number_of_workers() -> None:
    def plain(num_workers: int) -> Drawn:
        loader = DataLoader(
            Augmented(), 2, num_workers=num_workers, generator=torch.Generator().manual_seed(7)
        )
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        return drawn([[MicroBatch(batch, 0, 2) for batch in loader]])

    first, second = plain(1), plain(2)
    assert plain(2) == second
    assert {index for index in first if first[index] == second[index]} <= {0, 1}


@pytest.mark.parametrize("make", KINDS)
def test_what_is_drawn_for_a_sample_is_the_same_on_every_layout(
    make: Callable[..., DataLoader[Any]],
) -> None:
    """Case B26 kind: workers 0, 1, 2 x ranks 1, 2, 4 x batch sizes."""
    first = drawn(shares(make, 1, epoch=1))
    assert sorted(first) == list(range(SIZE))
    layouts = [(1, 1, 2), (2, 1, 2), (0, 2, 2), (0, 4, 1), (1, 2, 3), (0, 1, 5)]
    for num_workers, ranks, batch_size in layouts:

        def layout(workers: int = num_workers, size: int = batch_size) -> DataLoader[Any]:
            return make(num_workers=workers, batch_size=size)

        assert drawn(shares(layout, ranks, epoch=1)) == first
    random_ones = [first[7]] if make is rarely else list(first.values())
    for column in zip(*random_ones, strict=True):
        assert len(set(column)) == len(random_ones)
    other_epoch, other_seed = drawn(shares(make, 1)), drawn(shares(make, 1, 1, seed=8))
    assert first[7] != other_epoch[7]
    assert first[7] != other_seed[7]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", KINDS)
def test_what_is_drawn_after_a_resume_is_what_would_have_been(
    make: Callable[..., DataLoader[Any]], num_workers: int
) -> None:
    """Case B66 kind: saved in mid-epoch."""
    whole = drawn(shares(make, 1, epoch=2))
    most = 4 if make is by_keys else 2
    before = drawn(shares(make, 1, epoch=2, most=most))
    rest = (
        shares(lambda: make(num_workers=num_workers), 2, epoch=2, samples_seen=4, batch_idx=most)
        if make is not by_keys
        else shares(
            lambda: make(num_workers=num_workers), 1, epoch=2, samples_seen=16, batch_idx=most
        )
    )
    assert before | drawn(rest) == whole
    assert len(before) == 4


def test_what_a_sampler_without_an_end_draws_is_the_same_on_every_layout() -> None:
    def rows(ranks: int, num_workers: int, **resume: int) -> list[list[float]]:
        dealt = shares(
            lambda: DataLoader(Augmented(), 2, sampler=Endless(), num_workers=num_workers),
            ranks,
            limit=10 // ranks,
            **resume,
        )
        return sorted(row for share in dealt for b in share for row in b.batch.tolist())

    whole = rows(1, 0)
    assert len({row[1] for row in whole}) == len(whole) == 20  # items come again, draws do not
    assert rows(1, 2) == whole
    assert rows(2, 0) == whole
    rest = rows(1, 0, samples_seen=8, batch_idx=4)
    assert len(rest) == 12
    assert all(row in whole for row in rest)


def test_an_item_that_is_drawn_twice_is_augmented_twice() -> None:
    weights = [0.0] * (SIZE - 1) + [1.0]
    loader = DataLoader(Augmented(), 4, sampler=WeightedRandomSampler(weights, 20))
    rows = [row for b in train(loader).epoch(0) for row in b.batch.tolist()]
    assert {row[0] for row in rows} == {SIZE - 1}
    assert len({row[1] for row in rows}) == 20


@pytest.mark.parametrize("kind", [Augmented, Rarely])
def test_the_states_of_the_process_are_left_alone(kind: type[Augmented]) -> None:
    """Without workers: dropout must not depend on the loader."""
    np.random.randn()  # whether or not a number is waiting
    for _ in range(2):
        np.random.randn()
        before = global_states()
        assert len(list(train(DataLoader(kind(), 2)).epoch(0))) == SIZE // 2
        assert len(list(evaluate(DataLoader(kind(), 2)))) == SIZE // 2
        assert global_states() == before


def mixed(parts: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws: what it drew stands in the last column."""
    batch = torch.stack([torch.as_tensor(item, dtype=torch.float32) for item in parts])
    noise = torch.rand(()) + np.random.rand() + random.random()
    return torch.cat([batch.view(len(parts), -1), noise.expand(len(parts), 1)], dim=1)


@pytest.mark.parametrize("dataset", [Augmented(), Items(SIZE)])
def test_a_collate_function_draws_the_same_whatever_fetches(dataset: Dataset[Any]) -> None:
    def batches(num_workers: int, **resume: int) -> list[Any]:
        loader = DataLoader(dataset, 3, collate_fn=mixed, num_workers=num_workers)
        return [b.batch.tolist() for b in train(loader).epoch(1, **resume)]

    before = global_states()
    whole = batches(0)
    assert global_states() == before
    assert len({batch[0][-1] for batch in whole}) == 4
    assert batches(2) == whole
    assert batches(2, samples_seen=6, batch_idx=2) == whole[2:]
    if isinstance(dataset, Augmented):
        plain = DataLoader(dataset, 3, collate_fn=default_collate)
        alone = [b.batch.tolist() for b in train(plain).epoch(1)]
        assert [[row[:-1] for row in batch] for batch in whole] == alone


def test_a_dataset_that_draws_nothing_is_asked_once_and_for_whole_batches() -> None:
    class Together(Items):
        def __getitems__(self, indices: list[int]) -> list[int]:
            assert type(indices) is list
            assert all(type(index) is int for index in indices)
            self.calls = getattr(self, "calls", 0) + 1
            return [self[index] for index in indices]

    dataset = Together(SIZE)
    assert len(list(train(DataLoader(dataset, 4)).epoch(0))) == 3
    assert dataset.asked == list(range(SIZE))
    assert dataset.calls == 3


def test_tensors_are_known_to_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch costs as little as reading the states does, they are not even read."""

    def refuse() -> None:
        raise AssertionError

    monkeypatch.setattr(items, "RngStates", refuse)
    tensors = TensorDataset(torch.arange(4))
    for dataset in (tensors, Subset(tensors, range(4))):
        assert len(list(train(DataLoader(dataset, 2)).epoch(0))) == 2
    for loader in (DataLoader(Items(4)), DataLoader(tensors, collate_fn=list)):
        with pytest.raises(AssertionError):
            list(train(loader).epoch(0))


def test_a_dataset_that_draws_is_asked_twice_for_one_batch_only() -> None:
    class Counting(Augmented):
        asked = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.asked += 1
            return super().__getitem__(index)

    dataset = Counting()
    data = train(DataLoader(dataset, 4))
    for epoch in range(2):
        list(data.epoch(epoch))
    assert dataset.asked == 2 * SIZE + 4


def test_worker_init_fn_sees_the_dataset_of_the_user() -> None:
    def init(worker_id: int) -> None:
        info: Any = get_worker_info()
        info.dataset.size = 100 + worker_id

    class Sized(Items):
        def __getitem__(self, index: int) -> int:
            return self.size

    loader = DataLoader(Sized(4), 2, num_workers=2, worker_init_fn=init)
    assert [b.batch.tolist() for b in train(loader).epoch(0)] == [[100, 100], [101, 101]]


def test_an_error_in_a_dataset_arrives_as_it_is() -> None:
    class Broken(Items):
        def __getitem__(self, index: int) -> int:
            raise LookupError(f"no {index}")

    for num_workers in (0, 1):
        data = train(DataLoader(Broken(4), 2, num_workers=num_workers))
        with pytest.raises(LookupError, match="no 0"):
            list(islice(data.epoch(0), 1))
