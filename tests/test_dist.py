"""Process groups, and what travels between ranks."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed

from minitrainer import dist
from tests.ranks import run_ranks
from tests.toys import Lin, loader, quiet

CPU = torch.device("cpu")


def test_without_a_group_everything_is_a_no_op() -> None:
    tensor = torch.ones(2)
    dist.broadcast_tensors([tensor])
    dist.barrier()
    assert (dist.rank(), dist.world_size(), dist.local_rank()) == (0, 1, 0)
    assert dist.gather_objects({"a": 1}) == [{"a": 1}]
    assert dist.any_rank(True) is True
    assert dist.first_to_say("x")


@pytest.mark.parametrize("length", [0, 1, 4000, 5000, 100_000])
def test_gathers_objects_of_any_length(length: int) -> None:
    def rank() -> bool:
        with dist.process_group(CPU, num_ranks=2, timeout=20):
            number = dist.rank()
            # The ranks' lengths differ: one of them may need the second round alone.
            mine = {"rank": number, "text": "x" * (length * number), "nan": math.inf}
            first, second = dist.gather_objects(mine)
            assert first == {"rank": 0, "text": "", "nan": math.inf}
            assert second == {"rank": 1, "text": "x" * length, "nan": math.inf}
            assert dist.broadcast_object(number) == 0
            assert dist.any_rank(number == 1)
            assert not dist.any_rank(False)
            return True

    assert run_ranks(rank) == [True, True]


def test_buffers_come_from_rank_0() -> None:
    def rank() -> list[float]:
        with dist.process_group(CPU, num_ranks=2, timeout=20):
            tensors = [torch.full((3,), float(dist.rank() + 1)), torch.tensor(dist.rank())]
            dist.broadcast_tensors(tensors)
            return [tensor.sum().item() for tensor in tensors]

    assert run_ranks(rank) == [[3.0, 0.0]] * 2


def test_a_second_run_under_torchrun_meets_again() -> None:
    """torchrun's store outlives a group; the second group must not read the first's addresses."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank() -> tuple[float, bool]:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(store.port))
        module = Lin()
        for _ in range(4):
            trainer = quiet()
            trainer.fit(module, loader([1.0, 3.0]))
        return module.w.item(), trainer.is_global_zero

    assert run_ranks(rank) == [(-8.0, True), (-8.0, False)]
