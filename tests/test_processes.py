"""Whole processes, as a user starts them: launchers, signals, output."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODULE = """
import os, time
import torch
import minitrainer as mt

class Net(mt.Module):
    def __init__(self, fail: bool = False, wait: float = 0.0):
        super().__init__()
        self.fail, self.wait = fail, wait
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1 and self.fail:
            raise ValueError("boom")
        if batch_idx == 0 and self.current_epoch == 0:
            open(f"rank-{self.global_rank}-{os.environ.get('LOCAL_RANK')}", "w").close()
        time.sleep(self.wait)
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Data(mt.DataModule):
    def __init__(self, size: int = 40, workers: int = 0):
        self.size, self.workers = size, workers

    def loader(self):
        data = torch.arange(self.size).float()[:, None] / self.size
        return torch.utils.data.DataLoader(data, num_workers=self.workers)

    train_dataloader = val_dataloader = loader
"""
RECIPE = """
module:
  _target_: net.Net
data:
  _target_: net.Data
trainer:
  max_epochs: 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    folder = tmp_path / "rel"
    folder.mkdir()
    (folder / "net.py").write_text(MODULE)
    (folder / "recipe.yaml").write_text(RECIPE)
    return "rel/recipe.yaml"


def start(*command: str, **settings: Any) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [sys.executable, *command],
        env={**environment, **settings.pop("env", {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,
    )


def finish(process: subprocess.Popen[str], seconds: float = 50) -> tuple[int, str, str]:
    """Wait for the end; nothing of its session may be left."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def left_over(recipe: str) -> list[str]:
    """Return the command lines of processes that still run the recipe of this test."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            here = os.readlink(entry / "cwd") == os.getcwd()
        except OSError:
            continue
        if here and recipe in line and int(entry.name) != os.getpid():
            found.append(line)
    return found


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


FIT = ("-m", "minitrainer", "fit")


def test_two_runs_at_once_one_directory_each(recipe: str) -> None:
    """Cases B1 and B5: no port in use, one run directory per run, the recipe written once."""
    command = (*FIT, recipe, "trainer.devices=2", "trainer.max_epochs=1")
    both = [start(*command), start(*command)]
    results = [finish(process) for process in both]
    assert [code for code, _, _ in results] == [0, 0], results
    runs = sorted(Path("runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert (run / "recipe.yaml").read_text().count("_target_: net.Net") == 1
        assert (run / "checkpoints" / "last.ckpt").is_file()
        with (run / "metrics.csv").open() as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        assert steps == [20]
    assert sorted(path.name for path in Path().glob("rank-*")) == ["rank-0-0", "rank-1-1"]


def test_change_of_folder_and_a_script_on_standard_input(recipe: str, tmp_path: Path) -> None:
    """Case B5: os.chdir before fit, and a script that no rank can find again."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = (
        "import os, sys; sys.path.insert(0, 'rel'); import net; import minitrainer as mt\n"
        "print('script starts')\n"
        "checkpoint = mt.ModelCheckpoint()\n"
        "trainer = mt.Trainer(devices=2, callbacks=[checkpoint], enable_progress_bar=False)\n"
        f"os.chdir({str(elsewhere)!r})\n"
        "trainer.fit(net.Net(), net.Data())\n"
        "print(trainer.run_dir, trainer.global_step, checkpoint.last_model_path)\n"
    )
    process = start("-", stdin=subprocess.PIPE)
    out, err = process.communicate(script, timeout=50)
    assert process.returncode == 0, err
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1
    assert out.splitlines() == [
        "script starts",
        f"{runs[0]} 20 {runs[0] / 'checkpoints' / 'last.ckpt'}",
    ]
    assert list((elsewhere / "runs").glob("*")) == []


@pytest.mark.parametrize(
    "launcher",
    [
        ("-m", "torch.distributed.launch", "--nproc_per_node=2", "-m"),
        ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m"),
    ],
)
def test_launchers_of_torch(launcher: tuple[str, ...], recipe: str) -> None:
    """Case B115: both launchers, and a --local_rank that somebody typed, are taken as they are."""
    typed = ("--local_rank", "0") if "torch.distributed.run" in launcher else ()
    code, _, err = finish(
        start(*launcher, "minitrainer", "fit", recipe, "trainer.max_epochs=1", *typed)
    )
    assert code == 0, err
    assert sorted(path.name for path in Path().glob("rank-*")) == ["rank-0-0", "rank-1-1"]
    assert "2 on cpu, started by torchrun" in err
    # The ranks that minitrainer starts by itself end with the same weights, bit by bit.
    code, _, err = finish(start(*FIT, recipe, "trainer.max_epochs=1", "trainer.devices=2"))
    assert code == 0, err
    first, second = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in Path("runs").iterdir()
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_failing_rank_ends_all_with_its_traceback_once(recipe: str) -> None:
    """Case B19: exit code 1 within 20 s, the rank named, "boom" once."""
    began = time.monotonic()
    code, out, err = finish(
        start(*FIT, recipe, "trainer.devices=2", "module.fail=true", "data.size=200")
    )
    assert code == 1
    assert time.monotonic() - began < 20
    assert (out + err).count("ValueError: boom") == 1
    assert (out + err).count("Traceback") == 1
    assert "Rank 1" in err
    assert not left_over(recipe)


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_finishes_the_step_saves_and_leaves(devices: int, recipe: str) -> None:
    """Case B97: SIGINT to the launcher only: exit code 130, a whole checkpoint, no process."""
    settings = ("module.wait=0.05", "data.size=2000", "data.workers=2")
    process = start(*FIT, recipe, f"trainer.devices={devices}", *settings)
    assert eventually(lambda: len(list(Path().glob("rank-*"))) == devices)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, 20)
    assert code == 130, err
    assert "Traceback" not in err
    (run,) = Path("runs").iterdir()
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert 0 < saved["counters"]["global_step"] < 1000
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    assert eventually(lambda: not left_over(recipe), 15)
    # And it goes on from there.
    code, _, err = finish(
        start(
            *FIT,
            recipe,
            "--resume",
            str(run / "checkpoints" / "last.ckpt"),
            "trainer.max_epochs=1",
            "trainer.limit_train_batches=1",
            f"trainer.devices={devices}",
        )
    )
    assert code == 0, err
    assert list(Path("runs").iterdir()) == [run]


def test_sigterm_and_three_interrupts(recipe: str) -> None:
    """Case B97, and preemption: exit code 143; three times Ctrl-C leaves nothing either."""
    settings = ("trainer.devices=2", "module.wait=0.05", "data.size=2000")
    process = start(*FIT, recipe, *settings)
    assert eventually(lambda: len(list(Path().glob("rank-*"))) == 2)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, 20)
    assert code == 143, err
    process = start(*FIT, recipe, *settings)
    for path in Path().glob("rank-*"):
        path.unlink()
    assert eventually(lambda: len(list(Path().glob("rank-*"))) == 2)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    code, _, err = finish(process, 15)
    assert code == 130, err
    assert "Traceback" not in err
    assert eventually(lambda: not left_over(recipe), 15)


def test_output_into_a_file(recipe: str) -> None:
    """Case B87: no carriage return, each line once, about 12 lines per epoch, TERM unset."""
    environment = {k: v for k, v in os.environ.items() if k != "TERM"}
    with open("log", "w") as log:
        process = subprocess.run(
            [sys.executable, *FIT, recipe, "trainer.devices=2", "data.size=200"],
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=50,
            check=False,
        )
    text = Path("log").read_text()
    assert process.returncode == 0, text
    assert "\r" not in text
    lines = text.splitlines()
    assert len(lines) == len(set(lines)), text
    for epoch in (0, 1):
        assert 1 <= len([line for line in lines if re.match(rf"Epoch {epoch}\b", line)]) <= 12
    assert "rank 1" not in text
