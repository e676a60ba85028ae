"""`python -m minitrainer doctor recipe.yaml`: faults that are planted are found on real ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from minitrainer.cli import main

USER_FILE = """
import os
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

import minitrainer as mt

DRAWS = random.Random()  # nobody seeds this one


def rank():
    return int(os.environ.get("RANK", "0"))


class Net(mt.Module):
    def __init__(self, fault: str = "", norm: bool = False):
        super().__init__()
        self.fault = fault
        self.body = nn.Linear(6, 8 + (fault == "shape" and rank()))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(self.body.out_features, 1)
        self.register_buffer("offset", torch.zeros(1) + (fault == "buffer" and rank()))
        if fault == "unseeded":
            nn.init.constant_(self.head.bias, DRAWS.random() + rank())

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.fault == "fails":
            raise RuntimeError("no step")
        if self.fault == "seeds":
            torch.manual_seed(0)
        if self.fault == "whole" and len(x) < 4:
            raise ValueError("give me whole batches")
        losses = (self.head(self.dropout(self.norm(self.body(x)))).squeeze(1) - y) ** 2
        loss = losses.sum() if self.fault in ("sum", "weighted") else losses.mean()
        self.log("loss", loss)
        if self.fault == "weighted":
            return {"loss": loss / len(x), "weight": len(x)}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Items(Dataset):
    def __init__(self, number, fault=""):
        self.number, self.fault = number, fault

    def __len__(self):
        return self.number + (self.fault == "length" and rank())

    def __getitem__(self, index):
        if self.fault == "slow":
            time.sleep(0.01)
        x = torch.arange(6.0) / 6 + index % 5 + torch.rand(6)
        if self.fault == "rank":
            x = x + rank()
        if self.fault == "memory":
            x = x + DRAWS.random()
        return x, x.sum()


class ByName(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, name):
        return torch.full((6,), float(len(name))), torch.tensor(1.0)


class OfRank(Sampler):
    def __len__(self):
        return 32

    def __iter__(self):
        return iter(range(rank(), rank() + 32))


class Data(mt.DataModule):
    def __init__(self, fault: str = "", number: int = 64, workers: int = 0, drop: bool = False):
        self.fault, self.number, self.workers, self.drop = fault, number, workers, drop

    def train_dataloader(self):
        if self.fault == "names":
            return DataLoader(ByName(), 4, sampler=[f"item {at}" for at in range(16)])
        items = Items(self.number, self.fault)
        sampler = OfRank() if self.fault == "sampler" else None
        return DataLoader(items, 4, shuffle=sampler is None, sampler=sampler, drop_last=self.drop)

    def val_dataloader(self):
        items = Items(30)
        sampler = DistributedSampler(items) if self.fault == "padded" else None
        drop = self.fault == "dropped"
        return DataLoader(
            items, 4, sampler=sampler, drop_last=drop, num_workers=self.workers
        )
