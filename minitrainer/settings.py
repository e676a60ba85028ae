"""The numbers a Trainer is given, checked; and when validation is due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from minitrainer.errors import SettingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Limits and intervals; the fields are documented at `Trainer`."""

    max_epochs: int | None
    max_steps: int | None
    min_epochs: int
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    log_every_n_steps: int
    seed: int

    def __post_init__(self) -> None:
        """Raise SettingError for the first value that makes no sense."""
        for name, value, least in (
            ("max_epochs", self.max_epochs, 0),
            ("max_steps", self.max_steps, 0),
            ("min_epochs", self.min_epochs, 0),
            ("check_val_every_n_epoch", self.check_val_every_n_epoch, 1),
            ("log_every_n_steps", self.log_every_n_steps, 1),
            ("seed", self.seed, 0),
        ):
            if value is not None and not _is_whole(value, least):
                raise _bad(name, value, f"a whole number of at least {least}")
        for name in ("gradient_clip_norm", "gradient_clip_value"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise _bad(name, value, "a number above 0, or nothing")
        for field in fields(self):
            if field.name.startswith("limit_"):
                _check_limit(field.name, getattr(self, field.name))
        _check_interval(self.val_check_interval)

    def resolved(self) -> Settings:
        """Return the settings with one epoch as the limit where no limit was given."""
        if self.max_epochs is None and self.max_steps is None:
            return replace(self, max_epochs=1)
        return self

    def for_dry_run(self, window_size: int) -> Settings:
        """Return settings for two optimizer steps and two batches of each evaluation."""
        return replace(
            self,
            max_epochs=1,
            max_steps=None,
            min_epochs=0,
            limit_train_batches=2 * window_size,
            limit_val_batches=2,
            limit_test_batches=2,
            limit_predict_batches=2,
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
            log_every_n_steps=1,
        )


def windows_in(num_batches: int, window_size: int) -> int:
    """Return the number of windows that `num_batches` micro-batches make; the last may be short."""
    return -(-num_batches // window_size)


def total_steps(settings: Settings, windows_per_epoch: Iterator[int] | None) -> int | None:
    """Return the optimizer steps of the whole run, None when nothing limits or tells them.

    Args:
        settings: Resolved settings.
        windows_per_epoch: The windows of epoch 0, 1, ... for ever; None when unknown.
    """
    if windows_per_epoch is None or settings.max_epochs is None:
        return settings.max_steps
    steps = 0
    for _ in range(settings.max_epochs):
        steps += next(windows_per_epoch)
        if settings.max_steps is not None and steps >= settings.max_steps:
            return settings.max_steps
    return steps


class ValidationClock:
    """When validation is due.

    A whole number counts optimizer steps through all epochs; a fraction means that part of an
    epoch, counted anew in each. 1.0 is the end of the epoch.

    Args:
        settings: Resolved settings.
        windows: Windows of the epoch, None when unknown.

    Raises:
        SettingError: The interval is longer than the epoch and was not said to be meant so, or is
            a part of an epoch of unknown length.
    """

    def __init__(self, settings: Settings, windows: int | None) -> None:
        interval = settings.val_check_interval
        self._every_n_epoch = settings.check_val_every_n_epoch
        self._steps = interval if isinstance(interval, int) else None
        self._windows: int | None = None
        if self._steps is not None:
            if windows is not None and self._steps > windows and self._every_n_epoch is not None:
                raise SettingError(
                    f"val_check_interval={interval} is longer than the epoch of {windows} steps.",
                    "A validation would not take place in every epoch.",
                    "Use a smaller number, or check_val_every_n_epoch=None (null in a recipe) to "
                    "count on through the epochs.",
                )
        elif interval != 1.0:
            if windows is None:
                raise SettingError(
                    f"val_check_interval={interval} is a part of an epoch of unknown length.",
                    fix="Give a whole number of optimizer steps.",
                )
            self._windows = max(1, int(windows * interval))

    def at_epoch_end(self, epoch: int) -> bool:
        """Return whether to validate after an epoch whose last window nobody could tell."""
        ends = self._steps is None and self._windows is None
        return ends and self._covers(epoch)

    def is_due(
        self, *, epoch: int, window_idx: int, global_step: int, taken: bool, epoch_end: bool
    ) -> bool:
        """Return whether to validate after this window.

        Args:
            epoch: The running epoch, from 0.
            window_idx: Windows done in it.
            global_step: Optimizer steps taken.
            taken: Whether the window's step was taken.
            epoch_end: Whether it was the last window of the epoch.
        """
        if not self._covers(epoch):
            return False
        if self._steps is not None:
            return taken and global_step % self._steps == 0
        if self._windows is not None:
            return window_idx % self._windows == 0
        return epoch_end

    def _covers(self, epoch: int) -> bool:
        return self._every_n_epoch is None or (epoch + 1) % self._every_n_epoch == 0


def _check_limit(name: str, value: object) -> None:
    if value is None or _is_whole(value, 0):
        return
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return
    raise _bad(name, value, "a number of batches, a fraction between 0.0 and 1.0, or nothing")


def _check_interval(value: object) -> None:
    if not (_is_whole(value, 1) or (isinstance(value, float) and 0.0 < value <= 1.0)):
        raise _bad(
            "val_check_interval",
            value,
            "a whole number of optimizer steps, or a fraction of an epoch above 0.0 up to 1.0",
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(float(value))  # type: ignore[arg-type]


def _bad(name: str, value: object, wanted: str) -> SettingError:
    return SettingError(f"{name}={value!r} makes no sense.", fix=f"Give {wanted}.")
