"""Checks of arguments: what passes, and that a refusal names owner, argument and value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minitrainer.checks import check_choice, check_number, check_whole
from minitrainer.errors import SettingError


def test_what_makes_sense_passes() -> None:
    check_whole("Owner", "n", 1, at_least=1)
    check_number("Owner", "x", 0.0, at_least=0)
    check_number("Owner", "x", 3, at_least=0)
    check_choice("Owner", "mode", "min", ("min", "max"))


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(SettingError) as raised:
        check_whole("Owner", "n", value, at_least=1)
    assert str(raised.value) == f"[R01] Owner got n={value!r}. Give a whole number of at least 1."


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, True, "1", None])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match="Give a number of at least 0"):
        check_number("Owner", "x", value, at_least=0)


@pytest.mark.parametrize("value", ["MIN", None, ["min"]])
def test_what_is_no_choice_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match="Give one of min, max"):
        check_choice("Owner", "mode", value, ("min", "max"))
