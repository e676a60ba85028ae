"""Ranks that minitrainer starts by itself, when all goes well."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from minitrainer import dist
from minitrainer.errors import ForkUnsafeError, PortError, ResultError, SettingError
from minitrainer.launch import Environment, run_on_local_ranks
from minitrainer.launch.fork import fork_problem


def meet() -> list[Any]:
    """Return what each rank knows of itself, through a process group."""
    me = Environment.detect()
    with dist.process_group(torch.device("cpu"), num_ranks=me.world_size, timeout=20):
        return dist.gather_objects(
            [me.rank, me.local_rank, me.world_size, me.local_world_size, me.launcher, os.getpid()]
        )


def test_ranks_meet_and_rank_0_answers() -> None:
    ranks = run_on_local_ranks(meet, 3)
    assert [rank[:5] for rank in ranks] == [[r, r, 3, 3, "local"] for r in range(3)]
    assert len({rank[5] for rank in ranks} | {os.getpid()}) == 4


def test_it_is_quick() -> None:
    run_on_local_ranks(lambda: None, 2)  # imports torch's launcher
    began = time.time()
    ready = run_on_local_ranks(lambda: (meet(), time.time())[1], 2)
    # About 0.1 and 0.2 s on two idle cores; spawned ranks would need 2 s to import torch.
    assert ready - began < 1.0
    assert time.time() - began < 1.5


def test_plain_values_and_tensors_come_back() -> None:
    scale = 2.0  # a closure needs no pickling
    weights = torch.arange(4.0)

    def train() -> dict[str, Any]:
        weights.mul_(scale)
        return {"w": weights, "n": 3, "l": [1.5, None, "x"], "nested": {"b": torch.ones(2, 2)}}

    result = run_on_local_ranks(train, 2)
    assert result["w"].tolist() == [0, 2, 4, 6]
    assert result["n"] == 3
    assert result["l"] == [1.5, None, "x"]
    assert result["nested"]["b"].sum() == 4
    # A rank works on its own copy, and the result can be written to.
    assert weights.tolist() == [0, 1, 2, 3]
    result["w"] += 1
    assert result["w"].tolist() == [1, 3, 5, 7]


def test_what_cannot_be_handed_back() -> None:
    with pytest.raises(ResultError, match="rank 0 computed could not be handed back"):
        run_on_local_ranks(lambda: {"f": lambda: None}, 2)


def test_nothing_is_changed_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("", "torch", "torch.distributed", "torch.distributed.elastic", "torch.multiprocessing")

    def state() -> list[Any]:
        loggers = [logging.getLogger(name) for name in names]
        return [
            dict(os.environ),
            [signal.getsignal(number) for number in range(1, 32)],
            torch.get_num_threads(),
            [(lo.level, lo.propagate, lo.disabled, lo.handlers[:]) for lo in loggers],
            list(warnings.filters),
            random.getstate(),
            torch.get_rng_state().tolist(),
            sorted(os.listdir(tempfile.gettempdir())),
            [thread.name for thread in threading.enumerate()],
            active_children(),
            os.getcwd(),
        ]

    run_on_local_ranks(meet, 2)  # the first one imports torch's launcher
    before = state()
    run_on_local_ranks(meet, 2)
    assert state() == before
    with pytest.raises(SettingError):
        run_on_local_ranks(fail_by_setting, 2)
    assert state() == before


def fail_by_setting() -> None:
    raise SettingError("accumulate is 0.")


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_on_local_ranks(meet, 2)
    for fail in (fail_by_setting, lambda: os._exit(3), lambda: os._exit(0)):
        with pytest.raises(Exception, match=r"\[[RL]\d\d\]"):
            run_on_local_ranks(fail, 2)
    assert not list(tmp_path.iterdir())


def test_a_set_port_is_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B1: and it is free again for a second launch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))

    def ports() -> list[Any]:
        seen = meet()
        assert len(seen) == 2
        return [os.environ["MASTER_PORT"], Environment.detect().master_port]

    for _ in range(2):
        assert run_on_local_ranks(ports, 2) == [str(port), port]
    assert os.environ["MASTER_PORT"] == str(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(PortError, match=f"port {port}.*MASTER_PORT asks for this port"):
            run_on_local_ranks(ports, 2)


def test_a_stale_address_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node-of-yesterday.invalid")
    assert len(run_on_local_ranks(meet, 2)) == 2
    assert os.environ["MASTER_ADDR"] == "node-of-yesterday.invalid"


def test_one_launch_after_another_and_two_at_once() -> None:
    """Case B1: no address in use."""
    assert all(len(run_on_local_ranks(meet, 2)) == 2 for _ in range(3))
    results: list[list[Any]] = []
    threads = [
        threading.Thread(target=lambda: results.append(run_on_local_ranks(meet, 2)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[rank[0] for rank in result] for result in results] == [[0, 1], [0, 1]]


def test_a_rank_can_launch_ranks() -> None:
    """A rank's own ranks are no part of its run."""

    def outer() -> int:
        if Environment.detect().rank == 0:
            return len(run_on_local_ranks(meet, 2))
        return 0

    assert run_on_local_ranks(outer, 2) == 2


