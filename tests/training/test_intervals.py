"""Limits and intervals: how many batches, and when validation takes place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minitrainer.errors import EmptyDataError, LoaderError, SettingError
from tests.toys import Idx, Lin, Values, loader, quiet


class Validated(Lin):
    """Notes (global_step, epoch) of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.at.append(self.global_step)


def validations(batches: int, **settings: Any) -> list[int]:
    module = Validated()
    quiet(**settings).fit(module, loader([0.0] * batches), loader([0.0, 0.0]))
    return module.at


def test_interval_in_steps_counts_optimizer_steps_through_the_epochs() -> None:
    """Case B107: 10 batches, accumulate 4, 2 epochs, every 2 steps: at steps 2, 4, 6."""
    assert validations(10, accumulate=4, max_epochs=2, val_check_interval=2) == [2, 4, 6]


def test_interval_across_epochs_and_whole_number_against_fraction() -> None:
    """Case B108: 15 batches per epoch; 10 is steps, 1 is every step, 1.0 is once per epoch."""
    whole = {"max_epochs": 3, "val_check_interval": 10}
    assert validations(15, **whole) == [10, 20, 30, 40]
    assert validations(15, **whole, check_val_every_n_epoch=None) == [10, 20, 30, 40]
    assert validations(15, max_epochs=1, val_check_interval=1) == list(range(1, 16))
    assert validations(15, max_epochs=2, val_check_interval=1.0) == [15, 30]
    assert validations(15, max_epochs=1, val_check_interval=0.5) == [7, 14]
    assert validations(15, max_epochs=2, val_check_interval=20, check_val_every_n_epoch=None) == [
        20
    ]


def test_interval_in_epochs() -> None:
    assert validations(3, max_epochs=5, check_val_every_n_epoch=2) == [6, 12]


def test_interval_longer_than_the_epoch_is_an_error() -> None:
    with pytest.raises(SettingError, match="20 is longer than the epoch of 15 steps"):
        validations(15, val_check_interval=20)


def test_fraction_of_an_epoch_of_unknown_length_is_an_error() -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter([torch.tensor(1.0)] * 3)

    stream = torch.utils.data.DataLoader(Stream())
    with pytest.raises(SettingError, match="unknown length"):
        quiet(val_check_interval=0.5).fit(Validated(), stream, loader([0.0]))
    # Once per epoch and every n steps need no length.
    module = Validated()
    quiet(max_epochs=2).fit(module, stream, loader([0.0]))
    assert module.at == [3, 6]
    module = Validated()
    quiet(max_epochs=2, val_check_interval=2).fit(module, stream, loader([0.0]))
    assert module.at == [2, 4, 6]


@pytest.mark.parametrize(
    ("limit", "calls"), [(0.5, 5), (3, 3), (0.01, 1), (0, 0), (1.0, 10), (99, 10), (None, 10)]
)
def test_limits(limit: Any, calls: int) -> None:
    """Case B111: 10 batches; the dataset is asked for at most one batch more."""
    asked = []

    class Counting(Values):
        def __getitem__(self, index: int) -> torch.Tensor:
            asked.append(index)
            return super().__getitem__(index)

    def data() -> Any:
        return torch.utils.data.DataLoader(Counting([0.0] * 10))

    module = Idx()
    quiet(limit_train_batches=limit).fit(module, data())
    assert len(module.seen) == calls
    assert len(asked) <= calls + 1
    validated = Validated()
    if limit != 0:
        asked.clear()
        quiet(limit_val_batches=limit).validate(validated, data())
        assert len(asked) == calls


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": -1},
        {"max_epochs": 1.5},
        {"max_steps": True},
        {"limit_train_batches": -1},
        {"limit_val_batches": 1.5},
        {"limit_test_batches": True},
        {"val_check_interval": 0},
        {"val_check_interval": 0.0},
        {"val_check_interval": 1.5},
        {"check_val_every_n_epoch": 0},
        {"log_every_n_steps": 0},
        {"seed": -1},
        {"gradient_clip_norm": 0.0},
        {"gradient_clip_value": float("nan")},
    ],
)
def test_refuses_numbers_that_make_no_sense(settings: Any) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        quiet(**settings)


def test_max_steps_and_epochs() -> None:
    def steps(**settings: Any) -> tuple[int, int]:
        trainer = quiet(**settings)
        trainer.fit(Lin(), loader([1.0] * 5))
        return trainer.global_step, trainer.current_epoch

    assert steps(max_epochs=3) == (15, 3)
    assert steps(max_steps=7) == (7, 1)
    assert steps(max_steps=10) == (10, 2)
    assert steps(max_steps=7, max_epochs=1) == (5, 1)
    assert steps(max_epochs=0) == (0, 0)
    assert steps() == (5, 1)


def test_dry_run_takes_two_steps_and_writes_nothing(tmp_path: Any) -> None:
    module = Validated()
    trainer = quiet(
        dry_run=True, accumulate=3, loggers=None, enable_checkpointing=True, max_epochs=50
    )
    trainer.fit(module, loader([0.0] * 100), loader([0.0] * 10))
    assert trainer.global_step == 2
    assert module.at == [2]
    assert list(tmp_path.iterdir()) == []


def test_missing_and_empty_data() -> None:
    with pytest.raises(LoaderError, match="training"):
        quiet().fit(Lin())
    with pytest.raises(EmptyDataError, match="D01"):
        quiet().fit(Lin(), loader([]))
    with pytest.raises(LoaderError, match="test"):
        quiet().test(_Tested())
    with pytest.raises(SettingError, match="validation_step"):
        quiet().validate(Lin(), loader([1.0]))


class _Tested(Lin):
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", batch.mean())


def test_test_and_predict() -> None:
    assert quiet().test(_Tested(), loader([1.0, 2.0, 6.0])) == {"x": 3.0}

    class Predicting(Lin):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch * 2

    outputs = quiet().predict(Predicting(), loader([1.0, 2.0, 6.0], batch_size=2))
    assert [output.tolist() for output in outputs] == [[2.0, 4.0], [12.0]]
