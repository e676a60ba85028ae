"""Checks of the arguments of callbacks, loggers and plugins."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from minitrainer.errors import SettingError


def check_whole(owner: str, name: str, value: Any, *, at_least: int) -> None:
    """Raise SettingError unless the value is a whole number of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise SettingError(
            f"{owner} got {name}={value!r}.", fix=f"Give a whole number of at least {at_least}."
        )


def check_number(owner: str, name: str, value: Any, *, at_least: float) -> None:
    """Raise SettingError unless the value is a finite number of at least `at_least`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < at_least:
        raise SettingError(
            f"{owner} got {name}={value!r}.", fix=f"Give a number of at least {at_least:g}."
        )


def check_choice(owner: str, name: str, value: Any, choices: Collection[str]) -> None:
    """Raise SettingError unless the value is one of the choices."""
    if value not in choices:
        raise SettingError(
            f"{owner} got {name}={value!r}.", fix=f"Give one of {', '.join(choices)}."
        )
