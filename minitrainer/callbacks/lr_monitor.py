"""`LearningRateMonitor`: write the learning rate beside the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from minitrainer.callback import Callback
from minitrainer.checks import check_choice, check_whole
from minitrainer.errors import SettingError
from minitrainer.module import Module
from minitrainer.protocols import TrainerView
from minitrainer.step import StepResult


class LearningRateMonitor(Callback):
    """Log the learning rate that a step was taken with, in the row of that step.

    Names are `lr-AdamW`; with several optimizers of one class `lr-AdamW`, `lr-AdamW-1` and so on;
    with several parameter groups `lr-AdamW/pg1`, `lr-AdamW/pg2`. A rate is read when the schedulers
    have done with it: after the step before, or at the start of the epoch.

    Args:
        interval: "step" logs every `every_n_steps` optimizer steps; "epoch" logs, at the end of
            each epoch, the rate that its first step was taken with.
        every_n_steps: By default the trainer's `log_every_n_steps`.

    Raises:
        SettingError: An argument makes no sense.
    """

    def __init__(
        self,
        *,
        interval: Literal["step", "epoch"] = "step",
        every_n_steps: int | None = None,
    ) -> None:
        owner = type(self).__name__
        check_choice(owner, "interval", interval, ("step", "epoch"))
        if every_n_steps is not None:
            check_whole(owner, "every_n_steps", every_n_steps, at_least=1)
            if interval == "epoch":
                raise SettingError(
                    f"{owner} got every_n_steps={every_n_steps} and interval='epoch'.",
                    fix="Give one or the other.",
                )
        self._by_step = interval == "step"
        self._given = every_n_steps
        self._every_n_steps = 1
        self._rates: dict[str, float] = {}

    def on_fit_start(self, trainer: TrainerView, module: Module) -> None:
        """Find out how often to log."""
        self._every_n_steps = self._given or trainer.log_every_n_steps

    def on_train_epoch_start(self, trainer: TrainerView, module: Module) -> None:
        """Read the rates of the step to come."""
        self._rates = _learning_rates(trainer.optimizers)

    def on_train_step_end(self, trainer: TrainerView, module: Module, result: StepResult) -> None:
        """Log the rates of this step, read those of the next, where they are to be logged."""
        if not self._by_step or not result.taken:
            return
        step, every = trainer.global_step, self._every_n_steps
        if step % every == 0:
            trainer.log_metrics(self._rates)
        if (step + 1) % every == 0:
            self._rates = _learning_rates(trainer.optimizers)

    def on_train_epoch_end(self, trainer: TrainerView, module: Module) -> None:
        """Log the rates of this epoch."""
        if not self._by_step:
            trainer.log_metrics(self._rates)


def _learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    seen: dict[str, int] = {}
    rates = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        count = seen[kind] = seen.get(kind, -1) + 1
        name = f"lr-{kind}-{count}" if count else f"lr-{kind}"
        groups = optimizer.param_groups
        for number, group in enumerate(groups, start=1):
            rates[f"{name}/pg{number}" if len(groups) > 1 else name] = float(group["lr"])
    return rates
