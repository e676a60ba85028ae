"""`EarlyStopping`: end the run when a metric no longer gets better."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from minitrainer.callback import Callback
from minitrainer.checks import check_whole
from minitrainer.module import Module
from minitrainer.monitor import Monitor
from minitrainer.protocols import TrainerView

_logger = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Stop when the metric has not become better `patience` times in a row.

    The metric is looked at after each validation if the validation logs it, else at the end of each
    epoch. All ranks stop at the same step, because they look at the same number: the mean over the
    ranks' samples for a metric logged with `sync_dist=True` (the default), rank 0's own for one
    that is not. A rank that does worse than the others does not end the run.

    NaN and infinities never count as better. Before `trainer.min_epochs` the counting goes on, but
    nothing is stopped.

    Args:
        monitor: The metric.
        mode: Whether "min" or "max" is better.
        patience: How many looks without a better value it takes to stop; 0 stops at the first.
        min_delta: By how much a value must beat the best one to be better.
        check_finite: Stop at once when the metric is NaN or infinite.

    Raises:
        SettingError: An argument makes no sense.
        MonitorError: During fit: nobody logs the metric.
    """

    def __init__(
        self,
        *,
        monitor: str,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        check_finite: bool = True,
    ) -> None:
        owner = type(self).__name__
        check_whole(owner, "patience", patience, at_least=0)
        self._monitor = Monitor(owner, monitor, mode, min_delta=min_delta)
        self._patience = patience
        self._check_finite = check_finite
        self._fitting = False
        self._not_finite = False
        self.best_score: float | None = None
        """The best value so far."""
        self.wait_count = 0
        """Looks since the last better value."""
        self.stopped_epoch: int | None = None
        """The epoch in which the run was told to stop."""
        self.reason = ""
        """Why it was told to, in a sentence."""

    def on_fit_start(self, trainer: TrainerView, module: Module) -> None:
        """Note that validations from now on count."""
        self._fitting = True
        self.stopped_epoch, self.reason = None, ""

    def on_validation_start(self, trainer: TrainerView, module: Module) -> None:
        """Notice what the validation changes."""
        self._monitor.validation_starts(trainer.callback_metrics)

    def on_validation_end(self, trainer: TrainerView, module: Module) -> None:
        """Look at a metric of the validation."""
        self._monitor.validation_ends(trainer.callback_metrics)
        # A validation on its own, outside of fit, says nothing of training.
        if self._fitting and self._monitor.is_of_validation:
            self._look(trainer)
            self._stop_if_due(trainer, epochs_done=trainer.current_epoch)

    def on_train_epoch_end(self, trainer: TrainerView, module: Module) -> None:
        """Look at a metric of the training."""
        there = self._monitor.check_epoch_end(trainer.callback_metrics, trainer.current_epoch)
        if there and not self._monitor.is_of_validation:
            self._look(trainer)
        self._stop_if_due(trainer, epochs_done=trainer.current_epoch + 1)

    def on_fit_end(self, trainer: TrainerView, module: Module) -> None:
        """Say why the run was stopped."""
        self._fitting = False
        if self.reason and trainer.is_global_zero:
            _logger.info("Stopped in epoch %d: %s", self.stopped_epoch, self.reason)

    def on_exception(self, trainer: TrainerView, module: Module, exception: BaseException) -> None:
        """Note that the fit is over."""
        self._fitting = False

    def state_dict(self) -> dict[str, Any]:
        """Return best value and counter."""
        return {
            **self._monitor.state_dict(),
            "best_score": self.best_score,
            "wait_count": self.wait_count,
            "not_finite": self._not_finite,
            "stopped_epoch": self.stopped_epoch,
            "reason": self.reason,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take best value and counter back, unless they are those of another metric."""
        if self._monitor.load_state_dict(state_dict):
            self.best_score = state_dict["best_score"]
            self.wait_count = state_dict["wait_count"]
            self._not_finite = state_dict["not_finite"]
            self.stopped_epoch = state_dict["stopped_epoch"]
            self.reason = state_dict["reason"]

    def _look(self, trainer: TrainerView) -> None:
        value = float(trainer.callback_metrics[self._monitor.name])
        self._not_finite = self._check_finite and not math.isfinite(value)
        if self._monitor.is_better(value, self.best_score):
            self.best_score = value
            self.wait_count = 0
        else:
            self.wait_count += 1

    def _stop_if_due(self, trainer: TrainerView, *, epochs_done: int) -> None:
        name = self._monitor.name
        if epochs_done < trainer.min_epochs or self.reason:
            return
        if self._not_finite:
            self.reason = f"{name} is not a finite number."
        elif self.wait_count >= max(self._patience, 1):
            best = "none" if self.best_score is None else f"{self.best_score:.6g}"
            self.reason = f"{name} did not get better in {self.wait_count} looks; best is {best}."
        if self.reason:
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
