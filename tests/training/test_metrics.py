"""Logged values: exact over batches and ranks, and free of graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from minitrainer import dist
from minitrainer.errors import LogError, MetricMismatchError
from tests.ranks import run_ranks
from tests.toys import Each, Lin, Rows, loader, quiet


class Validating(Lin):
    """Logs the mean and the count of the validation values."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", batch.mean())
        self.log("count", float(len(batch)), reduce_fx="sum")


@pytest.mark.parametrize("size", [1, 2, 4, 5, 20, 21])
def test_validation_counts_every_sample_once(size: int) -> None:
    """Case B31: N=21 on 2 ranks: count 21, mean exactly 10.0 (padded: 22 and 9.5454)."""

    def rank() -> dict[str, float]:
        return quiet().validate(Validating(), loader(list(range(size)), batch_size=4))

    expected = {"count": float(size), "mean": (size - 1) / 2}
    assert run_ranks(rank) == [expected] * 2


def test_plain_distributed_sampler_falls_in() -> None:
    """What DistributedSampler does to case B31: 22 samples, one of them twice."""
    samplers = [
        torch.utils.data.DistributedSampler(range(21), 2, rank, shuffle=False) for rank in (0, 1)
    ]
    items = [item for sampler in samplers for item in sampler]
    assert len(items) == 22
    assert sum(items) / 22 == pytest.approx(9.5454545)


def test_epoch_mean_weighs_the_smaller_last_batch() -> None:
    """Case B32: 10 values in batches of 4: 4.5, not 5.1667."""
    metrics = quiet().validate(Validating(), loader(list(range(10)), batch_size=4))
    assert metrics == {"mean": 4.5, "count": 10.0}


def test_reductions_over_batches_and_ranks() -> None:
    """Case B89: rank 0 logs 1, 3, rank 1 logs 5, 7: mean 4, sum 16, max 7, min 1 on both."""

    class Logging(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name in ("mean", "sum", "max", "min"):
                self.log(name, batch[0], on_step=False, on_epoch=True, reduce_fx=name)
            self.log("local", batch[0], on_step=False, on_epoch=True, sync_dist=False)
            return super().training_step(batch, batch_idx)

    def rank() -> tuple[dict[str, float], list[Any]]:
        rows = Rows()
        trainer = quiet(loggers=[rows], run_dir="run")
        trainer.fit(Logging(), loader([1, 5, 3, 7]))
        return dict(trainer.callback_metrics), rows.rows

    (first, rows), (second, no_rows) = run_ranks(rank)
    assert first == {"mean": 4.0, "sum": 16.0, "max": 7.0, "min": 1.0, "local": 2.0}
    assert second == first
    assert rows[-1][1]["local@rank0"] == 2.0
    assert "local" not in rows[-1][1]
    assert no_rows == []


def test_keys_are_matched_by_name() -> None:
    """Case B20: other order on the other rank: a == 2, b == 15; a key that one rank lacks."""

    class Mixed(Lin):
        def __init__(self, *, lacking: bool) -> None:
            super().__init__()
            self.lacking = lacking

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 0:
                self.log("a", 1.0)
                self.log("b", 10.0)
            else:
                self.log("b", 20.0)
                if not self.lacking:
                    self.log("a", 3.0)

    def rank(*, lacking: bool) -> dict[str, float]:
        return quiet().validate(Mixed(lacking=lacking), loader([0, 0]))

    assert run_ranks(lambda: rank(lacking=False)) == [{"a": 2.0, "b": 15.0}] * 2
    assert run_ranks(lambda: rank(lacking=True)) == [{"a": 1.0, "b": 15.0}] * 2


def test_no_graph_and_no_tensor_is_kept() -> None:
    """Case B95: 200 steps, at most 2 losses alive, object count flat from step 50 to 200."""
    losses: list[Any] = []
    activations: list[Any] = []
    alive: list[int] = []
    counts: dict[int, int] = {}

    class Logging(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            activation = self.w * batch
            loss = activation.mean()
            losses.append(weakref.ref(loss))
            activations.append(weakref.ref(activation))
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    def look(trainer: Any, module: Any, result: Any) -> None:
        alive.append(max(sum(ref() is not None for ref in refs) for refs in (losses, activations)))
        if trainer.global_step in (64, 192):
            gc.collect()
            objects = gc.get_objects()
            counts[trainer.global_step] = sum(type(item) is torch.Tensor for item in objects)
            metric = trainer._fit_run.train_metrics._metrics["loss"]
            kept = [*metric.step._values, *metric.epoch._values]
            assert kept
            assert not any(value.requires_grad for value in kept)

    quiet(callbacks=[Each(look)]).fit(Logging(), loader([1.0] * 200))
    assert max(alive) <= 2
    assert counts[192] == counts[64]


def test_step_value_is_the_mean_over_window_and_ranks_and_both_get_their_names() -> None:
    class Logging(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", batch.mean(), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    def rank() -> tuple[list[Any], dict[str, float]]:
        rows = Rows()
        trainer = quiet(loggers=[rows], run_dir="run", accumulate=2, log_every_n_steps=1)
        trainer.fit(Logging(), loader(list(range(8))))
        return rows.rows, dict(trainer.callback_metrics)

    (rows, metrics), _ = run_ranks(rank)
    assert rows == [
        (1, {"epoch": 0, "x_step": 1.5}),
        (2, {"epoch": 0, "x_step": 5.5, "x_epoch": 3.5}),
    ]
    assert metrics == {"x": 3.5, "x_step": 5.5, "x_epoch": 3.5}


def test_a_value_logged_is_a_copy() -> None:
    class InPlace(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            total = batch.sum()
            self.log("total", total)
            total.zero_()
            return super().training_step(batch, batch_idx)

    rows = Rows()
    quiet(loggers=[rows], run_dir="run", log_every_n_steps=1).fit(InPlace(), loader([3.0]))
    assert rows.column("total") == [3.0]


def test_what_cannot_be_logged_is_said() -> None:
    class Wrong(Lin):
        def __init__(self, log: Any) -> None:
            super().__init__()
            self.wrong = log

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.wrong(self, batch_idx)
            return super().training_step(batch, batch_idx)

    def fit(log: Any) -> None:
        quiet().fit(Wrong(log), loader([1.0, 2.0]))

    with pytest.raises(LogError, match=r"shape \(2,\)"):
        fit(lambda module, batch_idx: module.log("x", torch.zeros(2)))
    with pytest.raises(LogError, match="str"):
        fit(lambda module, batch_idx: module.log("x", "high"))
    with pytest.raises(LogError, match="reduce_fx='median'"):
        fit(lambda module, batch_idx: module.log("x", 1.0, reduce_fx="median"))
    with pytest.raises(MetricMismatchError, match="'x'"):
        fit(lambda m, i: m.log("x", 1.0, reduce_fx="max" if i else "min"))
    with pytest.raises(LogError, match="outside of a run"):
        Lin().log("x", 1.0)


def test_metrics_logged_differently_on_two_ranks_are_an_error_on_both() -> None:
    class Mixed(Lin):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, reduce_fx="max" if dist.rank() else "min")

    def rank() -> str:
        with pytest.raises(MetricMismatchError) as raised:
            quiet().validate(Mixed(), loader([0, 0]))
        return str(raised.value)

    first, second = run_ranks(rank)
    assert first == second
    assert "'x'" in first
    assert "rank 1" in first