class _NotInAFork:
    """Like an object of torch that joins a thread at its end: without the thread it aborts."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.cycle = self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(9)


def test_garbage_of_the_parent_is_not_collected_in_a_rank() -> None:
    gc.disable()
    try:
        _NotInAFork()
        assert run_on_local_ranks(gc.collect, 2) >= 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_no_rank_runs_before_all_are_forked() -> None:
    """One that meets the store's server while another is forked lets that one hang, at times."""

    def siblings() -> int:
        tasks = Path(f"/proc/{os.getppid()}/task").iterdir()
        return sum(len((task / "children").read_text().split()) for task in tasks)

    assert run_on_local_ranks(siblings, 6) == 6


def test_output_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        io.TextIOWrapper(io.FileIO(os.dup(1), "w")) as buffered,
        contextlib.redirect_stdout(buffered),
    ):
        print("before", end=" ")
        run_on_local_ranks(lambda: print("in rank", end=" "), 2)
        print("after", end="")
    out, err = capfd.readouterr()
    assert out == "before in rank in rank after"
    assert err == ""


def test_ranks_are_out_of_reach_of_the_terminal() -> None:
    sessions = run_on_local_ranks(lambda: [os.getsid(0), os.getpgid(0), os.getpid()], 2)
    assert len(set(sessions)) == 1
    assert sessions[0] != os.getsid(0)


def test_the_users_handler_is_in_place_in_the_ranks() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        same = run_on_local_ranks(lambda: signal.getsignal(signal.SIGTERM) is own, 2)
        assert same
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_scripts_at_the_same_moment_by_dash_c() -> None:
    """Case B1: two programs, neither a file, with lambdas; each runs its own text once."""
    program = (
        "import torch\n"
        "from minitrainer import dist\n"
        "from minitrainer.launch import run_on_local_ranks\n"
        "print('once')\n"
        "def group(): return dist.process_group(torch.device('cpu'), num_ranks=2, timeout=20)\n"
        "def run(fn):\n"
        "    with group(): return fn()\n"
        "print(run_on_local_ranks(lambda: run(lambda: dist.gather_objects(7)), 2))\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=50)
        assert (process.returncode, out, err) == (0, "once\n[7, 7]\n", "")


def test_thread_pools_of_the_parent() -> None:
    """Forked ranks would hang in libgomp; and they do without the call that prevents it."""
    program = (
        "import os, signal, threading, torch\n"
        "from minitrainer.launch import Interrupted, local, run_on_local_ranks\n"
        "def work():\n"
        "    torch.set_num_threads(4)\n"
        "    x = torch.randn(8, 3, 64, 64)\n"
        "    torch.nn.Conv2d(3, 16, 3)(x).sum().backward()\n"
        "    a = torch.randn(300, 300, requires_grad=True)\n"
        "    (a @ a).relu().sum().backward()\n"
        "    return float(torch.ones(1000000).sum())\n"
        "for _ in range(3):\n"
        "    work()\n"
        "    assert run_on_local_ranks(work, 2) == 1000000\n"
        "    assert torch.get_num_threads() == 4\n"
        "print('safe')\n"
        "local.pause_thread_pools = lambda: None\n"
        "work()\n"
        "threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        "try:\n"
        "    run_on_local_ranks(work, 2)\n"
        "except Interrupted:\n"
        "    print('hangs')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "safe\nhangs\n", "")


def test_when_forking_is_refused() -> None:
    assert fork_problem() is None
    assert fork_problem(message="CUDA out of memory") is None
    worker = "Caught RuntimeError in DataLoader worker process 0. ... in forked subprocess."
    assert fork_problem(message=worker) is None
    assert isinstance(fork_problem(cuda_initialized=True), ForkUnsafeError)
    for message in (
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...",
        "Unable to handle autograd's threading in combination with fork-based multiprocessing.",
    ):
        error = fork_problem(message=message)
        assert isinstance(error, ForkUnsafeError)
        assert "torchrun" in error.fix


def test_a_rank_that_cannot_use_cuda_says_what_to_do() -> None:
    def use_cuda() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with ...")

    with pytest.raises(ForkUnsafeError, match="python -m minitrainer fit"):
        run_on_local_ranks(use_cuda, 2)
