"""From `fit` to the user's step, and to the optimizer's, it is five frames in two files at most.

    python -m pytest tests/architecture/test_way_of_a_batch.py -s

prints both ways.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import minitrainer as mt
from tests.ranks import run_ranks

MAX_FRAMES, MAX_FILES = 5, 2
PACKAGE = Path(mt.__file__).parent


class Traced(mt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.ways: dict[str, list[str]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ways["training_step"] = _way_from_fit()
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return TracedSGD(self.parameters(), self.ways)


class TracedSGD(torch.optim.SGD):
    def __init__(self, parameters: Any, ways: dict[str, list[str]]) -> None:
        super().__init__(parameters, lr=0.1)
        self.ways = ways

    def step(self, closure: Any = None) -> None:
        self.ways["optimizer.step"] = _way_from_fit()
        super().step(closure)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_way_of_one_batch_is_short(world_size: int) -> None:
    (ways, *others) = run_ranks(_fit, world_size)
    assert all(other == ways for other in others)
    assert set(ways) == {"training_step", "optimizer.step"}
    for end, way in ways.items():
        print(f"\n{world_size} rank(s): {' > '.join(way)} > {end}")
        files = {frame.partition(":")[0] for frame in way}
        assert len(way) <= MAX_FRAMES, way
        assert len(files) <= MAX_FILES, way


def _fit() -> dict[str, list[str]]:
    module = Traced()
    mt.Trainer(
        accelerator="cpu",
        max_steps=2,
        loggers=[],
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(module, DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2))
    return module.ways


def _way_from_fit() -> list[str]:
    """Return our frames on the stack, from `Trainer.fit` on, as `file:function`."""
    ours = [
        f"{Path(frame.filename).relative_to(PACKAGE).as_posix()}:{frame.name}"
        for frame in traceback.extract_stack()
        if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    return ours[ours.index("trainer.py:fit") :]
