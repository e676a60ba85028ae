"""Signals to the launcher, and its death: no rank is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from minitrainer import dist
from minitrainer.launch import Environment, Interrupted, StopSignals, run_on_local_ranks
from tests.launch.launchers import Launcher, all_gone, mark
from tests.launch.test_failures import Slow


def loop(folder: Path, name: str, *, save: float = 0.0) -> Callable[[], dict[str, int]]:
    """Return a training that looks for signals once per step, agrees, saves and leaves."""

    def train() -> dict[str, int]:
        rank = Environment.detect().rank
        group = dist.process_group(torch.device("cpu"), num_ranks=2, timeout=60)
        with StopSignals() as signals, group:
            for step in range(1, 3000):
                time.sleep(0.01)
                if step == 3:
                    mark(folder, f"{name}-{rank}")
                if dist.any_rank(signals.received is not None):
                    time.sleep(save)
                    (folder / f"saved-{rank}").write_text(str(step))
                    raise Interrupted(signals.received or signal.SIGINT, {"step": step})
        return {"step": -1}

    return train


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Launcher]:
    def begin(train: Callable[[], object], name: str = "rank", grace: float = 30.0) -> Launcher:
        launcher = Launcher(train, tmp_path, stop_grace=grace)
        launcher.wait_for(f"pid-{name}-0", f"pid-{name}-1", seconds=20)
        return launcher

    return begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher(
    number: signal.Signals, start: Callable[..., Launcher], tmp_path: Path
) -> None:
    """Case B97: finish the step, save, leave, all ranks at the same step."""
    launcher = start(loop(tmp_path, "rank", save=0.3))
    launcher.send(number)
    assert launcher.end() == 10 + number
    assert launcher.alive() == []
    assert launcher.read("saved-0") == launcher.read("saved-1")
    assert launcher.read("result") == f"{{'step': {launcher.read('saved-0')}}}"


def test_a_signal_to_one_rank_stops_all(start: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher = start(loop(tmp_path, "rank"))
    os.kill(int(launcher.read("pid-rank-1")), signal.SIGTERM)
    assert launcher.end() in (10 + signal.SIGTERM, 10 + signal.SIGINT)
    assert launcher.alive() == []
    assert launcher.read("saved-0") == launcher.read("saved-1")


def test_three_interrupts_at_once(start: Callable[..., Launcher], tmp_path: Path) -> None:
    """Case B97: with loader workers, and ranks that would take a minute to save."""
    workers = tmp_path / "workers"
    workers.mkdir()

    def train() -> None:
        batches = iter(DataLoader(Slow(workers), num_workers=2))
        next(batches)
        loop(tmp_path, "rank", save=60)()

    launcher = start(train)
    began = time.monotonic()
    for _ in range(3):
        launcher.send(signal.SIGINT)
        time.sleep(0.01)
    assert launcher.end() == 10 + signal.SIGINT
    assert time.monotonic() - began < 5
    pids = [int(path.read_text()) for path in workers.iterdir() if path.name.startswith("pid-")]
    assert len(pids) == 4
    assert all_gone([*pids, *launcher.alive()], 1)
    assert not (tmp_path / "saved-0").exists()


def test_ranks_that_do_not_listen(start: Callable[..., Launcher], tmp_path: Path) -> None:
    """They are killed when the time is over."""

    def deaf() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        mark(tmp_path, f"rank-{Environment.detect().rank}")
        time.sleep(60)

    launcher = start(deaf, grace=0.5)
    began = time.monotonic()
    launcher.send(signal.SIGTERM)
    assert launcher.end() == 10 + signal.SIGTERM
    assert 0.5 < time.monotonic() - began < 10
    assert launcher.alive() == []
    assert launcher.read("result") == "None"


def test_ranks_without_handlers(start: Callable[..., Launcher], tmp_path: Path) -> None:
    def plain() -> None:
        mark(tmp_path, f"rank-{Environment.detect().rank}")
        time.sleep(60)

    launcher = start(plain)
    launcher.send(signal.SIGINT)
    assert launcher.end() == 10 + signal.SIGINT
    assert launcher.alive() == []


def test_an_error_while_saving_is_not_hidden(
    start: Callable[..., Launcher], tmp_path: Path
) -> None:
    def train() -> None:
        try:
            loop(tmp_path, "rank")()
        except Interrupted as stop:
            if Environment.detect().rank == 0:
                raise OSError("disk full") from stop
            raise

    launcher = start(train)
    launcher.send(signal.SIGTERM)
    assert launcher.end() == 1
    assert "Rank 0 raised OSError: disk full" in launcher.read("error")


def test_the_launcher_is_killed(start: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher = start(loop(tmp_path, "rank"))
    launcher.send(signal.SIGKILL)
    assert launcher.end() == -signal.SIGKILL
    assert all_gone(launcher.alive(), 2)


def test_the_users_handler_in_the_launcher() -> None:
    """It is called, in the launcher as in the ranks, and put back."""
    called: list[int] = []

    def own(number: int, frame: object) -> None:
        called.append(number)

    def train() -> None:
        with StopSignals() as signals:
            if Environment.detect().rank == 0:
                os.kill(launcher, signal.SIGTERM)
            while signals.received is None:
                time.sleep(0.01)
        raise Interrupted(signals.received, len(called))

    launcher = os.getpid()
    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(Interrupted) as raised:
            run_on_local_ranks(train, 2)
        assert raised.value.signal is signal.SIGTERM
        assert raised.value.result == 1
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_when_all_is_done_is_not_lost() -> None:
    """The ranks had nothing left to stop; the caller still learns of it, and gets the result."""
    launcher = os.getpid()

    def train() -> str:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if Environment.detect().rank == 0:
            os.kill(launcher, signal.SIGTERM)
            time.sleep(0.2)
        return "done"

    with pytest.raises(Interrupted) as raised:
        run_on_local_ranks(train, 2)
    assert raised.value.result == "done"


def test_launched_from_another_thread_signals_are_the_users_own() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[str] = []

    def wait() -> str:
        time.sleep(0.2)
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
        return signals.received.name if signals.received else ""

    def launch() -> None:
        seen.append(run_on_local_ranks(wait, 2))

    thread = threading.Thread(target=launch)
    thread.start()
    assert signal.getsignal(signal.SIGTERM) is before
    thread.join()
    # In a rank, the thread that forked it is the main one.
    assert seen == ["SIGTERM"]
