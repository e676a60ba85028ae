"""Checkpoint: what torch.save and torch.load by hand lose or break."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import minitrainer as mt
from tests.pitfalls.plain import Weight, codes, failure_of, plain_group, wrapped_weight
from tests.ranks import run_ranks
from tests.toys import Each, Lin, Values, loader, quiet


class Bomb:
    """Ends the process when it is pickled: a kill in the middle of a save."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return Bomb, ()


def test_plain_save_killed_half_way_leaves_nothing(tmp_path: Path) -> None:
    """C20: torch.save over the last good file; the process is killed; neither is left."""
    path = tmp_path / "last.ckpt"
    torch.save({"step": 1}, path)
    child = os.fork()
    if child == 0:
        torch.save({"step": 2, "weights": torch.ones(10), "rest": Bomb()}, path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with pytest.raises((RuntimeError, EOFError, pickle.UnpicklingError)) as raised:
        torch.load(path, weights_only=True)
    assert "C20" in codes(f"{type(raised.value).__name__}: {raised.value}")


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def test_plain_load_runs_code(tmp_path: Path) -> None:
    """C02: what `weights_only=False` does with a file from elsewhere."""
    torch.save({"state_dict": Payload()}, "file.pt")
    torch.load("file.pt", weights_only=False)
    assert Path("pwned").is_dir()
    with pytest.raises(pickle.UnpicklingError) as raised:
        torch.load("file.pt", weights_only=True)
    assert "C02" in codes(str(raised.value))


def test_plain_save_fails_on_rank_0_only() -> None:
    """C04: rank 0 has no room on its disk; rank 1 hears of a closed connection."""

    def rank() -> str:
        try:
            with plain_group() as rank:
                if rank == 0:
                    torch.save({}, "/dev/full")
                torch.distributed.barrier()
        except (OSError, RuntimeError) as error:
            return str(error)
        return ""

    first, second = run_ranks(rank)
    assert "C04" in codes(first)
    assert "Connection" in second


def test_plain_names_carry_module() -> None:
    """C21: the state_dict of the wrapper does not fit the module."""

    def rank() -> tuple[list[str], str]:
        with plain_group():
            state_dict = DistributedDataParallel(Weight()).state_dict()
        return list(state_dict), failure_of(lambda: Weight().load_state_dict(state_dict))

    for names, message in run_ranks(rank):
        assert names == ["module.w"]
        assert {"C03", "C21"} <= set(codes(message))


def test_plain_resume_from_weights_alone() -> None:
    """C22: momentum is gone, so the weights part from those of the whole run."""

    def steps(module: Weight, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            module(torch.ones(1)).backward()
            optimizer.step()

    whole, resumed = Weight(), Weight()
    momentum = torch.optim.SGD(whole.parameters(), lr=1.0, momentum=0.5)
    steps(whole, momentum, 2)
    resumed.load_state_dict(whole.state_dict())
    steps(whole, momentum, 1)
    steps(resumed, torch.optim.SGD(resumed.parameters(), lr=1.0, momentum=0.5), 1)
    assert (whole.w.item(), resumed.w.item()) == (-4.25, -3.5)


def test_plain_resume_within_a_shuffled_epoch() -> None:
    """C24: batches are skipped in another permutation: samples are seen twice or never."""

    def start() -> DataLoader[Any]:
        torch.manual_seed(0)
        return DataLoader(Values(range(64)), batch_size=4, shuffle=True)

    data = start()
    list(data)  # epoch 0
    before = torch.cat([batch for batch, _ in zip(data, range(5), strict=False)])
    resumed = list(start())[5:]  # epoch 1 in a new process, 5 batches skipped
    seen = torch.cat([before, *resumed]).tolist()
    assert len(seen) == 64
    assert len(set(seen)) < 64


def test_plain_save_within_a_window_loses_its_gradients() -> None:
    """C25: x = 1..8, accumulate 4, saved after 6: the gradients of 5 and 6 are gone."""
    module = Weight()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def train(module: Weight, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for x in range(first, last + 1):
            (module(torch.tensor([float(x)])) / 4).backward()
            if x % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    train(module, optimizer, 1, 6)
    resumed = Weight()
    resumed.load_state_dict(module.state_dict())
    train(resumed, torch.optim.SGD(resumed.parameters(), lr=1.0), 7, 8)
    assert resumed.w.item() == -2.5 - 3.75  # and not -2.5 - 6.5


def test_a_save_without_a_condition_is_done_by_every_rank() -> None:
    """C26: of plain ranks both write; asked on both ranks, minitrainer writes on rank 0."""

    def plain() -> bool:
        with plain_group() as rank:
            _, ddp = wrapped_weight()
            torch.save(ddp.state_dict(), f"plain-{rank}.ckpt")  # "last.ckpt", in a script
        return Path(f"plain-{rank}.ckpt").exists()

    assert run_ranks(plain) == [True, True]

    def with_minitrainer() -> int:
        writes = []

        class Noting(mt.CheckpointIO):
            def save(self, checkpoint: dict[str, Any], path: Path) -> None:
                writes.append(path)
                super().save(checkpoint, path)

        save = Each(lambda trainer, module, result: trainer.save_checkpoint("last.ckpt"))
        quiet(checkpoint_io=Noting(), callbacks=[save]).fit(Lin(), loader([1.0, 2.0]))
        return len(writes)

    assert run_ranks(with_minitrainer) == [1, 0]
    assert Path("last.ckpt").is_file()


def _order(length: int, epoch: int = 1) -> list[int]:
    sampler = DistributedSampler(Values(range(length)), num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_plain_resume_with_more_samples_sees_some_twice() -> None:
    """C29: the order of an epoch is drawn for a length."""
    seen, rest = _order(20)[:8], _order(22)[8:]
    assert len(set(seen + rest)) < 22
    assert sorted(seen + _order(20)[8:]) == list(range(20))


def test_plain_resume_with_another_global_batch_takes_other_steps() -> None:
    """C28: a schedule made for ten steps is half through when the epoch is over."""
    rates = {}
    for batch_size in (2, 4):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
        for _ in range(0, 20, batch_size):
            optimizer.step()
            schedule.step()
        rates[batch_size] = schedule.get_last_lr()[0]
    assert rates[2] == 0.0
    assert rates[4] > 0.4
