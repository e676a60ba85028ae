"""Sync: plain DDP falls in, on real gloo ranks."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import minitrainer as mt
from tests.pitfalls.plain import Weight, codes, failure_of, plain_group, wrapped_weight
from tests.ranks import run_ranks
from tests.toys import Each, Lin, loader, quiet


def count_reductions(ddp: DistributedDataParallel) -> list[int]:
    """Return a list that grows with each reduction of a bucket."""
    reduced: list[int] = []
    ddp.register_comm_hook(
        None,
        lambda state, bucket: reduced.append(1) or allreduce_hook(None, bucket),  # type: ignore[func-returns-value]
    )
    return reduced


def test_plain_ddp_tells_one_rank_only_that_models_differ() -> None:
    """S01: rank 1 learns of shapes; rank 0 of a broken connection, which it takes for the cause."""

    def rank() -> str:
        with plain_group() as rank:
            layer = torch.nn.Linear(2, 2 + rank)
            return failure_of(lambda: DistributedDataParallel(layer))

    first, second = run_ranks(rank)
    assert "size" not in first
    assert "L04" in codes(first)
    assert "appears not to match sizes" in second
    assert codes(second) == ["S01"]


def test_plain_ddp_names_unused_parameters_by_number_a_step_late() -> None:
    """S02: the first step passes, the second raises, and no name is told."""

    class Half(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.idle = torch.nn.Linear(1, 1)

    def rank() -> str:
        with plain_group():
            ddp = DistributedDataParallel(Half())
            ddp(torch.ones(2)).backward()
            return failure_of(lambda: ddp(torch.ones(2)))

    for message in run_ranks(rank):
        assert "Expected to have finished reduction in the prior iteration" in message
        assert "did not receive grad for rank" in message
        assert "idle" not in message
        assert "S02" in codes(message)


def test_calling_past_the_wrapper() -> None:
    """S20: `ddp.module(x)` reduces nothing, in silence; a training_step cannot be reached so."""

    def plain() -> tuple[float, float]:
        with plain_group() as rank:
            module, ddp = wrapped_weight()
            x = torch.tensor([1.0 + 2 * rank])
            ddp.module(x).backward()
            past = module.w.grad.item()
            module.w.grad = None
            ddp(x).backward()
            return past, module.w.grad.item()

    assert run_ranks(plain) == [(1.0, 2.0), (3.0, 2.0)]

    def with_minitrainer() -> float:
        module = Lin()
        quiet().fit(module, loader([1.0, 3.0]))
        return module.w.item()

    assert run_ranks(with_minitrainer) == [-2.0, -2.0]


def test_plain_no_sync_around_backward_alone_does_nothing() -> None:
    """S21: DDP reads `no_sync` in the forward; around backward only, each micro-batch reduces."""

    def rank() -> tuple[int, int, int]:
        with plain_group():
            counts = []
            for place in ("nowhere", "backward", "both"):
                _, ddp = wrapped_weight()
                reduced = count_reductions(ddp)
                x = torch.ones(1)
                if place == "nowhere":
                    ddp(x).backward()
                elif place == "backward":
                    loss = ddp(x)
                    with ddp.no_sync():
                        loss.backward()
                else:
                    with ddp.no_sync():
                        ddp(x).backward()
                ddp(x).backward()
                counts.append(len(reduced))
            return counts[0], counts[1], counts[2]

    assert run_ranks(rank) == [(2, 2, 1)] * 2


def test_plain_reductions_are_paired_by_position() -> None:
    """S22: rank 0 reduces a then b, rank 1 b then a: two metrics are mixed without a word."""

    def rank() -> dict[str, float]:
        values = {"a": torch.tensor(1.0), "b": torch.tensor(10.0)}
        with plain_group() as rank:
            if rank == 1:
                values = {"b": torch.tensor(20.0), "a": torch.tensor(3.0)}
            for value in values.values():
                dist.all_reduce(value)
        return {name: value.item() / 2 for name, value in values.items()}

    first, second = run_ranks(rank)
    assert first["a"] == second["b"] == 10.5  # a is 2.0, b 15.0
    assert first != {"a": 2.0, "b": 15.0}


def test_plain_collective_on_rank_0_only_hangs() -> None:
    """S23: a metric reduced under `if rank == 0`: rank 0 waits for its timeout."""

    def rank() -> str:
        message = ""
        with plain_group() as rank:
            impatient = dist.new_group(timeout=timedelta(seconds=1.5))
            if rank == 0:
                message = failure_of(lambda: dist.all_reduce(torch.ones(1), group=impatient))
            dist.barrier()  # until then rank 1 computes on
        return message

    first, _ = run_ranks(rank)
    assert "Timed out waiting 1500ms" in first
    assert {"S23", "S29"} <= set(codes(first))


def test_plain_stop_on_a_value_of_one_rank() -> None:
    """S24: rank 1 breaks out of the loop; the reduction of rank 0 never completes."""

    def rank() -> str:
        with plain_group() as rank:
            _, ddp = wrapped_weight()
            for _ in range(3):
                message = failure_of(lambda: ddp(torch.ones(1)).backward())
                if message or rank == 1:
                    return message
        return "went through"

    first, second = run_ranks(rank)
    assert "Connection" in first
    assert second == ""
    assert {"L04", "S24"} <= set(codes(first))


def test_plain_ranks_with_different_numbers_of_batches() -> None:
    """S25: 3 batches on rank 0 and 5 on rank 1: two are never trained, and rank 1 fails."""

    def rank() -> tuple[int, str]:
        with plain_group() as rank:
            _, ddp = wrapped_weight()
            for step in range(3 + 2 * rank):
                message = failure_of(lambda: ddp(torch.ones(1)).backward())
                if message:
                    return step, message
            return step + 1, ""

    (first, _), (second, message) = run_ranks(rank)
    assert (first, second) == (3, 3)
    assert "S25" in codes(message)


def test_plain_skipped_batch_pairs_the_wrong_gradients() -> None:
    """S26: rank 1 skips its batch 1, so its batch 2 meets batch 1 of rank 0, in silence."""

    def rank() -> tuple[list[float], str]:
        gradients: list[float] = []
        with plain_group() as rank:
            module, ddp = wrapped_weight()
            for x in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])[rank]:
                if x == 20.0:
                    continue  # what a loop does with a NaN loss
                module.w.grad = None
                message = failure_of(lambda x=x: ddp(torch.tensor([x])).backward())  # type: ignore[misc]
                if message:
                    return gradients, message
                gradients.append(module.w.grad.item())
        return gradients, ""

    (first, message), (second, _) = run_ranks(rank)
    assert first == second == [5.5, 16.0]  # 16 is the mean of 2 and 30
    assert "S26" in codes(message)


def test_plain_ddp_leaves_batch_norm_statistics_apart() -> None:
    """S27: after a step on 0..3 and 10..13 the running means are 0.15 and 1.15."""

    def rank() -> float:
        with plain_group() as rank:
            norm = torch.nn.BatchNorm1d(1)
            ddp = DistributedDataParallel(norm)
            ddp(torch.arange(4.0)[:, None] + 10 * rank).sum().backward()
            return norm.running_mean.item()

    assert run_ranks(rank) == pytest.approx([0.15, 1.15])


def test_plain_broadcast_buffers_off_does_not_align_them_at_all() -> None:
    """S28: a buffer of rank + 1 stays 1.0 and 2.0."""

    class Buffered(Weight):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("b", torch.tensor(value))

    def rank() -> float:
        with plain_group() as rank, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.14 tells of another argument
            module = Buffered(rank + 1.0)
            DistributedDataParallel(module, broadcast_buffers=False)(torch.ones(1))
            return module.b.item()

    assert run_ranks(rank) == [1.0, 2.0]


def test_the_timeout_is_the_one_of_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """S29: the variables that guides name leave it at 30 minutes; `timeout` is what sets it."""

    def of_the_group() -> float:
        group = dist.distributed_c10d._get_default_group()
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    def rank() -> tuple[float, float]:
        dist.init_process_group("gloo")
        plain = of_the_group()
        dist.destroy_process_group()
        seen = []
        quiet(
            strategy=mt.DDPStrategy(timeout=77.0),
            callbacks=[Each(lambda t, m, r: seen.append(of_the_group()))],
        ).fit(Lin(), loader([1.0, 1.0]))
        return plain, seen[0]

    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")
    assert run_ranks(rank) == [(1800.0, 77.0)] * 2
