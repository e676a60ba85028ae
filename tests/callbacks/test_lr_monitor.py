"""LearningRateMonitor: the rate in a row is the one the step was taken with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minitrainer.callbacks.lr_monitor import LearningRateMonitor
from minitrainer.errors import SettingError
from tests.callbacks.view import MODULE, FakeTrainer


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def sgd(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], lr=lr)


def test_names_are_those_of_lightning() -> None:
    groups = [{"params": [parameter()], "lr": 1.0}, {"params": [parameter()], "lr": 2.0}]
    trainer = FakeTrainer(
        optimizers=[sgd(3.0), torch.optim.AdamW(groups), sgd(4.0), sgd(torch.tensor(5.0))],  # type: ignore[arg-type]
        log_every_n_steps=1,
    )
    trainer.start(LearningRateMonitor())
    trainer.epoch()
    assert trainer.rows == [
        (
            1,
            {
                "lr-SGD": 3.0,
                "lr-AdamW/pg1": 1.0,
                "lr-AdamW/pg2": 2.0,
                "lr-SGD-1": 4.0,
                "lr-SGD-2": 5.0,
            },
        )
    ]
    assert type(trainer.rows[0][1]["lr-SGD-2"]) is float


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_rate_of_a_row_is_that_of_its_step(every: int) -> None:
    """With a scheduler that steps before the hook, and one that steps at the end of the epoch."""
    optimizer = sgd(1.0)
    trainer = FakeTrainer(optimizers=[optimizer])
    callback = LearningRateMonitor(every_n_steps=every)
    trainer.start(callback)
    used = {}
    for _ in range(3):
        callback.on_train_epoch_start(trainer, MODULE)
        for taken in (True, False, True, True):
            if taken:
                used[trainer.global_step + 1] = optimizer.param_groups[0]["lr"]
                optimizer.param_groups[0]["lr"] += 1.0
            trainer.step(taken=taken)
        optimizer.param_groups[0]["lr"] *= 10
        trainer.end_epoch()
    assert dict(trainer.rows) == {
        step: {"lr-SGD": lr} for step, lr in used.items() if step % every == 0
    }
    assert len(trainer.rows) == 9 // every


def test_by_default_it_follows_the_trainer() -> None:
    trainer = FakeTrainer(optimizers=[sgd(1.0)], log_every_n_steps=4)
    trainer.start(LearningRateMonitor())
    trainer.epoch(steps=9)
    assert [step for step, _ in trainer.rows] == [4, 8]


def test_by_epoch_it_logs_the_rate_of_the_epoch() -> None:
    optimizer = sgd(1.0)
    trainer = FakeTrainer(optimizers=[optimizer], log_every_n_steps=1)
    callback = LearningRateMonitor(interval="epoch")
    trainer.start(callback)
    for _ in range(2):
        callback.on_train_epoch_start(trainer, MODULE)
        trainer.step()
        trainer.step()
        optimizer.param_groups[0]["lr"] /= 10  # as a scheduler does before the hook
        callback.on_train_epoch_end(trainer, MODULE)
    assert trainer.rows == [(2, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.1})]


@pytest.mark.parametrize(
    "arguments",
    [{"interval": "batch"}, {"every_n_steps": 0}, {"interval": "epoch", "every_n_steps": 2}],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="LearningRateMonitor got"):
        LearningRateMonitor(**arguments)
