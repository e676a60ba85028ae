"""Monitor: where a metric comes from, and what is better."""

from __future__ import annotations

import math

import pytest

from minitrainer.errors import MonitorError
from minitrainer.monitor import Monitor

NAN = math.nan


@pytest.mark.parametrize(
    ("before", "after", "of_validation"),
    [
        ({}, {"a": 1.0}, True),
        ({"a": 2.0}, {"a": 1.0}, True),  # after a resume, or with a new callback
        ({"a": 1.0}, {"a": 1.0}, False),
        ({"a": NAN}, {"a": NAN}, False),
        ({"a": 1.0}, {"a": NAN}, True),
        ({}, {"b": 1.0}, False),
    ],
)
def test_what_a_validation_changes_is_its_own(
    before: dict[str, float], after: dict[str, float], of_validation: bool
) -> None:
    monitor = Monitor("Owner", "a", "min")
    monitor.validation_starts(before)
    monitor.validation_ends(after)
    assert monitor.is_of_validation is of_validation
    # Seen once, it stays so, and through a checkpoint.
    monitor.validation_starts(after)
    monitor.validation_ends(after)
    again = Monitor("Owner", "a", "min")
    assert again.load_state_dict(monitor.state_dict())
    assert again.is_of_validation is of_validation
    assert not Monitor("Owner", "b", "min").load_state_dict(monitor.state_dict())
    assert not Monitor("Owner", "a", "max").load_state_dict(monitor.state_dict())


def test_nan_and_infinities_are_never_better() -> None:
    """Case B114: NaN is never best."""
    for mode in ("min", "max"):
        monitor = Monitor("Owner", "a", mode)  # type: ignore[arg-type]
        for value in (NAN, math.inf, -math.inf):
            assert not monitor.is_better(value, None)
            assert not monitor.is_better(value, 1.0)
        assert monitor.is_better(1.0, None)
        assert not monitor.is_better(1.0, 1.0)
    assert Monitor("Owner", "a", "min").is_better(0.5, 1.0)
    assert Monitor("Owner", "a", "max").is_better(1.0, 0.5)
    assert not Monitor("Owner", "a", "max", min_delta=0.5).is_better(1.0, 0.5)


def test_a_missing_metric_is_an_error_once_a_validation_has_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = Monitor("Owner", "val_acc", "max")
    assert monitor.check_epoch_end({"val_acc": 1.0}, 0)
    assert not monitor.check_epoch_end({"loss": 1.0}, 0)
    assert not monitor.check_epoch_end({"loss": 1.0}, 1)
    assert len(caplog.records) == 1
    monitor.validation_starts({})
    monitor.validation_ends({"loss": 1.0, "val_accuracy": 0.5})
    with pytest.raises(MonitorError, match=r"Owner monitors 'val_acc'.*val_accuracy\?"):
        monitor.check_epoch_end({"loss": 1.0, "val_accuracy": 0.5}, 2)
