"""Several ranks are one run: same weights, same buffers, same decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

import minitrainer as mt
from minitrainer.cli import main
from minitrainer.errors import ModelMismatchError, UnusedParametersError
from tests.ranks import run_ranks
from tests.toys import Each, Idx, Lin, Values, loader, quiet


class Normed(mt.Module):
    """Batch norm in front of one weight; logs the mean output in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(self.norm(batch[:, None])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.running = self.norm.running_mean.item()
        self.log("out", self.layer(self.norm(batch[:, None])).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_buffers_are_equal_before_validation_and_saving() -> None:
    """Case B35: rank 0 sees 0..3, rank 1 10..13: running_mean 0.15 on both, as in the file."""

    class Save(mt.Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint("a.ckpt")

    def rank() -> tuple[float, float]:
        torch.manual_seed(0)
        module = Normed()
        # Dealt out in stride: rank 0 gets 0, 1, 2, 3.
        trainer = quiet(callbacks=[Save()])
        data = loader([0, 10, 1, 11, 2, 12, 3, 13], batch_size=4)
        trainer.fit(module, data, loader([1.0, 2.0, 5.0]))
        return module.running, trainer.callback_metrics["out"]

    (first, metric), (second, same) = run_ranks(rank)
    assert first == pytest.approx(0.15)
    assert second == first
    assert same == metric
    alone = quiet().validate(Normed.load_from_checkpoint("a.ckpt"), loader([1.0, 2.0, 5.0]))
    assert alone["out"] == pytest.approx(metric, abs=1e-7)


def test_buffers_are_aligned_at_the_start() -> None:
    """Case B59: buffer = rank + 1 in the constructor: 1.0 on both after setup."""

    def rank() -> float:
        class Buffered(Lin):
            def __init__(self) -> None:
                super().__init__()
                import os

                self.register_buffer("b", torch.tensor(float(os.environ["RANK"]) + 1))

        module = Buffered()
        seen = []
        quiet(callbacks=[Each(lambda t, m, r: seen.append(m.b.item()))]).fit(
            module, loader([1.0, 2.0])
        )
        return seen[0]

    assert run_ranks(rank) == [1.0, 1.0]


def test_early_stopping_decides_alike_on_all_ranks() -> None:
    """Case B12: a metric gets worse on rank 1 only. Mean of ranks; unsynced: rank 0's value."""

    def rank(*, sync: bool) -> tuple[int, int]:
        class Worsening(Lin):
            def validation_step(self, batch: Any, batch_idx: int) -> Any:
                # Rank 0 improves by 1 per epoch, rank 1 worsens by 2: the mean worsens.
                value = 2.0 * self.current_epoch if self.global_rank else -self.current_epoch
                self.log("m", float(value), sync_dist=sync)

        trainer = quiet(max_epochs=6, callbacks=[mt.EarlyStopping(monitor="m", patience=1)])
        trainer.fit(Worsening(), loader([0, 0]), loader([0, 0]))
        return trainer.current_epoch, trainer.global_step

    assert run_ranks(lambda: rank(sync=True)) == [(2, 2), (2, 2)]
    assert run_ranks(lambda: rank(sync=False)) == [(6, 6), (6, 6)]


def test_a_stop_asked_for_on_one_rank_stops_all_at_the_same_step() -> None:
    def rank() -> int:
        class Stop(mt.Callback):
            def on_train_step_end(self, trainer: Any, module: Any, result: Any) -> None:
                if trainer.global_rank == 1 and trainer.global_step == 3:
                    trainer.should_stop = True

        trainer = quiet(max_epochs=5, callbacks=[Stop()])
        trainer.fit(Lin(), loader([1.0] * 20))
        return trainer.global_step

    assert run_ranks(rank) == [4, 4]


def test_hosts_agree_on_the_same_totals() -> None:
    """The way that CUDA takes, on CPUs: a None, a tail and a stop, as with the gradients' own."""

    class OnHosts(mt.DDPStrategy):
        def _agrees_on_hosts(self, device: torch.device) -> bool:
            return True

    class Skipping(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1 and batch_idx == 1:
                return None
            return super().training_step(batch, batch_idx)

    class Stop(mt.Callback):
        def on_train_step_end(self, trainer: Any, module: Any, result: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 5:
                trainer.should_stop = True

    def rank(strategy: mt.DDPStrategy) -> tuple[float, int, int]:
        module = Skipping()
        trainer = quiet(max_epochs=5, strategy=strategy, callbacks=[Stop()])
        trainer.fit(module, loader(range(9), batch_size=2))
        return module.w.item(), trainer.global_step, trainer._progress.state.samples_seen

    hosts = run_ranks(lambda: rank(OnHosts()))
    assert hosts == run_ranks(lambda: rank(mt.DDPStrategy()))
    assert hosts[0] == hosts[1]
    assert hosts[0][1] == 6


def test_weighted_sampler_is_kept() -> None:
    """Case B23: weights 1 for items 0..3, 0 for 4..7, 8 draws: 4 per rank, not the same ones."""

    def rank() -> list[int]:
        module = Idx()
        sampler = WeightedRandomSampler([1.0] * 4 + [0.0] * 4, 8)
        quiet().fit(module, DataLoader(Values(range(8)), sampler=sampler))
        return module.items()

    first, second = run_ranks(rank)
    assert len(first) == len(second) == 4
    assert set(first + second) <= {0, 1, 2, 3}
    assert first != second


class Mlp(mt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[:, None]) - batch[:, None].sin()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("size", [64, 61])
def test_layouts_end_with_the_same_weights_and_order(size: int) -> None:
    """Promise 1: 1, 2 and 4 ranks, with and without accumulation, at one global batch of 16."""
    values = [0.1 * i for i in range(size)]

    def fit(batch_size: int, accumulate: int) -> list[float]:
        torch.manual_seed(0)
        module = Mlp().double()
        data = loader(values, batch_size=batch_size, shuffle=True)
        data.dataset.values = data.dataset.values.double()  # type: ignore[attr-defined]
        quiet(max_epochs=2, accumulate=accumulate).fit(module, data)
        return [x for p in module.parameters() for x in p.flatten().tolist()]

    reference = fit(16, 1)
    for ranks, accumulate in [(1, 2), (2, 1), (2, 4), (4, 1), (4, 2)]:
        batch_size = 16 // (ranks * accumulate)

        def rank(batch_size: int = batch_size, accumulate: int = accumulate) -> list[float]:
            return fit(batch_size, accumulate)

        results = run_ranks(rank, world_size=ranks) if ranks > 1 else [rank()]
        for result in results:
            assert result == pytest.approx(reference, abs=1e-9), (ranks, accumulate)


def test_models_that_differ_are_named() -> None:
    def rank() -> str:
        class Different(Lin):
            def __init__(self) -> None:
                super().__init__()
                import os

                self.layer = torch.nn.Linear(2, 2 + int(os.environ["RANK"]))

        with pytest.raises(ModelMismatchError) as raised:
            quiet().fit(Different(), loader([1.0, 2.0]))
        return str(raised.value)

    for message in run_ranks(rank):
        assert "layer.weight (2, 2)" in message
        assert "layer.weight (3, 2)" in message


def test_unused_parameters_are_named_and_may_be_allowed() -> None:
    class Half(Lin):
        def __init__(self) -> None:
            super().__init__()
            self.idle = torch.nn.Linear(1, 1)

    def rank(**settings: Any) -> float:
        module = Half()
        quiet(**settings).fit(module, loader([1.0] * 4))
        return module.w.item()

    with pytest.raises(UnusedParametersError, match=r"idle\.weight, idle\.bias"):
        run_ranks(rank)
    allowed = mt.DDPStrategy(find_unused_parameters=True)
    assert run_ranks(lambda: rank(strategy=allowed)) == [-2.0] * 2


def test_parameters_unused_in_a_later_step_are_named() -> None:
    class Later(Lin):
        def __init__(self) -> None:
            super().__init__()
            self.idle = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx > 0 else loss + self.idle(batch[:, None]).mean()

    with pytest.raises(UnusedParametersError, match=r"idle\.weight"):
        run_ranks(lambda: quiet().fit(Later(), loader([1.0] * 8)))


def test_predictions_come_in_the_order_of_the_data_on_every_rank() -> None:
    class Predicting(Lin):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"batch_idx": batch_idx, "items": batch}

    def rank() -> list[tuple[int, list[float]]]:
        outputs = quiet().predict(Predicting(), loader(range(7), batch_size=2))
        return [(output["batch_idx"], output["items"].tolist()) for output in outputs]

    expected = [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6])]
    assert run_ranks(rank) == [expected] * 2


def test_dropout_differs_between_ranks_and_initial_weights_do_not() -> None:
    def rank() -> tuple[float, float]:
        class Noisy(Lin):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.noise = torch.rand(()).item()
                return super().training_step(batch, batch_idx)

        module = Noisy()
        torch.nn.init.constant_(module.w, torch.rand(()).item())
        quiet().fit(module, loader([0.0, 0.0]))
        return module.noise, module.w.item()

    (noise_0, w_0), (noise_1, w_1) = run_ranks(rank)
    assert noise_0 != noise_1
    assert w_0 == w_1


def test_digits_end_with_the_same_weights_in_any_layout() -> None:
    """The first recipe without batch norm, global batch 64: devices=2 and accumulate=2."""
    recipe = Path(__file__).parents[2] / "recipes" / "digits.yaml"

    def fit(batch_size: int, *settings: str) -> dict[str, torch.Tensor]:
        common = ["module.norm=false", "trainer.max_epochs=2"]
        overrides = [*common, f"data.batch_size={batch_size}", *settings]
        assert main(["fit", str(recipe), f"trainer.run_dir=run{len(settings)}", *overrides]) == 0
        saved = torch.load(f"run{len(settings)}/checkpoints/last.ckpt", weights_only=True)
        assert saved["metrics"]["val_acc"][0] * 297 == pytest.approx(
            round(saved["metrics"]["val_acc"][0] * 297), abs=1e-9
        )
        weights: dict[str, torch.Tensor] = saved["state_dict"]
        return weights

    alone = fit(64)
    accumulated = fit(32, "trainer.accumulate=2")
    shared = fit(32, "trainer.devices=2", "trainer.accelerator=cpu")
    for name, weight in alone.items():
        torch.testing.assert_close(accumulated[name], weight, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(shared[name], weight, atol=2e-4, rtol=2e-4)
