"""The golden test of promise 2: a run that is cut at any window border ends as the whole one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import minitrainer as mt
from tests.ranks import run_ranks
from tests.toys import Values, quiet

SIZE = 52
EPOCHS = 3
# 4 samples a batch, 2 ranks, 2 batches a window: 4 windows an epoch, the last one of 4 samples.
BORDERS = 4 * EPOCHS


class Augmented(Values):
    """Item i is (i, i and noise of torch, numpy and random)."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(()).item() + np.random.randn() + random.gauss(0, 1)
        return torch.stack([self.values[index], self.values[index] / SIZE + 0.1 * noise])


class Net(mt.Module):
    """Everything at once: dropout, momentum, a schedule by steps, metrics by step and epoch."""

    def __init__(self, norm: type[torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 8), norm(8), torch.nn.Dropout(0.3))
        self.last = torch.nn.Linear(8, 1)
        self.seen: list[tuple[int, int, int, list[int]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        numbers = [int(number) for number in batch[:, 0]]
        self.seen.append((self.current_epoch, batch_idx, self.global_step, numbers))
        loss = (self.last(self.net(batch[:, 1:])) - batch[:, 1:].sin()).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", batch[:, 1].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.last(self.net(batch[:, 1:])).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAll(mt.Callback):
    """Saves at each window border, as STEP.ckpt."""

    def on_save_point(self, trainer: Any, module: Any, point: Any) -> None:
        trainer.save_checkpoint(f"saved/{trainer.global_step}.ckpt")


def data(batch_size: int = 4, workers: int = 2) -> DataLoader[Any]:
    return DataLoader(
        Augmented(range(SIZE)), batch_size=batch_size, shuffle=True, num_workers=workers
    )


def fit(name: str, *callbacks: mt.Callback, batch_size: int = 4, **settings: Any) -> Net:
    # On other layouts a batch may have one sample, which batch norm refuses.
    module = Net(settings.pop("norm", torch.nn.BatchNorm1d))
    trainer = quiet(
        max_epochs=EPOCHS,
        accumulate=2,
        log_every_n_steps=1,
        val_check_interval=2,
        gradient_clip_norm=1.0,
        loggers=[mt.CSVLogger()],
        callbacks=[mt.LearningRateMonitor(), *callbacks],
        run_dir=name,
    )
    trainer.fit(module, data(batch_size), data(batch_size, workers=0), **settings)
    return module


def test_a_run_cut_at_every_window_border_ends_as_the_whole_one() -> None:
    """Weights bit by bit, samples, learning rates and rows of metrics.csv."""

    def whole() -> tuple[list[Any], dict[str, torch.Tensor]]:
        module = fit("whole")
        fit("saving", SaveAll())
        return module.seen, module.state_dict()

    def resumed(step: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
        path = Path(f"resumed-{step}")
        if mt.Trainer(accelerator="cpu").is_global_zero:
            # What a run killed right behind the save has left, and rows that it wrote later.
            path.mkdir()
            (path / "metrics.csv").write_bytes(rows)
        module = fit(path.name, ckpt_path=f"saved/{step}.ckpt")
        return module.seen, module.state_dict()

    expected = run_ranks(whole, world_size=2, timeout=120)
    rows = Path("whole/metrics.csv").read_bytes()
    assert Path("saving/metrics.csv").read_bytes() == rows
    assert len(rows.splitlines()) == 1 + BORDERS
    for step in range(1, BORDERS):
        results = run_ranks(lambda: resumed(step), world_size=2, timeout=120)  # noqa: B023
        for (seen, weights), (all_seen, all_weights) in zip(results, expected, strict=True):
            assert seen == [entry for entry in all_seen if entry[2] >= step], step
            assert weights.keys() == all_weights.keys()
            for name, weight in weights.items():
                assert torch.equal(weight, all_weights[name]), (step, name)
        assert Path(f"resumed-{step}/metrics.csv").read_bytes() == rows, step


def test_a_run_resumed_on_other_ranks_sees_every_sample_once() -> None:
    """Cut in the second epoch; on 1, 2 and 4 ranks, in batches of another size too."""

    def seen_by(name: str, batch_size: int = 4, **settings: Any) -> list[tuple[int, list[int]]]:
        module = fit(
            name,
            *settings.pop("callbacks", ()),
            batch_size=batch_size,
            norm=torch.nn.LayerNorm,
            **settings,
        )
        return [(epoch, numbers) for epoch, _, _, numbers in module.seen]

    before = run_ranks(lambda: seen_by("first", callbacks=[SaveAll(), StopAt(6)]), world_size=2)
    for ranks in (1, 2, 4):
        for batch_size in (4, 5):

            def go_on(ranks: int = ranks, batch_size: int = batch_size) -> list[Any]:
                name = f"then-{ranks}-{batch_size}"
                return seen_by(name, batch_size, ckpt_path="saved/6.ckpt")

            after = run_ranks(go_on, world_size=ranks) if ranks > 1 else [go_on()]
            for epoch in range(EPOCHS):
                of_first = [
                    n for part in before for e, numbers in part for n in numbers if e == epoch
                ]
                of_rest = [
                    n for part in after for e, numbers in part for n in numbers if e == epoch
                ]
                assert sorted(of_first + of_rest) == list(range(SIZE)), (ranks, batch_size, epoch)


class StopAt(mt.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Any, module: Any, result: Any) -> None:
        # One step early: the wish travels with the next window.
        trainer.should_stop = trainer.global_step >= self.step - 1
