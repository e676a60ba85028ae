"""Going on from a checkpoint is the same run."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import minitrainer as mt
from minitrainer.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from tests.ranks import run_ranks
from tests.toys import Idx, Lin, Values, loader, quiet


class SaveAt(mt.Callback):
    """Saves a.ckpt at a global_step, from the hook named."""

    def __init__(self, step: int, hook: str = "save_point") -> None:
        self.step, self.hook = step, hook

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.hook == "batch_end" and trainer.global_step == self.step:
            trainer.save_checkpoint("a.ckpt")

    def on_save_point(self, trainer: Any, module: Any, point: Any) -> None:
        if self.hook == "save_point" and trainer.global_step == self.step:
            trainer.save_checkpoint("a.ckpt")


@pytest.mark.parametrize("hook", ["batch_end", "save_point"])
def test_mid_epoch_resume_starts_with_the_next_batch(hook: str) -> None:
    """Case B60: 20 items, bs 2, saved at step 3: goes on with items 6, 7 at batch_idx 3."""
    whole = Idx()
    quiet(callbacks=[SaveAt(3, hook)]).fit(whole, loader(range(20), batch_size=2))
    resumed = Idx()
    trainer = quiet()
    trainer.fit(resumed, loader(range(20), batch_size=2), ckpt_path="a.ckpt")
    assert resumed.seen == whole.seen[3:]
    assert resumed.seen[0] == (0, 3, [6, 7], 0, 3)
    assert len(resumed.seen) == 7
    assert trainer.global_step == 10
    assert torch.equal(resumed.w, whole.w)


def test_a_save_inside_a_window_takes_place_at_its_end() -> None:
    """Case B64: x=1..8, accumulate 4, save asked for after batch 6: w ends at -9.0."""

    class SaveInside(mt.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 5:
                trainer.save_checkpoint("a.ckpt")

    whole = Lin()
    quiet(accumulate=4, callbacks=[SaveInside()]).fit(whole, loader(range(1, 13)))
    saved = torch.load("a.ckpt", weights_only=True)
    assert saved["counters"]["batch_idx"] == 8
    assert saved["state_dict"]["w"] == -9.0
    resumed = Lin()
    quiet(accumulate=4).fit(resumed, loader(range(1, 13)), ckpt_path="a.ckpt")
    assert torch.equal(whole.w, resumed.w)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_sampler", [False, True])
def test_shuffled_epoch_is_seen_once_over_a_resume(workers: int, *, own_sampler: bool) -> None:
    """Case B66: 64 items shuffled, saved at 20 items in epoch 1: each of 64 once."""

    def data() -> DataLoader[Any]:
        dataset = Values(range(64))
        if own_sampler:
            sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
            return DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)
        return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)

    first = Idx()
    quiet(max_steps=16 + 5, max_epochs=2, callbacks=[SaveAt(16 + 5)]).fit(first, data())
    second = Idx()
    quiet(max_epochs=2).fit(second, data(), ckpt_path="a.ckpt")
    assert sorted(first.items(0)) == list(range(64))
    assert first.items(0) != list(range(64))
    assert len(first.items(1)) == 20
    assert sorted(first.items(1) + second.items(1)) == list(range(64))
    assert first.items(0)[:20] != first.items(1)


class Dropout(mt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch.expand(4, -1).T / 24).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_numbers_and_momentum_go_on(ranks: int) -> None:
    """Cases B70 and B85: dropout and momentum, saved at step 3: bit-equal at step 6, all ranks."""

    def fit(module: Dropout, **settings: Any) -> None:
        quiet(callbacks=[SaveAt(3)]).fit(
            module, loader(range(12 * ranks), batch_size=2), **settings
        )

    def rank() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mt.seed_everything(0)
        whole, resumed = Dropout(), Dropout()
        fit(whole)
        fit(resumed, ckpt_path="a.ckpt")
        return [p.detach() for p in whole.parameters()], [p.detach() for p in resumed.parameters()]

    results = run_ranks(rank, world_size=ranks) if ranks > 1 else [rank()]
    for whole, resumed in results:
        for ours, theirs, first in zip(whole, resumed, results[0][0], strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours, first)
    states = torch.load("a.ckpt", weights_only=True)["rng"]
    assert len(states) == ranks
    assert len({str(state) for state in states}) == ranks


class Augmented(Values):
    """Items with noise of numpy, random and torch."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = np.random.randn() + random.gauss(0, 1) + torch.randn(()).item()
        return self.values[index] + 0.1 * noise


