"""Starting the ranks of one machine: forked, through torch's elastic agent.

A forked rank shares the imported torch of its parent, so that a process group stands after a tenth
of a second, and the function may be a lambda in a notebook: no script is run again.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

import torch

from minitrainer.errors import PortError, RankFailedError
from minitrainer.launch.device import set_threads
from minitrainer.launch.environment import Environment, wished_port
from minitrainer.launch.fork import die_with, fork_problem, garbage_kept, pause_thread_pools
from minitrainer.launch.rank import flush, read_result, run_rank
from minitrainer.launch.report import died, first_cause, read_report
from minitrainer.launch.signals import Interrupted
from minitrainer.launch.supervisor import Supervisor

T = TypeVar("T")

# The agent's settings pass through variables and loggers of the whole process: one at a time.
_one_launch = threading.Lock()
_BACKEND = "minitrainer"


def run_on_local_ranks(fn: Callable[[], T], num_ranks: int, *, stop_grace: float = 30.0) -> T:
    """Run `fn` in forked ranks with a launcher's environment and return what rank 0 returned.

    Afterwards this process is as it was: environment, signal handlers, thread count, temporary
    files. SIGINT and SIGTERM are passed on to the ranks, which are expected to finish their step
    and raise `Interrupted` (see `StopSignals`); a second SIGINT kills them. A rank that fails
    ends the others within seconds, and the death of this process ends all.

    Args:
        fn: Called once in each rank. What it returns in rank 0 must be plain containers and
            tensors.
        num_ranks: The number of ranks.
        stop_grace: Seconds from the first signal until ranks that are still there are killed.

    Raises:
        MinitrainerError: What a rank raised, when it was one of ours.
        RankFailedError: A rank raised something else, or died.
        ResultError: What rank 0 returned cannot be handed back.
        Interrupted: The run was stopped by a signal.
        ForkUnsafeError: This process has already used CUDA.
        PortError: MASTER_PORT is set and cannot be used.
    """
    unsafe = fork_problem(cuda_initialized=torch.cuda.is_initialized())
    if unsafe is not None:
        raise unsafe
    launcher = os.getpid()
    with _one_launch, tempfile.TemporaryDirectory(prefix="minitrainer-") as name:
        directory = Path(name)
        supervisor = Supervisor(directory, num_ranks, stop_grace)

        def be_rank() -> None:
            rank = int(os.environ["RANK"])

            def enter_and_run() -> T:
                die_with(launcher)
                supervisor.enter_rank(rank)
                _one_launch.release()
                os.environ["MINITRAINER_LAUNCHER"] = "local"
                set_threads(Environment.detect())
                return fn()

            run_rank(enter_and_run, rank, num_ranks, directory)

        with supervisor:
            death = _start_agent(be_rank, num_ranks, supervisor)
        result: T = _outcome(directory, num_ranks, supervisor, death)
    return result


def _start_agent(
    be_rank: Callable[[], None], num_ranks: int, supervisor: Supervisor
) -> tuple[int, int] | None:
    """Run all ranks to their end; return rank and exit code of the first that failed."""
    # Imported here because only launching needs it: 0.03 s.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run_id = uuid.uuid4().hex
    with _agent_kept_quiet():
        # LaunchConfig counts GPUs; without the variable that makes CUDA unusable in forks.
        with _variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_ranks,
                run_id=run_id,
                rdzv_backend=_BACKEND,
                rdzv_configs={"rendezvous": _meet_here(run_id, supervisor)},
                max_restarts=0,
                monitor_interval=0.03,
                start_method="fork",
                logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
                # None: the agent would break off at once; the supervisor has its own handlers.
                signals_to_handle="",
                shutdown_timeout=5,
            )
        pause_thread_pools()
        flush()  # what is still buffered would be printed by each rank
        # The agent leaves the signals it handles in this variable.
        with _variable("TORCHELASTIC_SIGNALS_TO_HANDLE", ""), garbage_kept():
            try:
                elastic_launch(config, be_rank)()
            except ChildFailedError as error:
                rank, failed = error.get_first_failure()
                return rank, failed.exitcode
    return None


def _meet_here(run_id: str, supervisor: Supervisor) -> Any:
    """Serve the store where the ranks meet on a free port, or on the one the user has set.

    The port is taken by the system when it is bound, so nobody can take it in between. The address
    is that of this host whatever MASTER_ADDR says, and a number, which needs no look-up.

    torch's own "c10d" would sleep up to 0.3 s and draw from Python's random numbers for it; its
    "static" needs the port beforehand.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class LocalRendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            store: Any = super().next_rendezvous().store
            here = RendezvousStoreInfo(self.master_addr, store.underlying_store.port)
            return RendezvousInfo(store, 0, 1, here)

        def num_nodes_waiting(self) -> int:
            # The agent asks at each look at its ranks.
            silent = supervisor.silent_rank()
            if silent is not None:
                raise died(silent, 0)
            return 0

    rendezvous_handler_registry.register(_BACKEND, _given_rendezvous)
    wish = wished_port(os.environ)
    rendezvous = LocalRendezvous("127.0.0.1", wish, 0, 1, run_id, timeout=60)
    try:
        rendezvous.next_rendezvous()
    except RuntimeError as error:
        if not wish:
            raise
        raise PortError(
            f"The ranks cannot meet on port {wish} of this host: {str(error).splitlines()[0]}",
            "MASTER_PORT asks for this port.",
            "Unset MASTER_PORT to have a free port chosen.",
        ) from error
    return rendezvous


def _given_rendezvous(parameters: Any) -> Any:
    return parameters.config["rendezvous"]


def _outcome(
    directory: Path, num_ranks: int, supervisor: Supervisor, death: tuple[int, int] | None
) -> Any:
    reports = [report for rank in range(num_ranks) if (report := read_report(directory, rank))]
    failures = [report for report in reports if report.state == "failed" and not report.signal]
    causes = [report for report in failures if not report.consequence]
    whole = len(reports) == num_ranks and not failures
    # A rank may have been told to stop only because another one died.
    told = [r.signal for r in reports if r.signal and (whole or r.state == "failed")]
    signals = supervisor.signals or told
    if signals and (supervisor.leave_now or not causes):
        saved = any(report.rank == 0 and report.state != "failed" for report in reports)
        raise Interrupted(Signals(signals[0]), read_result(directory) if saved else None)
    if not whole:
        silent: RankFailedError | None = None
        if death is not None and death[0] not in {report.rank for report in failures}:
            silent = died(*death)
        raise first_cause(failures, silent, supervisor.first_end or time.monotonic())
    return read_result(directory)


@contextmanager
def _agent_kept_quiet() -> Iterator[None]:
    """Keep the agent's log and warnings away; the ranks' own words are reported instead.

    It saves much, too: torch's log formatter imports torch._dynamo at its first line (1.5 s).
    """
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in names]
    propagated = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    with warnings.catch_warnings():
        # In a notebook stderr has no file descriptor for faulthandler; said by each rank.
        warnings.filterwarnings("ignore", message="Unable to enable fault handler")
        # Python 3.12 and later warn of any fork beside threads; see pause_thread_pools.
        warnings.filterwarnings("ignore", message=r".*use of fork\(\) may lead to deadlocks")
        for logger in loggers:
            logger.propagate = False
            logger.addHandler(silence)
        try:
            yield
        finally:
            for logger, propagate in zip(loggers, propagated, strict=True):
                logger.removeHandler(silence)
                logger.propagate = propagate


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
