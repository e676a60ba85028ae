"""Fetching: what is random in a sample follows from its place in the epoch, and from nothing else.

Pitfall: workers are seeded by their number and per epoch, so augmentation changes with the number
of workers and ranks and after a resume; and persistent workers never hear of `set_epoch`.
Fix: every batch carries its epoch and the places of its samples to where it is fetched. There the
dataset is told of the epoch, and the random states are seeded anew for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from minitrainer.data.sampling import tell_epoch
from minitrainer.data.seeding import RngStates, derive_seed, mix, seed_cpu


class Keys(NamedTuple):
    """What one batch is made of; it travels through the queue of a worker.

    `keys` is a list of indices, or with `batch_size=None` the one key of a whole batch. The j-th
    of them stands at place `first + j * step` of the order of its epoch, over all ranks.
    """

    epoch: int
    first: int
    step: int
    keys: Any


def placed(units: Iterable[Any], epoch: int, *, are_batches: bool) -> Iterator[Keys]:
    """Yield what was drawn, one after the other, with the places it takes.

    Args:
        units: Lists of indices, or single keys.
        epoch: Their epoch.
        are_batches: Whether they are lists.
    """
    place = 0
    for unit in units:
        yield Keys(epoch, place, 1, unit)
        place += len(unit) if are_batches else 1


class SeededItems(Dataset[Any]):
    """A map-style dataset along with its collate function, asked by `Keys` and not by indices.

    Where fetching draws from the global CPU generators of torch, numpy or random, these are
    seeded by (seed, epoch, place in the order) before each item, some 15 us. The process's own
    states are as before afterwards, so that dropout does not depend on the loader. The place and
    not the index, as a sampler may draw an index twice and the two shall not look alike.

    Nobody can tell beforehand whether a dataset draws. So a batch is first fetched as it is, and
    if that has moved a generator, fetched once more under seeds, as all later ones are: `draws`
    is shared with the workers. Until then a batch costs some 50 us, or nothing if the dataset is a
    `TensorDataset` or a `Subset` of one. A collate function other than torch's own always runs
    under a seed, that of the first place of its batch.

    Generators that the dataset itself holds, and those of CUDA, are left alone.

    Args:
        dataset: The user's dataset.
        collate: Makes a batch of a list of items, or of one item that is a batch already.
        seed: The seed of the run.
        tells_epoch: Whether copies of the dataset in workers are to be told of the epoch.
        in_workers: Whether there are workers.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        seed: int,
        tells_epoch: bool,
        in_workers: bool,
    ) -> None:
        self.dataset = dataset
        self.told: int | None = None
        self._collate = collate
        self._collate_draws = collate not in (default_collate, default_convert)
        self._is_still = _is_still(dataset) and not self._collate_draws
        self._seed = seed
        self._tells_epoch = tells_epoch
        self._draws = torch.zeros((), dtype=torch.bool)
        if in_workers:
            self._draws.share_memory_()

    def __getitems__(self, batch: Keys) -> Any:
        """Return the collated batch of a list of indices."""
        return self._fetched(batch, self._together, self._one_by_one)

    def __getitem__(self, batch: Keys) -> Any:
        """Return the item of a single key, which is a whole batch, as `collate` converts it."""
        return self._fetched(batch, self._plain_alone, self._alone)

    def _fetched(
        self,
        batch: Keys,
        plain: Callable[[Any], Any],
        seeded: Callable[[Keys, int], Any],
    ) -> Any:
        if self._tells_epoch and batch.epoch != self.told:
            self.told = batch.epoch
            tell_epoch(self.dataset, batch.epoch)
        if self._is_still:
            return self._collate(plain(batch.keys))
        before = RngStates()
        data, is_fetched = None, False
        if not self._draws:
            data = plain(batch.keys)
            is_fetched = not before.are_left()
            if is_fetched and not self._collate_draws:
                return self._collate(data)
        try:
            if not is_fetched:
                self._draws.fill_(True)
                data = seeded(batch, derive_seed(self._seed, "sample", batch.epoch))
            if self._collate_draws:
                seed_cpu(mix(derive_seed(self._seed, "collate", batch.epoch), batch.first))
            return self._collate(data)
        finally:
            before.restore()

    def _together(self, keys: list[Any]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch:
            items: list[Any] = fetch(keys)
            return items
        return [self.dataset[key] for key in keys]

    def _plain_alone(self, key: Any) -> Any:
        return self.dataset[key]

    def _one_by_one(self, batch: Keys, stream: int) -> list[Any]:
        items = []
        for number, key in enumerate(batch.keys):
            seed_cpu(mix(stream, batch.first + number * batch.step))
            items.append(self.dataset[key])
        return items

    def _alone(self, batch: Keys, stream: int) -> Any:
        seed_cpu(mix(stream, batch.first))
        return self.dataset[batch.keys]


def _is_still(dataset: Any) -> bool:
    """Return whether it is known that a dataset draws nothing."""
    if type(dataset) is Subset:
        return _is_still(dataset.dataset)
    return type(dataset) is TensorDataset


class WorkerStart:
    """What a worker does first: the user's `worker_init_fn`, which sees the user's dataset.

    Args:
        init: The user's function.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Call the user's function, if there is one."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self._init is not None:
            self._init(worker_id)


def as_it_is(batch: Any) -> Any:
    """Return what `SeededItems` has collated already; in the place of the collate function."""
    return batch
