"""Run a function on real ranks: forked processes that find a launcher's environment.

    def both_agree() -> float:
        with dist.process_group(torch.device("cpu"), num_ranks=2, timeout=20):
            ...
            return loss

    first, second = run_ranks(both_agree, world_size=2)

A forked rank shares the imported torch with its parent, so it is ready in hundredths of a second,
and the function may be a closure. Only results and exceptions travel, pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import NoReturn, TypeVar, cast

import torch

T = TypeVar("T")

# A killed rank says nothing, so the "connection closed" of its peers arrives first: after the
# first failure the other ranks get this many seconds to show that they were dead before.
_GRACE = 0.3
_PR_SET_PDEATHSIG = 1


class RankError(Exception):
    """A rank died or hung, or raised or returned something that cannot be pickled."""


@dataclass
class _Rank:
    """A rank as its parent sees it; `report` is (time, raised, value or exception)."""

    number: int
    process: BaseProcess
    pid: int
    pidfd: int
    pipe: connection.Connection
    report: tuple[float, bool, object] | None = None

    @property
    def failed(self) -> bool:
        return self.report is not None and self.report[1]


def run_ranks(fn: Callable[[], T], world_size: int = 2, timeout: float = 60.0) -> list[T]:
    """Run `fn` on `world_size` forked ranks and return what each of them returned.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT in its environment, as if torchrun had started it. No process outlives the call,
    not even one that a rank has started (unless in a session of its own).

    Args:
        fn: Called in every rank; reads RANK if it needs to know where it is.
        world_size: The number of ranks.
        timeout: Seconds after which all ranks are killed.

    Raises:
        RankError: A rank was killed, left by an exit code, or did not end in time.
        BaseException: What the rank that failed first raised; a note on it has that rank's number
            and traceback.
    """
    deadline = time.monotonic() + timeout
    port = _free_port()
    ranks: list[_Rank] = []
    try:
        for number in range(world_size):
            ranks.append(_start(fn, number, world_size, port))
        while _pending(ranks) and not any(rank.failed for rank in ranks):
            if not _listen(_pending(ranks), deadline):
                late = [rank.number for rank in _pending(ranks)]
                raise RankError(f"Ranks {late} of {world_size} did not end in {timeout:g} s.")
        deadline = min(deadline, time.monotonic() + _GRACE)
        while _pending(ranks) and _listen(_pending(ranks), deadline):
            pass
    finally:
        for rank in ranks:
            _end(rank)
    reports = sorted((rank.report for rank in ranks if rank.report), key=lambda report: report[0])
    for _, raised, value in reports:
        if raised:
            assert isinstance(value, BaseException)
            raise value
    return [cast(T, rank.report[2]) for rank in ranks if rank.report]


def _start(fn: Callable[[], object], number: int, world_size: int, port: int) -> _Rank:
    receive, send = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(
        target=_be_rank, args=(fn, number, world_size, port, send), name=f"rank {number}"
    )
    process.start()
    send.close()
    assert process.pid is not None
    # The end of the pipe would not tell that the rank is gone: its own children hold it too.
    return _Rank(number, process, process.pid, os.pidfd_open(process.pid), receive)


def _be_rank(
    fn: Callable[[], object],
    number: int,
    world_size: int,
    port: int,
    pipe: connection.Connection,
) -> NoReturn:
    gc.freeze()  # what joins a thread at its end aborts when it is collected in a fork
    os.setpgid(0, 0)  # so that what this rank starts can be killed together with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
    os.environ.update(
        RANK=str(number),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(number),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        message = _pickled(False, fn())
    except BaseException as error:  # noqa: BLE001 - pytest.fail raises one of these
        text = "".join(traceback.format_exception(error))
        error.add_note(f"--- raised on rank {number} of {world_size} ---\n{text}")
        message = _pickled(True, error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    # Not by way of the interpreter's end: that would run the parent's atexit functions, and
    # a gloo group left open aborts in it.
    os._exit(0)


def _pickled(raised: bool, value: object) -> bytes:
    now = time.monotonic()
    try:
        message = pickle.dumps((now, raised, value))
        pickle.loads(message)  # many exceptions pickle but cannot be built again
    except Exception as error:  # noqa: BLE001 - a class may raise anything here
        notes = "\n".join(getattr(value, "__notes__", []))
        text = f"{value!r} cannot be pickled: {error!r}\n{notes}"
        return pickle.dumps((now, True, RankError(text)))
    return message


def _pending(ranks: list[_Rank]) -> list[_Rank]:
    return [rank for rank in ranks if rank.report is None]


def _listen(ranks: list[_Rank], deadline: float) -> bool:
    """Take the reports that arrive next; return false when none came before the deadline."""
    left = max(0.0, deadline - time.monotonic())
    ready = connection.wait([end for rank in ranks for end in (rank.pipe, rank.pidfd)], left)
    for rank in ranks:
        if rank.pipe in ready or rank.pidfd in ready:
            rank.report = _report_of(rank)
    return bool(ready)


def _report_of(rank: _Rank) -> tuple[float, bool, object]:
    with contextlib.suppress(EOFError):
        if rank.pipe.poll():
            return cast(tuple[float, bool, object], pickle.loads(rank.pipe.recv_bytes()))
    connection.wait([rank.pidfd], 5.0)
    rank.process.kill()
    rank.process.join()
    code = rank.process.exitcode or 0
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left by exit code {code}"
    # Time 0: whatever its peers say, they say it because this one is gone.
    return (0.0, True, RankError(f"Rank {rank.number} {end}."))


def _end(rank: _Rank) -> None:
    """Kill the rank if it still runs, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.process.kill()  # the one above missed it if it was not the leader of its group yet
    rank.process.join()
    rank.process.close()
    rank.pipe.close()
    os.close(rank.pidfd)


def _free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
