"""Learning rate schedulers: when they step, what they look at, how many steps there will be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import minitrainer as mt
from minitrainer.errors import MonitorError, OptimizersError
from tests.ranks import run_ranks
from tests.toys import Each, Lin, loader, quiet


class Scheduled(Lin):
    """LIN with a scheduler made by a function of (module, optimizer)."""

    def __init__(self, make: Callable[[Any, Any], Any], lr: float = 1.0, **settings: Any) -> None:
        super().__init__(lr)
        self.make, self.settings = make, settings
        self.lrs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("worse", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.scheduler = self.make(self, optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler, **self.settings},
        }


class SaveAfterEpoch(mt.Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_save_point(self, trainer: Any, module: Any, point: Any) -> None:
        if point.epoch_end and trainer.current_epoch + 1 == self.epochs:
            trainer.save_checkpoint("a.ckpt")


@pytest.mark.parametrize(
    ("make", "interval"),
    [
        (lambda m, o: lr_scheduler.MultiStepLR(o, [4], 0.1), "epoch"),
        (lambda m, o: lr_scheduler.CosineAnnealingLR(o, m.trainer.total_steps), "step"),
        (lambda m, o: lr_scheduler.OneCycleLR(o, 1.0, m.trainer.total_steps), "step"),
        (
            lambda m, o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
            ),
            "step",
        ),
        (lambda m, o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), "step"),
    ],
)
def test_resumed_learning_rates_are_those_of_the_uninterrupted_run(
    make: Any, interval: str
) -> None:
    """Case B81: 2 batches per epoch, saved at the end of epoch 2 (from 0), resumed: the same."""

    def fit(epochs: int, **settings: Any) -> list[float]:
        module = Scheduled(make, lr=100.0, interval=interval)
        quiet(max_epochs=epochs, callbacks=[SaveAfterEpoch(3)]).fit(
            module, loader([1.0, 1.0]), **settings
        )
        return module.lrs

    whole = fit(5)
    resumed = fit(5, ckpt_path="a.ckpt")
    assert whole[6:] == resumed
    if interval == "epoch":
        assert resumed == [100.0, 100.0, 10.0, 10.0]


def test_plateau_steps_on_fresh_values_only() -> None:
    """Case B104: validation every 2nd of 4 epochs, worsening: stepped twice, lr 0.1 at the end."""
    steps = []

    class Plateau(lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            steps.append(float(metrics))
            super().step(metrics)

    def fit(**settings: Any) -> float:
        module = Scheduled(
            lambda m, o: Plateau(o, patience=0, factor=0.1), monitor="worse", interval="epoch"
        )
        quiet(**settings).fit(module, loader([1.0, 1.0]), loader([0.0]))
        return module.scheduler.get_last_lr()[0]

    assert fit(max_epochs=4, check_val_every_n_epoch=2) == pytest.approx(0.1)
    assert steps == [1.0, 3.0]
    # Stopped before the first validation: nothing to step on, no crash.
    steps.clear()
    assert fit(max_steps=1) == 1.0
    assert steps == []


def test_plateau_that_monitors_what_nobody_logs() -> None:
    module = Scheduled(lambda m, o: lr_scheduler.ReduceLROnPlateau(o), monitor="wurse")
    with pytest.raises(MonitorError, match="worse"):
        quiet(max_epochs=2).fit(module, loader([1.0]), loader([0.0]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 6), ({"max_steps": 4}, 4), ({"limit_train_batches": 5}, 6)],
)
def test_total_steps_are_known_before_the_first(settings: Any, expected: int) -> None:
    """Case B105: N=21, bs 2, 2 ranks, accumulate 2, 2 epochs: 6 steps, OneCycle does not raise."""

    def rank() -> tuple[int | None, int]:
        module = Scheduled(
            lambda m, o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=m.trainer.total_steps),
            interval="step",
        )
        trainer = quiet(max_epochs=2, accumulate=2, **settings)
        trainer.fit(module, loader(range(21), batch_size=2))
        return trainer.total_steps, trainer.global_step

    assert run_ranks(rank) == [(expected, expected)] * 2


def test_total_steps_are_the_same_after_a_resume() -> None:
    """Case B105, last part."""

    def fit(**settings: Any) -> tuple[int | None, int]:
        module = Scheduled(
            lambda m, o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=m.trainer.total_steps),
            interval="step",
        )
        trainer = quiet(max_epochs=2, accumulate=4, callbacks=[SaveAfterEpoch(1)])
        trainer.fit(module, loader(range(21), batch_size=2), **settings)
        return trainer.total_steps, trainer.global_step

    assert fit() == (6, 6)
    assert fit(ckpt_path="a.ckpt") == (6, 6)


def test_frequency() -> None:
    module = Scheduled(
        lambda m, o: lr_scheduler.ExponentialLR(o, 0.5), interval="step", frequency=2
    )
    quiet().fit(module, loader([1.0] * 5))
    assert module.lrs == [1.0, 1.0, 0.5, 0.5, 0.25]


def returning(value: Callable[[Any], Any]) -> mt.Module:
    class Returning(Lin):
        def configure_optimizers(self) -> Any:
            return value(super().configure_optimizers())

    return Returning()


@pytest.mark.parametrize(
    "value",
    [
        lambda o: o,
        lambda o: [o],
        lambda o: (o, lr_scheduler.ExponentialLR(o, 0.5)),
        lambda o: ([o], [lr_scheduler.ExponentialLR(o, 0.5)]),
        lambda o: {"optimizer": o},
        lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.ExponentialLR(o, 0.5)},
    ],
)
def test_forms_of_configure_optimizers(value: Any) -> None:
    module = returning(value)
    quiet().fit(module, loader([1.0, 2.0]))
    assert module.w.item() == -3.0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda o: None, "None"),
        (lambda o: [o, o], "two|2"),
        (lambda o: {"optimizer": o, "scheduler": 1}, "scheduler"),
        (lambda o: (o, lr_scheduler.ReduceLROnPlateau(o)), "monitor"),
        (lambda o: (o, {"scheduler": lr_scheduler.ExponentialLR(o, 1), "intervall": 1}), "interv"),
        (
            lambda o: (o, {"scheduler": lr_scheduler.ExponentialLR(o, 1), "interval": "batch"}),
            "batch",
        ),
        (lambda o: torch.optim.LBFGS(o.param_groups[0]["params"]), "closure"),
        (lambda o: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1), "no parameter"),
    ],
)
def test_refuses_what_is_no_optimizer(value: Any, words: str) -> None:
    with pytest.raises(OptimizersError, match=words):
        quiet().fit(returning(value), loader([1.0]))


def test_the_learning_rate_of_a_step_is_the_one_it_was_taken_with() -> None:
    seen = []
    module = Scheduled(lambda m, o: lr_scheduler.ExponentialLR(o, 0.5), interval="step")
    quiet(callbacks=[Each(lambda t, m, r: seen.append(m.w.item()))]).fit(module, loader([1.0] * 3))
    assert seen == [-1.0, -1.5, -1.75]
