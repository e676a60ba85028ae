"""One rank fails: all end within seconds, the first cause is raised, once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from minitrainer import dist
from minitrainer.errors import (
    DevicesError,
    MetricMismatchError,
    MinitrainerError,
    RankFailedError,
    RecipeError,
)
from minitrainer.launch import Environment, StopSignals, run_on_local_ranks
from minitrainer.launch.report import Report, died, failure, first_cause, read_report, write_report
from tests.launch.launchers import all_gone, mark


def rank() -> int:
    return Environment.detect().rank


def in_a_group(fn: Callable[[], object], num_ranks: int = 2) -> None:
    with dist.process_group(torch.device("cpu"), num_ranks=num_ranks, timeout=60):
        dist.barrier()
        fn()


def boom() -> None:
    raise ValueError("boom")


def launch_and_fail(
    fn: Callable[[], object], capfd: pytest.CaptureFixture[str], num_ranks: int = 2
) -> tuple[MinitrainerError, float]:
    """Return what was raised and after how many seconds; nothing may have been printed."""
    began = time.monotonic()
    with pytest.raises(MinitrainerError) as raised:
        run_on_local_ranks(fn, num_ranks)
    seconds = time.monotonic() - began
    assert capfd.readouterr() == ("", "")
    return raised.value, seconds


def test_the_traceback_of_the_rank_that_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case B19: the peer sits in a collective, the error names the rank and the place, once."""

    def train() -> None:
        mark(tmp_path, str(rank()))
        in_a_group(boom if rank() == 1 else dist.barrier)

    error, seconds = launch_and_fail(train, capfd)
    assert type(error) is RankFailedError
    assert error.what == "Rank 1 raised ValueError: boom."
    text = str(error)
    assert text.count("ValueError: boom") == 1
    assert text.count("Traceback") == 1
    assert text.count('raise ValueError("boom")') == 1
    assert "minitrainer/launch" not in text
    assert "Connection" not in text
    assert error.__cause__ is None
    assert seconds < 10
    assert all_gone([int(path.read_text()) for path in tmp_path.glob("pid-*")], 0)


def test_a_peer_that_ignores_sigterm(capfd: pytest.CaptureFixture[str]) -> None:
    """Case B19: well under 20 s (torch's agent by itself waits 30)."""

    def train() -> None:
        if rank() == 1:
            boom()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    error, seconds = launch_and_fail(train, capfd)
    assert "boom" in error.what
    assert seconds < 15


def test_a_rank_that_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """The peer's broken connection is not taken for the cause."""

    def train() -> None:
        in_a_group(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else dist.barrier())

    error, seconds = launch_and_fail(train, capfd)
    assert type(error) is RankFailedError
    assert error.what == "Rank 1 was killed by SIGKILL."
    assert "memory" in error.why
    assert seconds < 10


def test_a_rank_that_is_killed_beside_one_that_listens(capfd: pytest.CaptureFixture[str]) -> None:
    """The agent ends the other one by SIGTERM, which is no wish of the user's."""

    def train() -> None:
        with StopSignals() as signals:
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(3000):
                time.sleep(0.01)
                signals.raise_if_received()

    error, seconds = launch_and_fail(train, capfd)
    assert error.what == "Rank 1 was killed by SIGKILL."
    assert seconds < 5


