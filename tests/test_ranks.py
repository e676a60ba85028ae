"""The tool that starts real ranks for the other tests keeps what it promises."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from tests.ranks import RankError, run_ranks


def _rank() -> int:
    return int(os.environ["RANK"])


def test_ranks_form_a_group_and_return_their_values() -> None:
    def add_up() -> tuple[int, torch.Tensor, int]:
        torch_dist.init_process_group("gloo")
        total = torch.tensor([float(_rank() + 1)])
        torch_dist.all_reduce(total)
        return _rank(), total, torch.get_num_threads()

    for world_size in (1, 2, 3):
        results = run_ranks(add_up, world_size)
        assert [rank for rank, _, _ in results] == list(range(world_size))
        assert {total.item() for _, total, _ in results} == {world_size * (world_size + 1) / 2}
        assert {threads for _, _, threads in results} == {1}


def test_ranks_find_a_launchers_environment() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    first, second = run_ranks(lambda: [os.environ[name] for name in names])
    assert first == ["0", "2", "0", "2", "0", "127.0.0.1"]
    assert second == ["1", "2", "1", "2", "0", "127.0.0.1"]
    assert not set(names) & set(os.environ)


class PairError(Exception):
    """An exception that pickles, and cannot be built again from its pickle."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


def test_the_first_failure_is_raised_with_rank_and_traceback() -> None:
    def rank_1_raises() -> None:
        torch_dist.init_process_group("gloo")
        if _rank() == 1:
            raise KeyError("boom")
        torch_dist.barrier()  # fails as well, because of rank 1

    with pytest.raises(KeyError, match="boom") as caught:
        run_ranks(rank_1_raises)
    (note,) = caught.value.__notes__
    assert "raised on rank 1 of 2" in note
    assert "in rank_1_raises" in note


def test_an_exception_that_cannot_travel_is_told() -> None:
    def fail() -> None:
        raise PairError(1, 2)

    with pytest.raises(RankError, match=r"(?s)1 is not 2.*raised on rank 0 of 1"):
        run_ranks(fail, 1)


@pytest.mark.parametrize(
    ("die", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "Rank 1 was killed by SIGKILL."),
        (lambda: os._exit(3), "Rank 1 left by exit code 3."),
    ],
)
def test_a_death_is_told_though_the_peers_raise(die: Callable[[], None], told: str) -> None:
    def rank_1_dies() -> None:
        torch_dist.init_process_group("gloo")
        if _rank() == 1:
            if os.fork() == 0:  # a child that goes on and holds all that the rank had open
                time.sleep(60)
            die()
        torch_dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=told):
        run_ranks(rank_1_dies)
    assert time.monotonic() - start < 5


def test_the_limit_ends_everything(tmp_path: Path) -> None:
    def start_a_child_and_hang() -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(command)
        (tmp_path / f"child{_rank()}").write_text(str(child.pid))
        (tmp_path / f"rank{_rank()}").write_text(str(os.getpid()))
        if _rank() == 1:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"Ranks \[1\] of 2 did not end in 1 s."):
        run_ranks(start_a_child_and_hang, timeout=1)
    assert time.monotonic() - start < 5
    assert not active_children()
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 4
    assert not [pid for pid in pids if _runs(pid)]


def test_a_rank_flushes_and_leaves_without_the_parents_teardown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teardown = (tmp_path / "teardown").touch
    atexit.register(teardown)
    try:
        run_ranks(lambda: print("from a rank"))
    finally:
        atexit.unregister(teardown)
    assert not (tmp_path / "teardown").exists()
    assert capfd.readouterr().out.count("from a rank") == 2


def _runs(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.01)
    return True
