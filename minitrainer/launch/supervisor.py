"""The launcher's eye on its ranks: forwards signals, and ends those that do not end themselves.

torch's elastic agent ends the peers of a failed rank by SIGTERM, but gives them 30 s, and it
forwards a signal by breaking off its own loop. Here both are done beside it, in a thread.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Literal, Self

from minitrainer.launch.report import Report, read_report
from minitrainer.launch.signals import Handler, call_own, install, reinstall

_INTERVAL = 0.03
# Seconds that the peers of a failed rank get to leave by themselves, and those of them that have
# reported and only wait for the others. The agent must have seen the failed one before.
_FAILURE_GRACE = 5.0
_WAITING_GRACE = 1.0


class Supervisor:
    """Watches forked ranks while the context is open; no rank outlives it.

    `signals` are those that this process received meanwhile, and `first_end` is when a rank was
    first seen to have ended badly, by the monotonic clock.

    Args:
        directory: Where the ranks write their reports.
        num_ranks: How many ranks will be forked.
        stop_grace: Seconds that ranks get after a first signal before they are killed.
    """

    def __init__(self, directory: Path, num_ranks: int, stop_grace: float) -> None:
        self.signals: list[signal.Signals] = []
        self.first_end: float | None = None
        self._directory = directory
        self._stop_grace = stop_grace
        self._stop_time: float | None = None
        # Shared with the ranks: each writes its process id once it may be sent signals.
        self._pids = memoryview(mmap.mmap(-1, 8 * num_ranks)).cast("q")
        self._forwarded: set[tuple[int, signal.Signals]] = set()
        self._previous: dict[signal.Signals, Handler] = {}
        self._launcher = os.getpid()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="minitrainer-supervisor")

    @property
    def leave_now(self) -> bool:
        """Whether the user has asked twice."""
        return self.signals.count(signal.SIGINT) > 1

    def __enter__(self) -> Self:
        self._previous = install(self._handle)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        for rank in range(len(self._pids)):
            self._kill(rank)
        reinstall(self._previous)

    def enter_rank(self, rank: int) -> None:
        """Make a forked process, before it does anything else, the rank that is watched.

        Returns when all ranks are there. Before that none may connect to the store: its server, a
        thread of the launcher, would look up the address, and a rank that is forked while glibc
        does that hangs at its own first look-up (seen once in 100 starts of 4 ranks).
        """
        reinstall(self._previous)
        # Ctrl-C at the terminal is for the launcher alone, which passes it on once.
        os.setsid()
        self._pids[rank] = os.getpid()
        while 0 in self._pids:
            time.sleep(0.001)

    def silent_rank(self) -> int | None:
        """Return a rank that left with exit code 0 but without a report, if there is one.

        Asked by the agent while it believes that all is well: it has taken note of such an exit,
        and would wait for a return value for ever.
        """
        for rank, pid in enumerate(self._pids):
            if pid and _status(pid) == "reaped" and self._report(rank) is None:
                return rank
        return None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._launcher:
            # A rank before `enter_rank`; the launcher will pass on what it got itself.
            return
        got = signal.Signals(number)
        self._stop_time = self._stop_time or time.monotonic()
        self.signals.append(got)
        call_own(self._previous[got], number, frame)

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL):
            if self.first_end is None and any(map(self._ended_badly, range(len(self._pids)))):
                self.first_end = time.monotonic()
            for rank in range(len(self._pids)):
                if self.leave_now or self._is_overdue(rank):
                    self._kill(rank)
            for got in dict.fromkeys(self.signals):
                self._forward(got)

    def _is_overdue(self, rank: int) -> bool:
        grace = _WAITING_GRACE if self.first_end and self._report(rank) else _FAILURE_GRACE
        now = time.monotonic()
        graces = ((self.first_end, grace), (self._stop_time, self._stop_grace))
        return any(start is not None and now - start > limit for start, limit in graces)

    def _forward(self, got: signal.Signals) -> None:
        for rank, pid in enumerate(self._pids):
            running = pid and _status(pid) == "running"
            # One that has reported waits for the others and has nothing left to stop.
            if running and (rank, got) not in self._forwarded and not self._report(rank):
                self._forwarded.add((rank, got))
                with suppress(ProcessLookupError):
                    os.kill(pid, got)

    def _kill(self, rank: int) -> None:
        pid = self._pids[rank]
        if pid and _status(pid) == "running":
            # With its loader workers: a rank leads a session of its own.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _ended_badly(self, rank: int) -> bool:
        pid = self._pids[rank]
        if pid == 0 or _status(pid) == "running":
            return False
        report = self._report(rank)
        return report is None or report.state == "failed"

    def _report(self, rank: int) -> Report | None:
        return read_report(self._directory, rank)


def _status(pid: int) -> Literal["running", "ended", "reaped"]:
    # Only looks: it is the agent that reaps. After that another process may get the number, but
    # none of our children.
    with suppress(ChildProcessError):
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return "running" if os.waitid(os.P_PID, pid, options) is None else "ended"
    return "reaped"
