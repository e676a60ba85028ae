"""The learning rate rule: by value, whatever the scheduler, and never silent."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import minitrainer as mt
from minitrainer.errors import SettingError
from tests.toys import Lin, Rows, loader, quiet


def test_factors() -> None:
    linear = mt.LearningRateRule("linear", base_batch=256, warmup_steps=3)
    assert linear.factor(1024) == 4.0
    assert [linear.factor(1024, step) for step in range(5)] == [1.75, 2.5, 3.25, 4.0, 4.0]
    assert mt.LearningRateRule("sqrt", base_batch=256).factor(1024) == 2.0
    assert mt.LearningRateRule("linear", base_batch=256).factor(128, 0) == 0.5


def test_steps_are_taken_with_the_multiple_and_schedulers_do_not_see_it() -> None:
    class Scheduled(Lin):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return optimizer, {"scheduler": scheduler, "interval": "step"}

    rows, module = Rows(), Scheduled()
    trainer = quiet(
        lr_rule=mt.LearningRateRule(base_batch=1),
        accumulate=2,
        loggers=[rows],
        run_dir="run",
        log_every_n_steps=1,
    )
    trainer.fit(module, loader([1.0] * 8, batch_size=2))
    # A global batch of 4: learning rates 1 and 0.5, times 4.
    assert module.w.item() == -6.0
    assert rows.column("lr_factor") == [4.0, 4.0]


def test_the_ledger_says_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minitrainer")
    quiet(lr_rule=mt.LearningRateRule("sqrt", base_batch=2, warmup_steps=5)).fit(
        Lin(), loader([1.0] * 8, batch_size=8)
    )
    assert "1 x 2 (sqrt rule: global batch 8 / 2, after 5 steps of warm-up)" in caplog.text
    caplog.clear()
    quiet().fit(Lin(), loader([1.0]))
    assert "1, as given: no rule follows the global batch" in caplog.text


@pytest.mark.parametrize(
    "settings", [{"base_batch": 0}, {"base_batch": 2, "warmup_steps": -1}, {"base_batch": 1.5}]
)
def test_refuses_what_makes_no_sense(settings: Any) -> None:
    with pytest.raises(SettingError, match="R01"):
        mt.LearningRateRule(**settings)
    with pytest.raises(SettingError, match="cubic"):
        mt.LearningRateRule("cubic", base_batch=1)  # type: ignore[arg-type]


def test_an_unknown_global_batch_is_an_error() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter([torch.ones(2)])

    with pytest.raises(SettingError, match="lr_rule"):
        quiet(lr_rule=mt.LearningRateRule(base_batch=1)).fit(Lin(), Stream())