@pytest.mark.parametrize("code", [3, 0])
def test_a_rank_that_leaves_by_itself(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        in_a_group(lambda: os._exit(code) if rank() == 1 else time.sleep(60))

    error, seconds = launch_and_fail(train, capfd)
    assert error.what == f"Rank 1 left with exit code {code}."
    assert seconds < 10


def test_all_ranks_leave_by_themselves(capfd: pytest.CaptureFixture[str]) -> None:
    error, _ = launch_and_fail(lambda: os._exit(0), capfd)
    assert "left with exit code 0" in error.what


def test_sys_exit(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        raise SystemExit(4)

    error, _ = launch_and_fail(train, capfd)
    assert "raised SystemExit: 4" in error.what


def test_usage_errors_pass_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    def wrong() -> None:
        raise DevicesError("devices is 9.", "There are 2.", "Ask for 2.")

    error, _ = launch_and_fail(wrong, capfd, num_ranks=3)
    assert type(error) is DevicesError
    assert str(error) == "[L02] devices is 9. There are 2. Ask for 2."
    assert error.__cause__ is None

    def problems() -> None:
        raise RecipeError("a: unknown.", "b: missing.")

    error, _ = launch_and_fail(problems, capfd)
    assert isinstance(error, RecipeError)
    assert error.problems == ("a: unknown.", "b: missing.")


def test_our_other_errors_tell_the_place(capfd: pytest.CaptureFixture[str]) -> None:
    def log() -> None:
        raise MetricMismatchError("loss is a mean and a sum.")

    error, _ = launch_and_fail(log, capfd)
    assert type(error) is MetricMismatchError
    assert "in log" in str(error.__cause__)


def test_a_second_error_on_the_way_out_is_not_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank that raised takes its time to leave; its peers notice and fail before that."""

    def train() -> None:
        try:
            in_a_group(boom if rank() == 1 else dist.barrier, 3)
        finally:
            if rank() == 1:
                time.sleep(0.7)

    error, _ = launch_and_fail(train, capfd, num_ranks=3)
    assert error.what == "Rank 1 raised ValueError: boom."


def test_chained_exceptions_are_told_whole(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        try:
            boom()
        except ValueError as error:
            raise KeyError("first line\nsecond line") from error

    error, _ = launch_and_fail(train, capfd)
    assert "direct cause" in str(error)
    assert "ValueError: boom" in str(error)


class Slow(Dataset[int]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        mark(self.folder, f"worker-{os.getpid()}")
        time.sleep(0.05)
        return index


def test_loader_workers_go_with_their_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        with StopSignals() as signals:
            for index, _ in enumerate(DataLoader(Slow(tmp_path), num_workers=1)):
                if rank() == 1 and index == 3:
                    boom()
                signals.raise_if_received()

    launch_and_fail(train, capfd)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-worker-*")]
    assert len(pids) == 2
    assert all_gone(pids, 10)


def test_from_another_thread(capfd: pytest.CaptureFixture[str]) -> None:
    found: list[MinitrainerError] = []
    thread = threading.Thread(target=lambda: found.append(launch_and_fail(boom, capfd)[0]))
    thread.start()
    thread.join()
    assert "boom" in found[0].what


def test_which_cause_comes_first() -> None:
    def report(rank: int, time: float, *, consequence: bool = False) -> Report:
        return Report(rank, "failed", time, text=f"E{rank}", consequence=consequence)

    killed = died(9, -signal.SIGKILL)
    first = first_cause([report(0, 2.0), report(1, 1.0)], None, 0.0)
    assert first.what == "Rank 1 raised E1."
    first = first_cause([report(0, 1.0, consequence=True), report(1, 2.0)], None, 0.0)
    assert first.what == "Rank 1 raised E1."
    assert first_cause([report(0, 1.0, consequence=True)], killed, 2.0) is killed
    assert first_cause([report(0, 2.0)], killed, 1.0) is killed
    assert first_cause([report(0, 1.0)], killed, 2.0).what == "Rank 0 raised E0."
    assert first_cause([report(0, 1.0, consequence=True)], None, 2.0).what == "Rank 0 raised E0."


def test_what_blames_a_peer() -> None:
    def consequence(error: BaseException) -> bool:
        return failure(error, 0).consequence

    gone = RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:34196. This is ...")
    assert consequence(gone)
    assert not consequence(ValueError("boom"))
    # A data set's own network is no peer.
    assert not consequence(ConnectionResetError(104, "Connection reset by peer"))
    wrapped = KeyError("x")
    wrapped.__cause__ = gone
    assert consequence(wrapped)
    # Tearing down after a real error may meet broken connections.
    gone.__context__ = ValueError("boom")
    assert not consequence(gone)


def test_reports_travel_whole(tmp_path: Path) -> None:
    assert read_report(tmp_path, 0) is None
    report = failure(DevicesError("a", "b", "c"), 2)
    write_report(report, tmp_path)
    again = read_report(tmp_path, 2)
    assert again is not None
    assert str(again.error()) == "[L02] a b c"
    assert died(1, -signal.SIGSEGV).what == "Rank 1 was killed by SIGSEGV."
    assert died(1, -35).what == "Rank 1 was killed by signal 35."
