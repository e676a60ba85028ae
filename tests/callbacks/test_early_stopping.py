"""EarlyStopping: when it stops, and that all ranks stop alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from minitrainer.callbacks.early_stopping import EarlyStopping
from minitrainer.errors import MonitorError, SettingError
from tests.callbacks.view import MODULE, FakeTrainer

NAN = math.nan


def epochs_until_stop(trainer: FakeTrainer, values: list[float], name: str = "loss") -> int | None:
    for number, value in enumerate(values, start=1):
        trainer.epoch(validation={name: value})
        if trainer.should_stop:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "arguments", "stops_after", "best"),
    [
        ([1, NAN, 0.9, 1, 1], {"patience": 2, "check_finite": False}, 5, 0.9),
        ([1, NAN, 0.9, 1, 1], {"patience": 2}, 2, 1),
        ([NAN, NAN, NAN], {"patience": 2, "check_finite": False}, 2, None),
        ([1, math.inf], {}, 2, 1),
        ([1, -math.inf, 1], {"check_finite": False, "patience": 2}, 3, 1),
        ([3, 2, 1, 2, 1, 0.5, 1, 1], {"patience": 3}, None, 0.5),
        ([3, 3], {"patience": 1}, 2, 3),
        ([3, 3], {"patience": 0}, 2, 3),
        ([1, 2, 2.05, 2.2], {"mode": "max", "min_delta": 0.1, "patience": 1}, 3, 2),
        ([1, 0.95, 0.9], {"min_delta": 0.1, "patience": 2}, 3, 1),
    ],
)
def test_it_stops_when_it_should(
    values: list[float], arguments: dict[str, Any], stops_after: int | None, best: float | None
) -> None:
    """Case B114: NaN is no improvement, an improvement resets the counter."""
    trainer, callback = FakeTrainer(), EarlyStopping(monitor="loss", **arguments)
    trainer.start(callback)
    assert epochs_until_stop(trainer, values) == stops_after
    assert callback.best_score == best
    assert callback.stopped_epoch == (None if stops_after is None else stops_after - 1)


def test_the_reason_is_told_once_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        trainer = FakeTrainer(global_rank=rank)
        trainer.start(EarlyStopping(monitor="loss", patience=1))
        epochs_until_stop(trainer, [1.0, 1.5])
        with caplog.at_level("INFO"):
            trainer.end()
    assert [record.message for record in caplog.records] == [
        "Stopped in epoch 1: loss did not get better in 1 looks; best is 1."
    ]


@pytest.mark.parametrize("at_end", [True, False])
def test_not_before_min_epochs(at_end: bool) -> None:
    """The counting goes on; a better value in between calls the stop off."""

    def epoch(trainer: FakeTrainer, value: float) -> None:
        trainer.step()
        trainer.validate(loss=value)
        assert not trainer.should_stop or trainer.current_epoch >= 3
        if not at_end:
            trainer.step()
        trainer.end_epoch(validated=at_end)

    trainer, callback = FakeTrainer(min_epochs=3), EarlyStopping(monitor="loss", patience=1)
    trainer.start(callback)
    for value in (1.0, 2.0, 0.5):
        epoch(trainer, value)
    assert not trainer.should_stop
    epoch(trainer, 0.6)
    assert trainer.should_stop
    assert callback.stopped_epoch == 3

    trainer = FakeTrainer(min_epochs=3)
    trainer.start(EarlyStopping(monitor="loss", patience=1))
    for value in (1.0, 2.0, 2.0):
        assert not trainer.should_stop
        epoch(trainer, value)
    assert trainer.should_stop


def test_a_training_metric_is_looked_at_once_per_epoch() -> None:
    trainer, callback = FakeTrainer(), EarlyStopping(monitor="train_loss", patience=2)
    trainer.start(callback)
    for value in (3.0, 2.0, 2.0):
        trainer.step()
        trainer.validate(other=trainer.global_step)
        trainer.save_point(validated=True)
        trainer.end_epoch(train_loss=value)
    assert callback.wait_count == 1
    assert callback.best_score == 2.0


def test_a_validation_metric_is_looked_at_after_each_validation_only() -> None:
    trainer, callback = FakeTrainer(), EarlyStopping(monitor="loss", patience=2)
    trainer.start(callback)
    trainer.epoch(validation={"loss": 1.0})
    for _ in range(3):
        trainer.epoch()  # no validation, nothing new
    assert callback.wait_count == 0
    trainer.validate(loss=1.1)
    trainer.validate(loss=1.2)
    assert trainer.should_stop


def test_a_validation_outside_of_fit_does_not_count() -> None:
    trainer, callback = FakeTrainer(), EarlyStopping(monitor="loss", patience=1)
    trainer.start(callback)
    trainer.epoch(validation={"loss": 1.0})
    trainer.end()
    trainer.validate(loss=2.0)
    assert (callback.wait_count, trainer.should_stop) == (0, False)
    trainer.start(callback)
    callback.on_exception(trainer, MODULE, KeyboardInterrupt())
    trainer.validate(loss=3.0)
    assert (callback.wait_count, trainer.should_stop) == (0, False)


def test_a_metric_that_nobody_logs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = FakeTrainer()
    trainer.start(EarlyStopping(monitor="val_los"))
    trainer.epoch()
    trainer.epoch()
    assert [record.message for record in caplog.records] == [
        "[T03] EarlyStopping monitors 'val_los', which nobody had logged by the end of epoch 0. "
        "Logged so far: nothing."
    ]
    with pytest.raises(MonitorError, match=r"\[T03\].*Did you mean val_loss or val_other"):
        trainer.epoch(validation={"val_loss": 1.0, "val_other": 2.0})


def test_counter_and_best_value_survive_a_resume(tmp_path: Path) -> None:
    whole = FakeTrainer()
    whole.start(EarlyStopping(monitor="loss", patience=3))
    values = [2.0, 1.0, 1.5, 1.5, 1.5, 1.5]
    expected = epochs_until_stop(whole, values)
    assert expected == 5
    first = FakeTrainer()
    first.start(EarlyStopping(monitor="loss", patience=3))
    assert epochs_until_stop(first, values[:3]) is None
    first.save_checkpoint(tmp_path / "a.ckpt")
    # A run gets its old metrics back too.
    second = FakeTrainer(current_epoch=3, callback_metrics={"loss": 1.5})
    callback = EarlyStopping(monitor="loss", patience=3)
    second.start(callback, resume=tmp_path / "a.ckpt")
    assert epochs_until_stop(second, values[3:]) == 2
    assert (callback.best_score, callback.stopped_epoch) == (1.0, 4)
    # The counter of another metric is of no use.
    other = EarlyStopping(monitor="acc", mode="max")
    other.load_state_dict(callback.state_dict())
    assert (other.best_score, other.wait_count) == (None, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"monitor": ""},
        {"monitor": "a", "mode": "up"},
        {"monitor": "a", "patience": -1},
        {"monitor": "a", "patience": 1.5},
        {"monitor": "a", "min_delta": -0.1},
        {"monitor": "a", "min_delta": NAN},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="EarlyStopping got"):
        EarlyStopping(**arguments)
