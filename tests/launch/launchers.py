"""Launchers to send signals to: forked, so that they need no import, and watched from outside."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from minitrainer.errors import MinitrainerError
from minitrainer.launch import Interrupted, run_on_local_ranks


class Launcher:
    """A process that runs `fn` on local ranks; its ranks call `mark` to be seen.

    Exit code: 0 done, 10 + number of the signal when interrupted, 1 failed.
    """

    def __init__(
        self, fn: Callable[[], object], folder: Path, num_ranks: int = 2, stop_grace: float = 30.0
    ) -> None:
        self.folder = folder

        def launch() -> None:
            # The test runner may have been started with SIGINT ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # A launcher that is killed cannot remove its temporary folder.
            tempfile.tempdir = str(folder)
            code = 0
            try:
                result = run_on_local_ranks(fn, num_ranks, stop_grace=stop_grace)
                (folder / "result").write_text(str(result))
            except Interrupted as stop:
                (folder / "result").write_text(str(stop.result))
                code = 10 + stop.signal
            except MinitrainerError as error:
                (folder / "error").write_text(str(error))
                code = 1
            finally:
                (folder / "left").write_text(str(code))
            sys.exit(code)

        self.process = get_context("fork").Process(target=launch)
        self.process.start()

    def wait_for(self, *names: str, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} did not come, {os.listdir(self.folder)}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 20.0) -> int:
        """Return the exit code; the ranks must be gone with the launcher."""
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, "the launcher hangs"
        return code

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def alive(self) -> list[int]:
        pids = [int(path.read_text()) for path in self.folder.glob("pid-*")]
        return [pid for pid in pids if is_alive(pid)]


def mark(folder: Path, name: str) -> None:
    """Write the process id of a rank (or of a worker of it), so that the test can look for it."""
    temporary = folder / f".{name}"
    temporary.write_text(str(os.getpid()))
    temporary.replace(folder / f"pid-{name}")


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that is dead but not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
