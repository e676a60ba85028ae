"""ProgressBar: what it really prints on a terminal, into a file, and on other ranks."""

from __future__ import annotations

import os
import pty
import re
import struct
import sys
import termios
import timeit
from collections.abc import Callable
from fcntl import ioctl
from typing import Any

import pytest

from minitrainer.callbacks import progress
from minitrainer.callbacks.progress import ProgressBar
from minitrainer.errors import SettingError
from tests.callbacks.view import MODULE, FakeTrainer

LINE = re.compile(
    r"(Epoch \d+|Validation|Test|Prediction) \| \d+(/\d+)? batches \| \S+ batches/s( \| \S+=.*)?"
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the progress bar sees; tests move it."""
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], str]:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    return lambda: capsys.readouterr().err


def run_epoch(
    trainer: FakeTrainer,
    bar: ProgressBar,
    batches: int,
    tick: Callable[[], None] = lambda: None,
    *,
    first: int = 0,
    validation: dict[str, float] | None = None,
) -> None:
    bar.on_train_epoch_start(trainer, MODULE)
    for index in range(first, batches):
        trainer.global_step += 1
        trainer.shown = {"loss": 1 / trainer.global_step}
        tick()
        bar.on_train_batch_end(trainer, MODULE, None, None, index)
    if validation is not None:
        bar.on_validation_start(trainer, MODULE)
        for index in range(0, 6, 2):  # this rank's batches of two ranks
            tick()
            bar.on_validation_batch_end(trainer, MODULE, None, None, index)
        trainer.callback_metrics.update(validation)
        bar.on_validation_end(trainer, MODULE)
    bar.on_train_epoch_end(trainer, MODULE)
    trainer.current_epoch += 1


@pytest.mark.parametrize("seconds_per_batch", [0.001, 0.1, 1.0, 60.0])
@pytest.mark.parametrize("total", [100, None])
def test_a_file_gets_few_lines_and_no_carriage_return(
    printed: Callable[[], str], clock: list[float], seconds_per_batch: float, total: int | None
) -> None:
    """Case B87: 0 `\\r`, at most about 12 lines per epoch, each once."""
    trainer = FakeTrainer(num_training_batches=total, num_evaluation_batches=3)
    bar = ProgressBar()

    def tick() -> None:
        clock[0] += seconds_per_batch

    for epoch in range(2):
        run_epoch(trainer, bar, 100, tick, validation={"val_loss": 0.5 + epoch})
    bar.on_fit_end(trainer, MODULE)
    text = printed()
    assert "\r" not in text
    lines = text.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert len(set(lines)) == len(lines)
    for epoch in range(2):
        of_epoch = [line for line in lines if line.startswith(f"Epoch {epoch} ")]
        assert 1 <= len(of_epoch) <= 10
        assert len(of_epoch) >= (1 if seconds_per_batch < 0.01 else 2)
        done = f"100/{total}" if total else "100"
        assert of_epoch[-1].startswith(f"Epoch {epoch} | {done} batches | ")
        assert f"step={100 * (epoch + 1)} loss=" in of_epoch[-1]
    assert [line for line in lines if line.startswith("Validation")] == [
        f"Validation | 3/3 batches | {1 / seconds_per_batch:.4g} batches/s | val_loss={value}"
        for value in (0.5, 1.5)
    ]
    # The device was read for the lines of epochs, and for nothing else.
    assert trainer.device_reads == len(lines) - 2


def test_a_validation_metric_is_shown_again_when_its_value_stays(
    printed: Callable[[], str], clock: list[float]
) -> None:
    trainer, bar = FakeTrainer(callback_metrics={"train": 1.0}), ProgressBar()
    for _ in range(2):
        clock[0] += 1.0
        run_epoch(trainer, bar, 1, validation={"val_acc": 0.98})
    assert printed().count("| val_acc=0.98\n") == 2


def test_a_resumed_epoch_tells_the_rate_of_this_process(
    printed: Callable[[], str], clock: list[float]
) -> None:
    def tick() -> None:
        clock[0] += 0.5

    run_epoch(FakeTrainer(num_training_batches=100), ProgressBar(), 100, tick, first=96)
    assert "Epoch 0 | 100/100 batches | 2 batches/s" in printed()


def test_a_run_that_is_stopped_shows_how_far_it_got(
    printed: Callable[[], str], clock: list[float]
) -> None:
    trainer, bar = FakeTrainer(num_training_batches=10), ProgressBar()
    bar.on_train_epoch_start(trainer, MODULE)
    clock[0] += 0.5
    bar.on_train_batch_end(trainer, MODULE, None, None, 0)
    bar.on_fit_end(trainer, MODULE)
    bar.on_fit_end(trainer, MODULE)
    assert printed() == "Epoch 0 | 1/10 batches | 2 batches/s | step=0\n"


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_other_evaluations_have_lines_too(
    printed: Callable[[], str], clock: list[float], stage: str
) -> None:
    trainer, bar = FakeTrainer(num_evaluation_batches=4), ProgressBar(lines_per_epoch=2)
    getattr(bar, f"on_{stage}_start")(trainer, MODULE)
    for index in range(4):
        clock[0] += 2.0
        getattr(bar, f"on_{stage}_batch_end")(trainer, MODULE, None, None, index)
    trainer.callback_metrics["acc"] = 0.5
    getattr(bar, f"on_{stage}_end")(trainer, MODULE)
    title = {"test": "Test", "predict": "Prediction"}[stage]
    assert printed() == (
        f"{title} | 2/4 batches | 0.5 batches/s\n{title} | 4/4 batches | 0.5 batches/s | acc=0.5\n"
    )


@pytest.mark.parametrize("reason", ["rank", "TQDM_DISABLE", "no stderr"])
def test_nothing_at_all(
    printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch, reason: str, clock: list[float]
) -> None:
    """Case B87: not from other ranks, not when tqdm is disabled."""
    trainer = FakeTrainer(num_training_batches=5, global_rank=int(reason == "rank"))
    if reason == "TQDM_DISABLE":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    if reason == "no stderr":
        monkeypatch.setattr(sys, "stderr", None)

    def tick() -> None:
        clock[0] += 10.0

    run_epoch(trainer, ProgressBar(), 5, tick, validation={"a": 1.0})
    monkeypatch.undo()
    assert printed() == ""
    assert trainer.device_reads == 0


def in_terminal(run: Callable[[], None], columns: int = 90) -> str:
    """Return what a forked process writes to a terminal of this width."""
    process, terminal = pty.fork()
    if process == 0:
        code = 1
        try:
            ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - pytest has replaced it
            run()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        parts.append(part)
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0, b"".join(parts).decode()
    return b"".join(parts).decode()


def left_on_screen(text: str) -> list[str]:
    """Return the lines that a terminal shows in the end: it knows \\r, \\n and cursor up."""
    lines: list[str] = [""]
    row = column = 0
    for part in re.split(r"(\r|\n|\x1b\[A)", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row -= 1
        else:
            old = lines[row].ljust(column)
            lines[row] = old[:column] + part + old[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("columns", [90, 0])
def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], columns: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def tick() -> None:
        clock[0] += 0.1

    def run() -> None:
        trainer = FakeTrainer(num_training_batches=4, num_evaluation_batches=3)
        for _ in range(2):
            run_epoch(trainer, ProgressBar(), 4, tick, validation={"val_acc": 0.5})

    text = in_terminal(run, columns)
    assert re.search(r"\rEpoch 0: +50%\|.*2/4 \[.*step=2 loss=0.5\]", text)
    assert re.search(r"\rEpoch 0: +100%\|.*4/4 \[.*step=4 loss=0.25\]\r?\n", text)
    assert re.search(r"\rEpoch 1: +100%\|.*step=8 loss=0.125\]\r?\n", text)
    assert re.search(r"\rValidation: +67%", text)
    # The bar of the validation has gone: the lines that stay are those of the two epochs.
    assert [line[:13] for line in left_on_screen(text)] == ["Epoch 0: 100%", "Epoch 1: 100%"]


def test_an_exception_leaves_the_bar_as_it_stands_on_its_own_line(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def run() -> None:
        trainer, bar = FakeTrainer(num_training_batches=4), ProgressBar()
        bar.on_train_epoch_start(trainer, MODULE)
        bar.on_train_batch_end(trainer, MODULE, None, None, 0)
        bar.on_exception(trainer, MODULE, RuntimeError())
        assert trainer.device_reads == 0
        sys.stderr.write("Traceback\n")

    assert in_terminal(run).split("\n")[-2].strip() == "Traceback"


@pytest.mark.parametrize("term", [None, "dumb"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], term: str | None
) -> None:
    """Case B87: TERM unset works."""
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)

    def run() -> None:
        clock[0] += 1.0
        run_epoch(FakeTrainer(num_training_batches=2), ProgressBar(), 2, validation={"a": 1.0})

    text = in_terminal(run).replace("\r\n", "\n")  # the terminal's own
    assert "\r" not in text
    assert all(LINE.fullmatch(line) for line in text.splitlines())


def test_no_thread_watches_the_bar(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def run() -> None:
        import threading

        run_epoch(FakeTrainer(num_training_batches=2), ProgressBar(), 2)
        assert threading.active_count() == 1

    in_terminal(run)


def test_a_batch_costs_well_below_a_microsecond(printed: Callable[[], str]) -> None:
    trainer, bar = FakeTrainer(num_training_batches=10**9), ProgressBar()
    bar.on_train_epoch_start(trainer, MODULE)

    def batches() -> None:
        hook = bar.on_train_batch_end
        for index in range(10_000):
            hook(trainer, MODULE, None, None, index)

    seconds = min(timeit.repeat(batches, number=1, repeat=7)) / 10_000
    assert seconds < 0.8e-6, seconds


@pytest.mark.parametrize(
    "arguments", [{"refresh_seconds": -1}, {"refresh_seconds": "a"}, {"lines_per_epoch": 0}]
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="ProgressBar got"):
        ProgressBar(**arguments)
