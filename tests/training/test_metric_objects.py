"""Objects with torchmetrics' update, compute and reset can be logged, also by some ranks only."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's DDP imports it: here once, and not in each of the forked ranks
import torch.distributed as torch_dist

from minitrainer.errors import LogError, MetricMismatchError
from tests.ranks import run_ranks
from tests.toys import Lin, Rows, loader, quiet


class Ratio:
    """sum(values) / number of values, of this rank; counts how often it is asked and reset."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.asked = self.resets = 0

    def update(self, values: torch.Tensor) -> None:
        self.sums += torch.tensor([values.sum(), len(values)])

    def compute(self) -> Any:
        self.asked += 1
        return self.sums[0] / self.sums[1]

    def reset(self) -> None:
        self.resets += 1
        self.sums.zero_()


class Synced(Ratio):
    """Exchanges its state in compute, as torchmetrics does, so all ranks have to be there."""

    sync_on_compute = True

    def compute(self) -> Any:
        if self.sums[1] == 0:
            warnings.warn("compute before update", UserWarning, stacklevel=2)
        if torch_dist.is_initialized():
            # An all_gather, as torchmetrics' own: a rank that is elsewhere would disturb it.
            parts = [torch.zeros_like(self.sums) for _ in range(torch_dist.get_world_size())]
            torch_dist.all_gather(parts, self.sums)
            self.sums = torch.stack(parts).sum(0)
        return super().compute()


class Holding(Lin):
    """Logs objects under names whose order differs between ranks."""

    def __init__(self, **objects: Any) -> None:
        super().__init__()
        self.names = list(objects)
        self.objects: Any = torch.nn.Module()
        for name, value in objects.items():
            setattr(self.objects, name, value)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        for name in reversed(self.names) if self.global_rank else self.names:
            value = getattr(self.objects, name)
            value.update(batch)
            self.log(name, value)
        self.log("plain", batch.mean())


@pytest.mark.parametrize("kind", [Ratio, Synced])
@pytest.mark.parametrize("size", [1, 3, 8, 21])
def test_objects_see_each_sample_once(kind: Any, size: int) -> None:
    """Mean of 0..size-1; with 1 or 3 values in batches of 4, rank 1 logs nothing at all."""

    def rank() -> tuple[dict[str, float], list[int]]:
        module = Holding(a=kind(), b=kind())
        trainer = quiet()
        found = trainer.validate(module, loader(range(size), batch_size=4))
        return found, [module.objects.a.asked, module.objects.a.resets]

    expected = {name: pytest.approx((size - 1) / 2, abs=1e-12) for name in ("a", "b", "plain")}
    for found, counts in run_ranks(rank, timeout=20):
        assert found == expected
        assert counts in ([1, 1], [0, 0])
    assert rank()[0] == expected


def test_an_object_is_computed_once_per_epoch_and_reset() -> None:
    class Training(Lin):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Synced()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.update(batch + self.current_epoch)
            self.log("seen", self.seen, prog_bar=True)
            return super().training_step(batch, batch_idx)

    def rank() -> tuple[list[float], list[int], dict[str, float]]:
        rows, module = Rows(), Training()
        trainer = quiet(max_epochs=3, loggers=[rows], run_dir="run")
        trainer.fit(module, loader([0.0, 1.0, 2.0, 3.0, 4.0]))
        counts = [module.seen.asked, module.seen.resets]
        return rows.column("seen"), counts, trainer.progress_metrics

    (column, counts, shown), (_, same, _) = run_ranks(rank)
    assert column == [2.0, 3.0, 4.0]
    assert counts == same == [3, 3]
    assert shown["seen"] == 4.0


def test_results_of_objects_that_do_not_exchange_are_reduced_as_asked() -> None:
    class Count(Ratio):
        def compute(self) -> Any:
            return int(self.sums[1])

    class Counting(Lin):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.first = Count(), Count()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.count.update(batch)
            self.first.update(batch)
            self.log("count", self.count, reduce_fx="sum")
            self.log("first", self.first, sync_dist=False)

    def rank() -> dict[str, float]:
        return quiet().validate(Counting(), loader(range(7), batch_size=2))

    assert run_ranks(rank) == [{"count": 7.0, "first": 4.0}] * 2


def test_an_object_that_cannot_be_found_where_it_is_needed() -> None:
    class Hidden(Lin):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = {"a": Synced()}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.metrics["a"].update(batch)
            self.log("a", self.metrics["a"])

    def rank(size: int) -> dict[str, float]:
        return quiet().validate(Hidden(), loader(range(size), batch_size=4))

    assert run_ranks(lambda: rank(8)) == [{"a": 3.5}] * 2
    with pytest.raises(MetricMismatchError, match=r"'a' was not logged on rank 1.*attribute"):
        run_ranks(lambda: rank(4), timeout=20)


def test_lists_of_values_need_a_batch_on_every_rank() -> None:
    """As a ROC curve of torchmetrics: gloo aborts the process where one rank has no value."""

    class Curve(Synced):
        @property
        def metric_state(self) -> dict[str, Any]:
            return {"values": [], "sums": self.sums}

    def rank(size: int) -> dict[str, float]:
        return quiet().validate(Holding(a=Curve()), loader(range(size), batch_size=4))

    assert run_ranks(lambda: rank(8)) == [{"a": 3.5, "plain": 3.5}] * 2
    with pytest.raises(MetricMismatchError, match=r"'a' was not logged on rank 1.*lists"):
        run_ranks(lambda: rank(4), timeout=20)


@pytest.mark.parametrize(
    ("error", "words", "values", "settings"),
    [
        (LogError, "end of the epoch", [Ratio()], {"on_step": True}),
        (LogError, "end of the epoch", [Ratio()], {"on_epoch": False}),
        (LogError, "str", ["text"], {}),
        (LogError, "reduce_fx", [Ratio()], {"reduce_fx": "median"}),
        (MetricMismatchError, "number and an object", [1.0, Ratio()], {}),
        (MetricMismatchError, "number and an object", [Ratio(), 1.0], {}),
        (MetricMismatchError, "two objects", [Ratio(), Ratio()], {}),
    ],
)
def test_what_cannot_be_logged(error: Any, words: str, values: Any, settings: Any) -> None:
    class Logging(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for value in values:
                self.log("m", value, **settings)
            return super().training_step(batch, batch_idx)

    with pytest.raises(error, match=words):
        quiet().fit(Logging(), loader([1.0]))


def test_an_object_that_computes_several_numbers() -> None:
    class Several(Ratio):
        def compute(self) -> Any:
            return {"a": 1.0}

    with pytest.raises(LogError, match="'a' computed dict"):
        quiet().validate(Holding(a=Several()), loader([1.0]))
