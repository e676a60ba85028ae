"""What a forked rank does around the user's function: it hands back a result or a reason."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from minitrainer import storage
from minitrainer.errors import (
    CheckpointContentError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    CheckpointWriteError,
    MinitrainerError,
    ResultError,
)
from minitrainer.launch.fork import fork_problem
from minitrainer.launch.report import Report, failure, read_report, write_report
from minitrainer.launch.signals import Interrupted

# Seconds that a rank which lost its peer waits for that one to be seen first.
_CAUSE_WAIT = 3.0


def run_rank(fn: Callable[[], Any], rank: int, num_ranks: int, directory: Path) -> None:
    """Call `fn` and report how it ended; a rank that failed does not return.

    Rank 0 writes what `fn` returned. Nothing is printed here: it is the launcher that shows the
    first cause, once.
    """
    try:
        try:
            result = fn()
            report = Report(rank, "done")
        except Interrupted as stop:
            result = stop.result
            report = Report(rank, "stopped", signal=stop.signal)
        # From here on there is nothing left to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            _write_result(result, directory)
    except BaseException as error:  # noqa: BLE001 - this is the end of the process, whatever it is
        _fail(error, rank, num_ranks, directory)
    write_report(report, directory)
    flush()
    # The agent ends a rank that waits for a failed one by SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def read_result(directory: Path) -> Any:
    """Return what rank 0 wrote.

    Raises:
        ResultError: It cannot be read.
    """
    try:
        # Not copied into memory but mapped: the file is ours alone and gone in a moment.
        return storage.read_file(_result_path(directory), mmap=True)
    except (CheckpointNotFoundError, CheckpointUnreadableError) as error:
        raise _no_result(error) from error


def _write_result(result: Any, directory: Path) -> None:
    try:
        storage.write_file(result, _result_path(directory))
    except (CheckpointContentError, CheckpointWriteError) as error:
        raise _no_result(error) from error


def _result_path(directory: Path) -> Path:
    return directory / "result.pt"


def _no_result(error: MinitrainerError) -> ResultError:
    return ResultError(
        f"What rank 0 computed could not be handed back: {error.what}",
        error.why,
        "Return plain containers and tensors, and see that the temporary folder has room.",
    )


def _fail(error: BaseException, rank: int, num_ranks: int, directory: Path) -> NoReturn:
    # The agent sends SIGTERM when another rank failed too; what happened here must be told first.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # torch's handler raises for each loader worker that dies.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    error = fork_problem(message=str(error)) or error
    report = failure(error, rank)
    write_report(report, directory)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if report.consequence:
        _wait_for_cause(rank, num_ranks, directory)
    # Before this process: a worker whose rank is gone in the middle of a batch complains of it.
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1.0)
    flush()
    # Not by way of the interpreter's end: a broken process group aborts there.
    os._exit(1)


def _wait_for_cause(rank: int, num_ranks: int, directory: Path) -> None:
    # The agent looks at the first process that ends; let that be the one that is to blame. When it
    # has died without a word, the agent's SIGTERM ends this wait.
    deadline = time.monotonic() + _CAUSE_WAIT
    while time.monotonic() < deadline:
        for other in range(num_ranks):
            report = read_report(directory, other)
            if other != rank and report and report.state == "failed" and not report.consequence:
                return
        time.sleep(0.02)


def flush() -> None:
    """Write out what is buffered for stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
