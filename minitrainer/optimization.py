"""What `configure_optimizers` returns, checked; and when schedulers step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from minitrainer.errors import CheckpointMismatchError, MonitorError, OptimizersError
from minitrainer.fused import use_fused
from minitrainer.module import Module

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ScheduledLR:
    """A learning rate scheduler and when it steps.

    Attributes:
        scheduler: The scheduler.
        interval: "step" counts optimizer steps really taken, "epoch" counts epochs; with "manual"
            the user steps it.
        frequency: Step the scheduler every so many of them.
        monitor: The metric that a ReduceLROnPlateau looks at.
        seen: How often the metric had been updated when it was last looked at.
    """

    scheduler: LRScheduler
    interval: Literal["step", "epoch", "manual"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    seen: int = 0
    ended: bool = False

    def step(self) -> None:
        """Step the scheduler, unless it was planned for fewer steps than the run takes.

        One like OneCycleLR would raise. That many steps come of a resume in another layout or with
        more epochs; the learning rate stays what it was in the end.
        """
        planned = getattr(self.scheduler, "total_steps", None)
        if planned is None or self.scheduler.last_epoch < planned:
            self.scheduler.step()
        elif not self.ended:
            self.ended = True
            _logger.warning(
                "[T36] %s was planned for %d steps, and the run takes more: the learning rate "
                "stays as it is now.",
                type(self.scheduler).__name__,
                planned,
            )


@dataclass(slots=True)
class Optimization:
    """The optimizers of a run, one unless the user steps them, with their schedulers."""

    optimizers: list[torch.optim.Optimizer]
    schedulers: list[ScheduledLR] = field(default_factory=list)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer, the only one that the trainer steps itself."""
        return self.optimizers[0]

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
                entry.step()
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
        """Return the states of optimizers and schedulers."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "lr_schedulers": [
                {"scheduler": _plain_scheduler_state(entry.scheduler), "seen": entry.seen}
                for entry in self.schedulers
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the states.

        Raises:
            CheckpointMismatchError: Other parameters, or another number of optimizers or
                schedulers.
        """
        for kind, saved, here in (
            ("optimizers", state_dict["optimizers"], self.optimizers),
            ("schedulers", state_dict["lr_schedulers"], self.schedulers),
        ):
            if len(saved) != len(here):
                raise CheckpointMismatchError(
                    f"The checkpoint holds {len(saved)} {kind}, "
                    f"configure_optimizers returned {len(here)}.",
                    "They would not go on where they stopped.",
                    "Resume with the same optimizers and schedulers.",
                )
        try:
            for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointMismatchError(
                f"The optimizer's state does not fit: {error}.",
                "The checkpoint was made with other parameters or groups.",
                "Resume with the same optimizer.",
            ) from error
        for entry, state in zip(self.schedulers, state_dict["lr_schedulers"], strict=True):
            entry.scheduler.load_state_dict(state["scheduler"])
            entry.seen = int(state["seen"])

    def rates(self) -> dict[str, Any]:
        """Return what schedulers change: the settings of all groups, and the schedulers' states."""
        return {
            "groups": [
                [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups]
                for o in self.optimizers
            ],
            "schedulers": [_plain_scheduler_state(entry.scheduler) for entry in self.schedulers],
        }

    def load_rates(self, rates: Mapping[str, Any]) -> None:
        """Take over what `rates` returned on another rank."""
        for optimizer, saved in zip(self.optimizers, rates["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, saved, strict=True):
                group.update(settings)
        for entry, state in zip(self.schedulers, rates["schedulers"], strict=True):
            entry.scheduler.load_state_dict(state)


def configure(module: Module) -> Optimization:
    """Call `configure_optimizers`, check what it returns, and have optimizers use fused kernels.

    Raises:
        OptimizersError: Not an optimizer, several of them that nobody would step, an optimizer
            that needs a closure, or a scheduler that is none or lacks its monitor.
    """
    returned = module.configure_optimizers()
    optimizers, schedulers = _parts(returned)
    manual = not module.automatic_optimization
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise _unusable(f"configure_optimizers returned {_kind(returned)}.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise _unusable("LBFGS calls the loss several times per step, by a closure.")
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(parameter) in trained for parameter in module.parameters()):
            raise _unusable("The optimizer holds no parameter of the module.")
    if len(optimizers) != 1 and not (manual and optimizers):
        raise OptimizersError(
            f"configure_optimizers returned {len(optimizers)} optimizers.",
            "The trainer steps one optimizer per window.",
            "Return one; or set automatic_optimization = False and step them in training_step.",
        )
    for optimizer in optimizers:
        use_fused(optimizer, module)
    return Optimization(
        optimizers, [_scheduled(item, optimizers, manual=manual) for item in schedulers]
    )


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Split what the user returned into optimizers and schedulers."""
    items = _as_list(returned)
    if isinstance(returned, (tuple, list)) and len(items) == 2 and not _is_entry(items[1]):
        items, schedulers = _as_list(items[0]), _as_list(items[1])
    else:
        schedulers = []
    optimizers = []
    for item in items:
        if isinstance(item, Mapping):
            unknown = set(item) - {"optimizer", "lr_scheduler"}
            if unknown or "optimizer" not in item:
                raise _unusable(f"configure_optimizers returned a dict with keys {list(item)}.")
            optimizers.append(item["optimizer"])
            schedulers += _as_list(item.get("lr_scheduler"))
        else:
            optimizers.append(item)
    return optimizers or [None], schedulers


def _is_entry(item: Any) -> bool:
    """Return whether the item stands for an optimizer, and not for schedulers."""
    is_dict = isinstance(item, Mapping) and "optimizer" in item
    return is_dict or isinstance(item, torch.optim.Optimizer)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _scheduled(
    item: Any, optimizers: Sequence[torch.optim.Optimizer], *, manual: bool
) -> ScheduledLR:
    settings = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    unknown = set(settings) - {"scheduler", "interval", "frequency", "monitor"}
    if unknown:
        raise _unusable(f"The scheduler's settings have unknown keys {sorted(unknown)}.")
    entry = ScheduledLR(**settings)
    if not isinstance(entry.scheduler, LRScheduler):
        raise _unusable(f"lr_scheduler is {_kind(entry.scheduler)}.")
    if all(entry.scheduler.optimizer is not optimizer for optimizer in optimizers):
        raise _unusable("The scheduler belongs to another optimizer.")
    if manual:
        idle = sorted(set(settings) - {"scheduler"})
        if idle:
            raise OptimizersError(
                f"The scheduler's settings have {', '.join(idle)}.",
                "With automatic_optimization = False the trainer steps no scheduler.",
                "Step it yourself, self.lr_schedulers().step(), when it is due.",
            )
        return ScheduledLR(entry.scheduler, interval="manual")
    if entry.interval not in ("step", "epoch"):
        raise _unusable(f"The scheduler's interval is {entry.interval!r}, not 'step' or 'epoch'.")
    if not isinstance(entry.frequency, int) or entry.frequency < 1:
        raise _unusable(f"The scheduler's frequency is {entry.frequency!r}, not a whole number.")
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