"""
RECIPE = """
module: {_target_: examined.Net}
data: {_target_: examined.Data}
trainer: {max_epochs: 3, accelerator: cpu}
"""


class Outcome(NamedTuple):
    """What the command answered."""

    exit_code: int
    lines: list[str]
    error: str

    def row(self, label: str) -> str:
        (line,) = (line for line in self.lines if line.startswith(f"{label} "))
        return line[16:]

    @property
    def of_recipe(self) -> list[str]:
        """The findings but for those of the machine and, a matter of its load, of the waiting."""
        places = "data|module|trainer.callbacks"
        found = [line for line in self.lines if re.match(rf"({places}): \[", line)]
        return [line for line in found if "waiting for the loader" not in line]


Doctor = Callable[..., Outcome]


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Doctor]:
    """Return a function that runs the command on the recipe, with these words behind it."""
    (tmp_path / "examined.py").write_text(USER_FILE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    path = list(sys.path)

    def run(*words: str, recipe: str = "recipe.yaml") -> Outcome:
        code = main(["doctor", recipe, *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err or "no step" in err
        return Outcome(code, out.splitlines(), err)

    yield run
    sys.path[:] = path
    for name in ("examined", "digits"):
        sys.modules.pop(name, None)


def test_a_recipe_without_fault_is_clean(doctor: Doctor) -> None:
    """On two ranks; what was measured stands behind the facts of the machine."""
    outcome = doctor("--ranks", "2")
    assert outcome.of_recipe == []
    assert outcome.exit_code == 0
    assert outcome.lines[0].startswith("versions ")
    assert outcome.row("ranks") == "2 on cpu, started by local"
    assert outcome.row("training") == "64 samples, 8 rounds of 2 x 4, 64/64 unique"
    assert outcome.row("validation") == "30 samples, 30/30 unique"
    assert re.match(r"[\d.e+]+ ms per batch, \d+% waiting for data \(\d\)", outcome.row("steps"))
    assert outcome.row("all-reduce").endswith(" MB/s")
    # 6 x 8 + 8 + 8 + 1 parameters and as many of momentum, and a buffer.
    assert outcome.row("checkpoints").startswith("524 B each, up to 3 of them, ")
    assert not Path("runs").exists(), "nothing is written"


@pytest.mark.parametrize("words", ["module.norm=true", "module.fault=whole", "data.fault=names"])
def test_on_one_rank_nothing_is_wrong(doctor: Doctor, words: str) -> None:
    """Also where the kind of the loss, or of the items, cannot be told."""
    outcome = doctor(*words.split())
    assert (outcome.exit_code, outcome.of_recipe) == (0, [])
    assert outcome.row("ranks") == "1 on cpu"
    assert not [line for line in outcome.lines if line.startswith("all-reduce")]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("module.fault=shape", r"module: [S01] error: Rank 0 builds body.weight (8, 6) float32"),
        ("module.fault=unseeded", r"module: [D27] warning: 1 of 4 parameters have other values"),
        ("module.fault=buffer", r"module: [S28] warning: 1 of 1 buffers have other values"),
        ("module.fault=seeds", r"module: [D27] warning: Ranks draw the same random numbers in"),
        ("module.fault=sum", r"module: [T31] error: The loss of a batch is 2 times the mean"),
        ("module.norm=true", r"module: [S30] warning: 1 batch norm layers (norm first) normalise"),
        ("data.fault=length", r"data: [D32] error: The training data have another length on"),
        ("data.fault=rank", r"data: [D32] error: Item 0 of the training data is another one on"),
        ("data.fault=memory", r"data: [D33] warning: The training dataset gives another item when"),
        ("data.fault=sampler", r"data: [D30] error: The 32 training samples that the ranks are"),
        ("data.fault=padded", r"data: [D20] warning: The validation loader has a Distributed"),
        ("data.fault=dropped", r"data: [D20] warning: The validation loader has drop_last=True: 2"),
        ("data.number=65", r"data: [S25] note: The last round of an epoch has 1 of 8 samples, and"),
        ("data.workers=64", r"data: [F23] warning: 64 loader workers on each of 2 local ranks are"),
    ],
)
def test_a_planted_fault_is_found(doctor: Doctor, word: str, said: str) -> None:
    outcome = doctor(word, "trainer.devices=2")
    assert len(outcome.of_recipe) >= 1
    assert outcome.of_recipe[0].startswith(said)
    severity = re.findall(r"\] (\w+):", said)[0]
    assert all(severity in line for line in outcome.of_recipe)
    assert outcome.exit_code == int(severity == "error")
    assert len(outcome.of_recipe) == 1 or word == "data.fault=length"


@pytest.mark.parametrize("word", ["module.fault=weighted", "trainer.sync_batchnorm=true"])
def test_what_looks_like_a_fault_and_is_none(doctor: Doctor, word: str) -> None:
    assert doctor(word, "module.norm=true", "data.number=32", "--ranks", "1").of_recipe == []
    found = doctor(word, "module.norm=true", "data.number=32", "--ranks", "2").of_recipe
    assert [line for line in found if "[S30]" not in line] == []
    assert bool(found) == (word == "module.fault=weighted")


def test_waiting_for_data(doctor: Doctor) -> None:
    outcome = doctor("data.fault=slow", "data.number=40")
    (line,) = (line for line in outcome.lines if "waiting for the loader" in line)
    assert line.startswith("data: [F23] warning: Of ")
    assert int(re.findall(r"(\d+)% are spent", line)[0]) > 50
    assert outcome.exit_code == 0


def test_checkpoints_that_do_not_fit(doctor: Doctor) -> None:
    Path("recipe.yaml").write_text(
        RECIPE.replace(
            "max_epochs: 3", "max_epochs: 3, callbacks: [{_target_: ModelCheckpoint}]"
        ).replace("_target_: ModelCheckpoint", "_target_: minitrainer.ModelCheckpoint")
    )
    assert doctor().of_recipe == []
    outcome = doctor("trainer.callbacks.0.save_top_k=1000000000000000")
    (line,) = outcome.of_recipe
    assert line.startswith("trainer.callbacks: [C04] error: Checkpoints take 524 B each, up to 1")
    assert outcome.exit_code == 1


def test_dropped_samples_are_noted(doctor: Doctor) -> None:
    outcome = doctor("data.drop=true", "data.number=65", "--ranks", "2")
    (line,) = outcome.of_recipe
    assert line.startswith("data: [D23] note: drop_last leaves 1 of 65 training samples out of")
    assert outcome.exit_code == 0


def test_what_is_known_before_the_steps_is_said_when_they_fail(doctor: Doctor) -> None:
    outcome = doctor("module.fault=fails", "data.number=65", "--ranks", "2")
    assert outcome.exit_code == 1
    assert "RuntimeError: no step" in outcome.error
    (line,) = outcome.of_recipe
    assert line.startswith("data: [S25] note:")


def test_the_digits_recipe_has_no_error(doctor: Doctor, repository: Path) -> None:
    outcome = doctor("--ranks", "2", recipe=str(repository / "recipes/digits.yaml"))
    assert outcome.exit_code == 0
    assert [line for line in outcome.of_recipe if " note: " not in line] == []
    assert outcome.row("training") == "1,500 samples, 12 rounds of 2 x 64, 1500/1500 unique"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("module.falt=sum", "[R02]"),
        ("trainer.devices=0", "[L02]"),
        ("--ranks 0", "[R03]"),
        ("--script train.py", "[R03] Both a recipe and a script were given."),
    ],
)
def test_a_recipe_with_mistakes_is_a_matter_of_usage(doctor: Doctor, words: str, code: str) -> None:
    outcome = doctor(*words.split())
    assert outcome.exit_code == 2
    assert outcome.error.startswith(f"minitrainer: error: {code}")


def test_ranks_want_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "2"]) == 2
    assert "[R03] --ranks was given without a recipe." in capsys.readouterr().err
