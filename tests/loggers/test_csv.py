"""CSVLogger: whole rows, exact numbers, nothing lost by a kill or doubled by a resume."""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from minitrainer import protocols
from minitrainer.errors import LogError, SettingError
from minitrainer.loggers.csv import CSVLogger


def started(folder: Path, resume_step: int | None = None) -> CSVLogger:
    logger = CSVLogger()
    logger.start(folder, resume_step=resume_step)
    return logger


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_one_row_per_step_with_exact_numbers(tmp_path: Path) -> None:
    """Case B45: steps strictly increasing, one row each."""
    logger: protocols.Logger = started(tmp_path)
    assert isinstance(logger, protocols.Logger)
    values = [0.1, 1 / 3, 1e-300, math.inf, -math.inf, math.nan, 2.0**60]
    for step, value in enumerate(values, start=1):
        logger.log_metrics({"epoch": 0, "a, b": value}, step)
    logger.finish()
    text = (tmp_path / "metrics.csv").read_text()
    assert text.splitlines()[0] == 'step,epoch,"a, b"'
    assert text.splitlines()[4:7] == ["4,0,inf", "5,0,-inf", "6,0,nan"]
    assert "\r" not in text
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(1, 8))
    read = [float(row["a, b"]) for row in rows(tmp_path)]
    assert all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(read, values, strict=True)
    )


def test_numbers_of_other_types_are_numbers(tmp_path: Path) -> None:
    import numpy as np

    logger = started(tmp_path)
    logger.log_metrics({"a": np.float64(0.1), "b": torch.tensor(2.0), "c": True}, 1)  # type: ignore[dict-item]
    logger.finish()
    assert rows(tmp_path) == [{"step": "1", "a": "0.1", "b": "2.0", "c": "1.0"}]


def test_a_later_metric_gets_a_column_and_old_rows_are_padded(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_metrics({"loss": 0.5, "val": 2.0}, 2)
    logger.log_metrics({"val": 3.0}, 3)
    logger.log_metrics({"grad": 4.0, "loss": 0.25}, 4)
    logger.finish()
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,loss,val,grad\n1,1.0,,\n2,0.5,2.0,\n3,,3.0,\n4,0.25,,4.0\n"
    )
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_step_that_comes_again_joins_its_row(tmp_path: Path) -> None:
    """Case B45, over a resume too: no step has two rows."""
    logger = started(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_metrics({"loss": 0.5}, 2)
    logger.log_metrics({"val": 2.0}, 2)
    logger.finish()
    logger = started(tmp_path, resume_step=2)
    logger.log_metrics({"lr": 0.1}, 2)
    logger.log_metrics({"loss": 0.25}, 3)
    logger.finish()
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,loss,val,lr\n1,1.0,,\n2,0.5,2.0,0.1\n3,0.25,,\n"
    )


@pytest.mark.parametrize("resume_step", [0, 2, 9])
def test_a_resume_drops_later_rows_and_keeps_the_rest(tmp_path: Path, resume_step: int) -> None:
    logger = started(tmp_path)
    for step in (1, 2, 3, 4):
        logger.log_metrics({"loss": step / 8}, step)
    logger.finish()
    logger = started(tmp_path, resume_step)
    for step in range(resume_step + 1, 6):
        logger.log_metrics({"loss": step / 8}, step)
    logger.finish()
    last = 4 if resume_step == 9 else 5
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(1, last + 1))
    assert [float(row["loss"]) for row in rows(tmp_path)] == [
        int(row["step"]) / 8 for row in rows(tmp_path)
    ]


def test_a_start_without_resume_begins_anew_and_a_resume_without_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,x\n1,2.0\n")
    started(tmp_path).finish()
    assert (tmp_path / "metrics.csv").read_text() == "step\n"
    (tmp_path / "new").mkdir()
    logger = started(tmp_path / "new", resume_step=5)
    logger.log_metrics({"x": 1.0}, 6)
    logger.finish()
    assert rows(tmp_path / "new") == [{"step": "6", "x": "1.0"}]


@pytest.mark.parametrize("tail", ["3,0.", "3", "\0\0\0", "\n", "x,y\n", "\udcff,1\n"])
def test_a_row_that_was_cut_off_is_dropped(tmp_path: Path, tail: str) -> None:
    content = f"step,loss\n1,0.5\n2,0.25\n{tail}".encode(errors="surrogateescape")
    (tmp_path / "metrics.csv").write_bytes(content)
    logger = started(tmp_path, resume_step=9)
    logger.log_metrics({"loss": 1.0}, 10)
    logger.finish()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,0.5\n2,0.25\n10,1.0\n"


def test_a_kill_loses_no_row(tmp_path: Path) -> None:
    def run() -> None:
        logger = started(tmp_path)
        for step in range(1, 6):
            logger.log_metrics({"loss": 1.0, **({"val": 2.0} if step > 3 else {})}, step)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4", "5"]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_metric_called_step_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"step": 7.0, "a": 1.0}, 1)
    logger.log_metrics({"step": 8.0, "a": 1.0}, 2)
    logger.finish()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]
    assert len(caplog.records) == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match=r"metrics\.csv could not be written: Not a directory"):
        CSVLogger().start(tmp_path / "file", resume_step=None)
    logger = started(tmp_path)
    logger._file.close()  # type: ignore[union-attr]
    logger._file = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(LogError, match="No space left on device"):
        logger.log_metrics({}, 1)
    logger.finish()  # nothing is left that could fail again


def test_hyperparameters_are_readable_yaml(tmp_path: Path) -> None:
    logger = started(tmp_path)
    values: dict[str, Any] = {
        "lr": 0.1,
        "sizes": (1, 2),
        "net": {"name": "ü", "bias": None, 3: True},
        "dtype": torch.float16,
        "path": "${not.resolved}",
    }
    logger.log_hyperparameters(values)
    logger.finish()
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text(encoding="utf-8")) == {
        "lr": 0.1,
        "sizes": [1, 2],
        "net": {"name": "ü", "bias": None, "3": True},
        "dtype": "torch.float16",
        "path": "${not.resolved}",
    }


@pytest.mark.parametrize("filename", ["a/b.csv", "", "..", 3])
def test_a_name_that_is_a_path_is_refused(filename: Any) -> None:
    with pytest.raises(SettingError, match="CSVLogger got"):
        CSVLogger(filename=filename)
