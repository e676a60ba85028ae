"""What `configure_optimizers` returns, checked; and when schedulers step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from minitrainer.errors import CheckpointMismatchError, MonitorError, OptimizersError
from minitrainer.module import Module


@dataclass(slots=True)
class ScheduledLR:
    """A learning rate scheduler and when it steps.

    Attributes:
        scheduler: The scheduler.
        interval: "step" counts optimizer steps really taken, "epoch" counts epochs.
        frequency: Step the scheduler every so many of them.
        monitor: The metric that a ReduceLROnPlateau looks at.
        seen: How often the metric had been updated when it was last looked at.
    """

    scheduler: LRScheduler
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    seen: int = 0


@dataclass(slots=True)
class Optimization:
    """The optimizer of a run with its schedulers."""

    optimizer: torch.optim.Optimizer
    schedulers: list[ScheduledLR] = field(default_factory=list)

    def step_schedulers(
        self, interval: str, count: int, metrics: Mapping[str, tuple[float, int]]
    ) -> None:
        """Step the schedulers of this interval that are due after `count` steps or epochs.

        A ReduceLROnPlateau steps only on a value that is new since it last stepped, so a
        validation every second epoch, or none before `max_steps`, neither repeats nor crashes.

        Args:
            interval: "step" or "epoch".
            count: Optimizer steps taken, or epochs done.
            metrics: Newest value of each metric, and how often it was updated.
        """
        for entry in self.schedulers:
            if entry.interval != interval or count % entry.frequency != 0:
                continue
            if entry.monitor is None:
                entry.scheduler.step()
            elif entry.monitor in metrics:
                value, updates = metrics[entry.monitor]
                if updates > entry.seen:
                    entry.seen = updates
                    entry.scheduler.step(value)  # type: ignore[arg-type]

    def check_monitors(self, metrics: Mapping[str, tuple[float, int]]) -> None:
        """Raise if a scheduler monitors what nobody logs; called once a validation has run.

        Raises:
            MonitorError: The metric is not among those logged so far.
        """
        for entry in self.schedulers:
            if entry.monitor is not None and entry.monitor not in metrics:
                raise MonitorError(
                    f"The scheduler {type(entry.scheduler).__name__} monitors {entry.monitor!r}.",
                    f"Logged so far: {', '.join(sorted(metrics)) or 'nothing'}.",
                    "Log it in validation_step, or name another metric.",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizer and schedulers."""
        return {
            "optimizers": [self.optimizer.state_dict()],
            "lr_schedulers": [
                {"scheduler": _plain_scheduler_state(entry.scheduler), "seen": entry.seen}
                for entry in self.schedulers
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the states.

        Raises:
            CheckpointMismatchError: Other parameters, or another number of schedulers.
        """
        saved = state_dict["lr_schedulers"]
        if len(saved) != len(self.schedulers):
            raise CheckpointMismatchError(
                f"The checkpoint holds {len(saved)} schedulers, "
                f"configure_optimizers returned {len(self.schedulers)}.",
                "Their learning rates would not go on where they stopped.",
                "Resume with the same optimizer and schedulers.",
            )
        try:
            self.optimizer.load_state_dict(state_dict["optimizers"][0])
        except ValueError as error:
            raise CheckpointMismatchError(
                f"The optimizer's state does not fit: {error}.",
                "The checkpoint was made with other parameters or groups.",
                "Resume with the same optimizer.",
            ) from error
        for entry, state in zip(self.schedulers, saved, strict=True):
            entry.scheduler.load_state_dict(state["scheduler"])
            entry.seen = int(state["seen"])


def configure(module: Module) -> Optimization:
    """Call `configure_optimizers` and check what it returns.

    Raises:
        OptimizersError: Not an optimizer, several of them, an optimizer that needs a closure, or a
            scheduler that is none or lacks its monitor.
    """
    returned = module.configure_optimizers()
    optimizer, schedulers = _parts(returned)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _unusable(f"configure_optimizers returned {_kind(returned)}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _unusable("LBFGS calls the loss several times per step, by a closure.")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in trained for parameter in module.parameters()):
        raise _unusable("The optimizer holds no parameter of the module.")
    return Optimization(optimizer, [_scheduled(item, optimizer) for item in schedulers])


def _parts(returned: Any) -> tuple[Any, list[Any]]:
    """Split what the user returned into the optimizer and a list of schedulers."""
    if isinstance(returned, Mapping):
        unknown = set(returned) - {"optimizer", "lr_scheduler"}
        if unknown or "optimizer" not in returned:
            raise _unusable(f"configure_optimizers returned a dict with keys {list(returned)}.")
        scheduler = returned.get("lr_scheduler")
        return returned["optimizer"], _as_list(scheduler)
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        optimizers, schedulers = returned
        if isinstance(schedulers, torch.optim.Optimizer):
            raise _unusable("configure_optimizers returned two optimizers.")
        single = _as_list(optimizers)
        if len(single) != 1:
            raise _unusable(f"configure_optimizers returned {len(single)} optimizers.")
        return single[0], _as_list(schedulers)
    if isinstance(returned, (tuple, list)):
        if len(returned) != 1:
            raise _unusable(f"configure_optimizers returned {len(returned)} things.")
        return returned[0], []
    return returned, []


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _scheduled(item: Any, optimizer: torch.optim.Optimizer) -> ScheduledLR:
    settings = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    unknown = set(settings) - {"scheduler", "interval", "frequency", "monitor"}
    if unknown:
        raise _unusable(f"The scheduler's settings have unknown keys {sorted(unknown)}.")
    entry = ScheduledLR(**settings)
    if not isinstance(entry.scheduler, LRScheduler):
        raise _unusable(f"lr_scheduler is {_kind(entry.scheduler)}.")
    if entry.interval not in ("step", "epoch"):
        raise _unusable(f"The scheduler's interval is {entry.interval!r}, not 'step' or 'epoch'.")
    if not isinstance(entry.frequency, int) or entry.frequency < 1:
        raise _unusable(f"The scheduler's frequency is {entry.frequency!r}, not a whole number.")
    if entry.scheduler.optimizer is not optimizer:
        raise _unusable("The scheduler belongs to another optimizer.")
    plateau = isinstance(entry.scheduler, ReduceLROnPlateau)
    if plateau and not entry.monitor:
        raise _unusable("ReduceLROnPlateau needs to know the metric it looks at: monitor.")
    if entry.monitor and not plateau:
        raise _unusable(f"{type(entry.scheduler).__name__} looks at no metric; drop monitor.")
    return entry


def _plain_scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the state without the functions that some schedulers keep in it."""
    return {
        name: value
        for name, value in scheduler.state_dict().items()
        if not isinstance(value, Callable)  # type: ignore[arg-type]
    }


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__}"


def _unusable(what: str) -> OptimizersError:
    return OptimizersError(
        what,
        "The trainer steps one optimizer per window.",
        "Return an optimizer, (optimizer, scheduler), or {'optimizer': ..., 'lr_scheduler': "
        "{'scheduler': ..., 'interval': 'step' or 'epoch', 'frequency': 1, 'monitor': name}}.",
    )
