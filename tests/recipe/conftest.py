"""A folder with a recipe and the user's file beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minitrainer.recipe.load import Recipe, load_recipe

RECIPE = """
module: {_target_: models.Net, width: 3}
data: {_target_: models.Data}
"""

MODELS = """
from __future__ import annotations

import enum
import os
import subprocess
from os import system
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import minitrainer as mt
import torch
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from nowhere import Something

BUILT = []


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Net(mt.Module):
    def __init__(
        self,
        width: int,
        lr: float = 0.1,
        *,
        activation: Literal["relu", "gelu"] = "relu",
        betas: tuple[float, float] = (0.9, 0.9),
        sizes: list[int] | None = None,
        table: dict[str, int] | None = None,
        root: Path | None = None,
        color: Color = Color.RED,
        inner: torch.nn.Module | None = None,
        name: str = "",
        bias: bool = True,
        implicit: int = None,
        unknown: Something | None = None,
        free=None,
    ):
        super().__init__()
        self.given = dict(locals())
        self.linear = torch.nn.Linear(4, 1)
        BUILT.append("Net")
        if lr > 100:
            raise ValueError("lr is\\ntoo large")

    def training_step(self, batch, batch_idx):
        return self.linear(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loose(Net):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class HalfNet(mt.Module):
    def training_step(self, batch, batch_idx): ...


class PlainNet(torch.nn.Module):
    pass


class Data(mt.DataModule):
    def __init__(self, batch_size: int = 2):
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=self.batch_size)


class Pair(mt.Callback):
    def __init__(self, first=None, second=None):
        BUILT.append(("Pair", first, second))


class HalfStrategy:
    def setup(self, module, device): ...


class NullLogger:
    def start(self, run_dir, *, resume_step): ...
    def log_metrics(self, metrics, step): ...
    def log_hyperparameters(self, values): ...
    def finish(self): ...


def make_linear(size: int) -> torch.nn.Linear:
    return torch.nn.Linear(size, size)


def make_callback() -> Pair:
    return Pair("from a function")


def make_anything(size: int = 1):
    return size
"""


@pytest.fixture(autouse=True)
def _leave_no_modules_behind() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] not in ("minitrainer", "torch", "torchvision"):
            del sys.modules[name]


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Return a function that writes a recipe with `models.py` beside it, and loads it."""
    (tmp_path / "models.py").write_text(MODELS)

    def load(*overrides: str, text: str = RECIPE, more: str = "") -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text + more)
        return load_recipe(path, overrides)

    return load
