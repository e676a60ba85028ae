"""Shares of ranks, shown to be disjoint and complete by digests that add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from minitrainer.data import Coverage, Digest, Share, coverage
from tests.data.shares import Flow, Items, evaluate, items_loader, train
from tests.data.test_training import uneven

Make = Callable[[], DataLoader[Any]]


def covered(make: Make, ranks: int, **settings: Any) -> Coverage:
    """What the ranks were dealt in an epoch; as it would travel between them."""
    found = []
    for rank in range(ranks):
        data = train(make(), rank=rank, ranks=ranks, **settings)
        list(data.epoch(0))
        found.append(data.share())
    return coverage(json.loads(json.dumps(found)))


def test_a_digest_of_parts_is_that_of_the_whole_in_any_order() -> None:
    parts = Digest.of([3, 1, 4]) | Digest.of([]) | Digest.of([1, 5])
    assert parts == Digest.of([5, 4, 3, 1, 1])
    others = [[5, 4, 3, 1, 2], [5, 4, 3, 1], [5, 4, 3, 1, 1, 1], [5, 4, 4, 1, 0], [5, 4, 3, 0, 0]]
    assert all(Digest.of(other) != parts for other in others)
    # Written down, because ranks on other machines must find the same.
    assert Digest.of([0, 1, 2**62]) == Digest(3, 5855690579520183694, 10156293055849365936)


def test_a_digest_takes_indices_of_any_kind() -> None:
    mixture = [1, "a", ("b", 2), -1, torch.tensor(3)]
    assert Digest.of(mixture[:2]) | Digest.of(mixture[2:]) == Digest.of(mixture)
    assert Digest.of([1]) != Digest.of(["1"])
    assert Share.of([], [*mixture, "a", torch.tensor(3)], None).different == 5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_are_disjoint_and_complete(ranks: int) -> None:
    assert covered(lambda: items_loader(21, batch_size=2, shuffle=True), ranks) == (
        21,
        21,
        21,
        True,
    )
    assert str(covered(lambda: uneven(15), ranks)) == "15/15 unique"
    dropping = covered(lambda: items_loader(21, batch_size=2, drop_last=True), ranks)
    assert str(dropping) == f"{21 - 21 % (2 * ranks)}/21 unique"
    limited = covered(lambda: items_loader(21, batch_size=2), ranks, limit=2)
    assert str(limited) == f"{4 * ranks}/21 unique"
    weights = WeightedRandomSampler([1.0] * 2 + [0.0] * 6, 8)
    assert str(covered(lambda: items_loader(8, sampler=weights), ranks)) == (
        "8 drawn, 2/8 different"
    )
    found = []
    for rank in range(ranks):
        data = evaluate(items_loader(21, batch_size=2), rank=rank, ranks=ranks)
        assert data.share() is None  # nothing has been read yet
        assert len(list(data)) == len(range(rank, 11, ranks))
        found.append(data.share())
    assert coverage(found) == Coverage(21, 21, 21, whole=True)


class Unseeded(Sampler[int]):
    """Draws from somewhere that nobody can seed; `orders` are what it will draw."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders = orders

    def __len__(self) -> int:
        return len(self.orders[0])

    def __iter__(self) -> Any:
        return iter(self.orders.pop(0))


def test_ranks_that_draw_different_orders_are_found_out() -> None:
    sampler = Unseeded([[0, 1, 2, 3], [1, 0, 3, 2]])
    found = covered(lambda: items_loader(4, sampler=sampler, batch_size=2), 2)
    assert not found.whole
    assert str(found) == "4 dealt, not those of one order"
    # The same samples in another order, dealt so that none is lost, are no harm.
    sampler = Unseeded([[0, 1, 2, 3], [2, 3, 0, 1]])
    assert covered(lambda: items_loader(4, sampler=sampler, batch_size=2), 2).whole


def test_a_share_is_told_once_and_of_a_whole_epoch_only() -> None:
    data = train(DataLoader(Items(8), 2, sampler=RandomSampler(range(8))))
    list(data.epoch(0, samples_seen=4, batch_idx=2))
    assert data.share() is None
    list(data.epoch(1))
    share = data.share()
    assert share is not None
    assert (share.different, share.size, share.dealt) == (8, 8, Digest.of(range(8)))
    list(data.epoch(2))
    assert data.share() is None


def test_where_nothing_names_the_samples_nothing_is_told() -> None:
    whole_batches: Any = DataLoader(torch.arange(6).view(3, 2), batch_size=None)  # type: ignore[arg-type]
    for loader in (DataLoader(Flow(4)), [torch.arange(3)], whole_batches):
        data = train(loader)
        list(data.epoch(0))
        assert data.share() is None
        validation = evaluate(loader)
        list(validation)
        assert validation.share() is None
