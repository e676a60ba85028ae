"""Launch: what a hand-written script falls in with processes, ports, devices and signals."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minitrainer as mt
from minitrainer.launch.environment import Environment, strip_local_rank
from tests.pitfalls.plain import codes, plain_group
from tests.ranks import run_ranks
from tests.toys import Lin, loader, quiet


def test_plain_init_names_one_missing_variable_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """L01: with RANK alone, torch asks for WORLD_SIZE, then for MASTER_ADDR, and so on."""
    monkeypatch.setenv("RANK", "0")
    asked = []
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(ValueError, match="expected, but not set") as raised:
            dist.init_process_group("gloo")
        asked.append(name in str(raised.value))
        assert codes(str(raised.value)) == ["L01"]
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "127.0.0.1")
    assert asked == [True] * 3


def test_plain_peers_of_a_failed_rank_are_not_told_why() -> None:
    """L04: rank 1 raises; rank 0 hears of a closed connection, and not of the ValueError."""

    def rank() -> str:
        try:
            with plain_group() as rank:
                if rank == 1:
                    raise ValueError("boom")
                dist.all_reduce(torch.ones(1))
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    first, second = run_ranks(rank)
    assert second == "boom"
    assert "Connection" in first
    assert "boom" not in first
    assert "L04" in codes(first)


def test_plain_fixed_port_is_in_use() -> None:
    """L06: a second script with MASTER_PORT=29500 of the guides, on the same machine."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with pytest.raises(RuntimeError) as raised:
            dist.TCPStore("127.0.0.1", other.getsockname()[1], 1, is_master=True)
    assert "EADDRINUSE" in str(raised.value)
    assert codes(str(raised.value)) == ["L06"]


def test_a_script_that_declares_local_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """L20: under torchrun all ranks are 0; under torch.distributed.launch the parser refuses."""

    def device_of_the_guides(argv: list[str]) -> int:
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=0)
        return int(parser.parse_args(argv).local_rank)

    assert run_ranks(lambda: device_of_the_guides([])) == [0, 0]
    with pytest.raises(SystemExit):
        device_of_the_guides(["--local-rank=1"])
    assert codes(capsys.readouterr().err) == ["L20"]

    def device_of_minitrainer() -> tuple[int, list[str]]:
        left = strip_local_rank(["--local-rank=0", "--local_rank", "0", "fit"])
        return Environment.detect().local_rank, left

    assert run_ranks(device_of_minitrainer) == [(0, ["fit"]), (1, ["fit"])]


def test_a_process_group_left_open_by_an_exception() -> None:
    """L23: the second training of a script fails, where `destroy_process_group` was skipped."""

    class Failing(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("boom")

    def plain() -> str:
        dist.init_process_group("gloo")  # and then something raised
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            return str(error)
        finally:
            dist.destroy_process_group()
        return ""

    for message in run_ranks(plain):
        assert "twice" in message
        assert codes(message) == ["L23"]

    def with_minitrainer() -> float:
        with pytest.raises(ValueError, match="boom"):
            quiet().fit(Failing(), loader([1.0, 1.0]))
        assert not dist.is_initialized()
        module = Lin()
        quiet().fit(module, loader([1.0, 1.0]))
        return module.w.item()

    assert run_ranks(with_minitrainer) == [-1.0, -1.0]


def test_plain_ranks_outlive_their_launcher() -> None:
    """L24: the process that forked a rank is killed; the rank goes on."""
    receive, send = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        rank = os.fork()
        if rank == 0:
            time.sleep(30)
            os._exit(0)
        os.write(send, str(rank).encode())
        time.sleep(30)
        os._exit(0)
    rank = int(os.read(receive, 20))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    try:
        assert _is_alive(rank)
        time.sleep(0.2)
        assert _is_alive(rank)
    finally:
        os.kill(rank, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_plain_loop_is_ended_in_its_middle_by_sigterm(tmp_path: Path) -> None:
    """L25: preemption ends a process at once: what it would have saved is not there."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (tmp_path / "started").touch()
        time.sleep(30)  # the epoch
        (tmp_path / "last.ckpt").touch()
        os._exit(0)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not (tmp_path / "last.ckpt").exists()


def test_a_comment_behind_the_backslash_ends_the_command() -> None:
    """L26: what follows is run as commands of its own."""
    script = "echo torchrun \\  # four GPUs\n  --nproc_per_node=4 train.py"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert run.returncode == 127
    assert run.stdout == "torchrun  \n" or run.stdout.strip() == "torchrun"
    assert codes(run.stderr) == ["L26"]


def test_plain_time_stamps_differ_between_ranks(tmp_path: Path) -> None:
    """L27: each rank makes the name of its directory itself, at its own time."""

    def rank() -> None:
        time.sleep(0.01 * int(os.environ["RANK"]))
        (tmp_path / f"run-{time.time_ns()}").mkdir()

    run_ranks(rank)
    assert len(list(tmp_path.iterdir())) == 2


def test_plain_nccl_on_a_machine_without_gpus() -> None:
    """L28: the backend of the guides refuses; minitrainer takes gloo there."""
    if torch.cuda.device_count() > 0:
        pytest.skip("there is a GPU, so nccl works")

    def plain() -> str:
        with pytest.raises(ValueError, match="NCCL") as raised:
            dist.init_process_group("nccl")
        return str(raised.value)

    for message in run_ranks(plain):
        assert codes(message) == ["L28"]

    def with_minitrainer() -> str:
        seen = []

        class Look(mt.Callback):
            def on_fit_start(self, trainer: Any, module: Any) -> None:
                seen.append(dist.get_backend())

        quiet(callbacks=[Look()]).fit(Lin(), loader([1.0, 1.0]))
        return seen[0]

    assert run_ranks(with_minitrainer) == ["gloo", "gloo"]
