"""AMP: a skipped step is no step, on all ranks alike; the scaler survives."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import minitrainer as mt
from minitrainer.errors import CheckpointMismatchError, PrecisionError
from tests.ranks import run_ranks
from tests.toys import Each, Lin, loader, quiet


class Scheduled(Lin):
    """LIN whose gradient is what the batch says, with a scheduler per step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return optimizer, {"scheduler": self.scheduler, "interval": "step"}


def test_plain_gradscaler_falls_in() -> None:
    """What a hand-written loop does: the scheduler goes on although the step was skipped."""
    w = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    for x in (1.0, math.inf, 1.0):
        scaler.scale(w * x).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    assert (w.item(), scheduler.last_epoch) == (-2.0, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_is_no_step(ranks: int) -> None:
    """Case B51: gradients 1, inf, 1: w -2, scale 512, scheduler 2, global_step 2, on all ranks."""

    def rank() -> tuple[float, float, int, int, int, list[bool]]:
        module, plugin, taken = Scheduled(), mt.AMPPlugin("fp16", init_scale=1024), []
        # Only the last rank sees the infinity.
        ones = [1.0] * (ranks - 1)
        trainer = quiet(
            precision=plugin, callbacks=[Each(lambda t, m, result: taken.append(result.taken))]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.fit(module, loader([*ones, 1.0, *ones, math.inf, *ones, 1.0]))
        skipped = trainer._progress.state.skipped_steps
        scale = plugin.state_dict()["scaler"]["scale"]
        last = module.scheduler.last_epoch
        return module.w.item(), scale, last, trainer.global_step, skipped, taken

    results = run_ranks(rank, world_size=ranks) if ranks > 1 else [rank()]
    assert results == [(-2.0, 512.0, 2, 2, 1, [True, False, True])] * ranks


def test_scaler_state_is_saved_and_goes_on() -> None:
    """Case B53: after 3 good steps the tracker is 3; one more step grows the scale to 2048."""

    def fit(steps: int, **settings: Any) -> dict[str, Any]:
        plugin = mt.AMPPlugin("fp16", init_scale=1024, growth_interval=4)
        trainer = quiet(precision=plugin, max_steps=steps)
        trainer.fit(Lin(), loader([1.0] * 8), **settings)
        saved: dict[str, Any] = plugin.state_dict()["scaler"]
        return saved

    class Save(mt.Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint("a.ckpt")

    plugin = mt.AMPPlugin("fp16", init_scale=1024, growth_interval=4)
    quiet(precision=plugin, max_steps=3, callbacks=[Save()]).fit(Lin(), loader([1.0] * 8))
    saved = torch.load("a.ckpt", weights_only=True)["precision"]["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (1024.0, 3)
    resumed = fit(4, ckpt_path="a.ckpt")
    assert (resumed["scale"], resumed["_growth_tracker"]) == (2048.0, 0)
    quiet(max_steps=3, callbacks=[Save()]).fit(Lin(), loader([1.0] * 8))
    with pytest.raises(CheckpointMismatchError, match="fp32"):
        fit(4, ckpt_path="a.ckpt")


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_forward_runs_in_the_lower_precision(precision: Any, dtype: torch.dtype) -> None:
    seen: dict[str, torch.dtype] = {}

    class Linear(mt.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.layer(batch)
            seen["train"] = output.dtype
            return output.float().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen["validation"] = self.layer(batch).dtype

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = [torch.ones(2, 2)]
    module = Linear()
    quiet(precision=precision).fit(module, data, data)
    assert seen == {"train": dtype, "validation": dtype}
    assert module.layer.weight.dtype == torch.float32


def test_clipping_sees_true_gradients_in_fp16() -> None:
    module = Lin()
    quiet(precision=mt.AMPPlugin("fp16"), gradient_clip_norm=1.0).fit(module, loader([3.0]))
    assert module.w.item() == pytest.approx(-1.0, abs=1e-5)


def test_refuses_unknown_precision_and_a_scale_that_never_shrinks() -> None:
    with pytest.raises(PrecisionError, match="fp32, bf16, fp16"):
        quiet(precision="fp8")
    with pytest.raises(PrecisionError, match="backoff_factor"):
        mt.AMPPlugin("fp16", backoff_factor=1.0)