@pytest.mark.parametrize(
    ("ranks", "workers", "persistent"), [(1, 0, False), (1, 2, False), (1, 2, True), (2, 1, False)]
)
def test_augmentation_goes_on_as_it_would_have(
    *, ranks: int, workers: int, persistent: bool
) -> None:
    """Promise 2: dropout and augmentation in workers, saved in mid-epoch: bit-equal at the end."""

    def data(num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            Augmented([item / ranks for item in range(16 * ranks)]),
            batch_size=2,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
        )

    def rank() -> list[list[torch.Tensor]]:
        mt.seed_everything(0)
        modules = [Dropout() for _ in range(3)]
        for module in modules[1:]:
            module.load_state_dict(modules[0].state_dict())
        quiet(max_epochs=2, callbacks=[SaveAt(11)]).fit(modules[0], data(workers))
        quiet(max_epochs=2).fit(modules[1], data(workers), ckpt_path="a.ckpt")
        quiet(max_epochs=2).fit(modules[2], data(0 if workers else 2))
        return [[p.detach() for p in module.parameters()] for module in modules]

    for whole, resumed, on_other_workers in run_ranks(rank, world_size=ranks):
        for ours, theirs, others in zip(whole, resumed, on_other_workers, strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours, others)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_no_sample_is_lost_or_repeated_on_another_number_of_ranks(
    before: int, after: int, tmp_path: Any
) -> None:
    """Promise 2: 64 items shuffled, interrupted in mid-epoch, resumed on other ranks."""

    def first() -> list[int]:
        module = Idx(lr=0.001)
        quiet(max_steps=5, max_epochs=2, callbacks=[SaveAt(5)]).fit(
            module, loader(range(64), batch_size=2, shuffle=True)
        )
        return module.items(0)

    def second() -> tuple[list[int], list[int]]:
        module = Idx(lr=0.001)
        quiet(max_epochs=2).fit(
            module, loader(range(64), batch_size=3, shuffle=True), ckpt_path="a.ckpt"
        )
        return module.items(0), module.items(1)

    seen = run_ranks(first, world_size=before) if before > 1 else [first()]
    then = run_ranks(second, world_size=after) if after > 1 else [second()]
    epoch_0 = chain(*seen, *(items for items, _ in then))
    assert sorted(epoch_0) == list(range(64))
    assert sorted(chain(*(items for _, items in then))) == list(range(64))


def test_a_checkpoint_is_plain_and_loads_into_the_bare_module() -> None:
    """Case B79 and the contract of the file."""
    quiet(callbacks=[SaveAt(2)]).fit(Lin(), loader([1.0, 2.0]))
    saved = torch.load("a.ckpt", weights_only=True)
    bare = Lin()
    bare.load_state_dict(saved["state_dict"], strict=True)
    assert bare.w == -3.0
    assert saved["format_version"] == 1
    assert saved["torch_version"] == str(torch.__version__)


def test_keys_are_those_of_the_plain_module() -> None:
    """Case B77: 2 ranks, and compiled."""

    def rank() -> list[str]:
        module = Lin()
        module.compile(backend="eager")
        quiet(callbacks=[SaveAt(1)]).fit(module, loader([1.0, 2.0]))
        return list(torch.load("a.ckpt", weights_only=True)["state_dict"])

    assert run_ranks(rank) == [["w"]] * 2


def test_what_cannot_be_resumed_is_said() -> None:
    quiet(callbacks=[SaveAt(1)], seed=1).fit(Lin(), loader([1.0, 2.0]))
    with pytest.raises(CheckpointNotFoundError, match=r"b\.ckpt"):
        quiet().fit(Lin(), loader([1.0]), ckpt_path="b.ckpt")
    with pytest.raises(CheckpointMismatchError, match="seed 1"):
        quiet(seed=2).fit(Lin(), loader([1.0, 2.0]), ckpt_path="a.ckpt")
    torch.save({"state_dict": {"w": torch.ones(())}}, "weights.ckpt")
    with pytest.raises(CheckpointMismatchError, match="counters"):
        quiet().fit(Lin(), loader([1.0]), ckpt_path="weights.ckpt")
    assert Lin.load_from_checkpoint("weights.ckpt").w == 1.0


def test_a_failed_save_is_one_error_on_all_ranks() -> None:
    def rank() -> str:
        class Full(mt.CheckpointIO):
            def save(self, checkpoint: Any, path: Any) -> None:
                raise CheckpointWriteError("a.ckpt could not be written.", "Disk full.")

        with pytest.raises(CheckpointWriteError) as raised:
            quiet(callbacks=[SaveAt(1)], checkpoint_io=Full()).fit(Lin(), loader([1.0, 2.0]))
        return str(raised.value)

    assert run_ranks(rank) == ["[C04] a.ckpt could not be written. Disk full."] * 2


def test_hyperparameters_are_kept_and_build_the_module() -> None:
    class Net(Lin):
        def __init__(self, lr: float, width: int = 3, *, name: str = "net", **rest: Any) -> None:
            super().__init__(lr)
            self.width, self.rest = width, rest
            self.save_hyperparameters(ignore=["name"])

    quiet(callbacks=[SaveAt(2)]).fit(Net(0.5, width=7, extra="x"), loader([1.0, 2.0]))
    net = Net.load_from_checkpoint("a.ckpt", width=8)
    assert dict(net.hparams) == {"lr": 0.5, "width": 8, "extra": "x"}
    assert net.w == -1.5
    assert (net.width, net.rest, net.hparams.lr) == (8, {"extra": "x"}, 0.5)
