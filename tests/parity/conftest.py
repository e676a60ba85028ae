"""A recipe in which one fault after the other can be planted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from minitrainer.cli import main

USER_FILE = '''
import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import minitrainer as mt

DRAWS = random.Random()  # nobody seeds this one


class Net(mt.Module):
    """A small classifier; `fault` names what is wrong with it, several with + between them."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.faults = fault.split("+")
        self.body = nn.Sequential(nn.Linear(6, 8))
        if "norm" in self.faults:
            self.body.append(nn.BatchNorm1d(8))
        self.body.append(nn.Tanh())
        if "dropout" in self.faults:
            self.body.append(nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.right, self.seen = 0, 0
        if "unseeded" in self.faults:
            nn.init.constant_(self.head.bias, DRAWS.random())

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if "noise" in self.faults:
            x = x + torch.randn_like(x)
        if "float32" in self.faults:
            x = x @ torch.eye(6, dtype=torch.float32)
        if "buffer" in self.faults:
            self.mean.lerp_(x.mean(0), 0.5)
        losses = F.cross_entropy(self(x), y, reduction="none")
        loss = losses.sum() if "sum" in self.faults else losses.mean()
        if "classes" in self.faults:  # a mean over the samples of class 0 only
            loss = losses[y == 0].sum() / (y == 0).sum().clamp(min=1)
        if "weighted" in self.faults:  # the same, done right
            number = int((y == 0).sum())
            return {"loss": losses[y == 0].sum() / max(number, 1), "weight": number}
        if "rank" in self.faults and self.global_rank == 1:
            loss = losses[: len(losses) // 2].mean()
        if "world" in self.faults:
            loss = loss * self.trainer.world_size
        if "step_metric" in self.faults:
            self.log("hits", float((self(x).argmax(1) == y).sum()))
        if "step_rank0" in self.faults:
            self.log("step_loss", loss, sync_dist=False)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        right = (self(x).argmax(1) == y).double()
        self.right, self.seen = self.right + float(right.sum()), self.seen + len(y)
        value = self.right / self.seen if "running" in self.faults else right.mean()
        self.log("val_acc", value, sync_dist="rank0" not in self.faults)

    def configure_optimizers(self):
        lr = 0.1 * (self.trainer.world_size if "lr" in self.faults else 1)
        return torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)


class ByHand(Net):
    """Steps its optimizer by itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Items(Dataset):
    def __init__(self, faults):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(45, 6, generator=generator)
        self.y = torch.randint(3, (45,), generator=generator)
        self.faults, self.asked = faults, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        self.asked += 1
        if "augment" in self.faults:
            x = x + 0.1 * torch.randn(6)
        if "rank_data" in self.faults:
            x = x + int(os.environ.get("RANK", "0"))
        if "own_numbers" in self.faults:
            x = x + DRAWS.random()
        if "stateful" in self.faults:
            x = x + self.asked // 4
        return x, self.y[index]


def collate_scaled(items):
    x, y = (torch.stack(part) for part in zip(*items))
    return x / x.abs().max(), y


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return (self.items[index] for index in range(len(self.items)))


class Data(mt.DataModule):
    def __init__(self, fault: str = "", drop_last: bool = False):
        self.faults, self.drop_last = fault.split("+"), drop_last

    def setup(self, stage):
        self.items, self.held_out = Items(self.faults), Items([])

    def train_dataloader(self):
        if "stream" in self.faults:
            return DataLoader(Stream(self.items), batch_size=4)
        if "batch_sampler" in self.faults:
            sampler = BatchSampler(RandomSampler(self.items), 4, drop_last=False)
            sampler.__class__ = type("Mine", (BatchSampler,), {})
            return DataLoader(self.items, batch_sampler=sampler)
        collate = collate_scaled if "collate" in self.faults else None
        return DataLoader(self.items, 4, shuffle=True, drop_last=self.drop_last, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=7)
'''
RECIPE = """
module: {_target_: planted.Net}
data: {_target_: planted.Data}
trainer: {max_epochs: 3}
"""


class Outcome(NamedTuple):
    """What the command answered."""

    exit_code: int
    lines: list[str]

    @property
    def codes(self) -> list[str]:
        """The codes of the causes."""
        return [line[1:4] for line in self.lines if line.startswith("[")]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def row(self, title: str) -> list[str]:
        """The cells of a row, split at two blanks."""
        (line,) = (line for line in self.lines if line.startswith(title))
        return [cell.strip() for cell in line[len(title) :].split("  ") if cell.strip()]


@pytest.fixture
def parity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Return a function that runs the command on the recipe, with these words behind it."""
    (tmp_path / "planted.py").write_text(USER_FILE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    path = list(sys.path)

    def run(*words: str, recipe: str = "recipe.yaml") -> Outcome:
        code = main(["parity", recipe, *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Outcome(code, (out + err).splitlines())

    yield run
    sys.path[:] = path
    for name in ("planted", "digits"):
        sys.modules.pop(name, None)
