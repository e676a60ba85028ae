"""What a training step costs above the hand-written loop, and an import above torch's.

    python benchmarks/step_overhead.py

One run measures all contenders by turns, round after round, in one process; a ratio is the median
over the rounds. Every contender runs the same `Net.training_step`, which itself reads a clock at
the start of two batches, so that the figure is whole cycles of a step (fetch the batch, forward,
backward, optimizer, logging) and nothing of start-up or end. Optimizer and batches are made alike.
On one rank, and for imports, the clock counts processor time, which on an idle machine is the wall
time, and on a busy one leaves out what others take. Ranks also wait for each other: there it is
wall time, and needs two cores that nobody else uses.
Lightning takes part when it is installed (`pip install -e ".[bench]"`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Row, exit_code, median_ratio, show, show_machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minitrainer as mt
from minitrainer import dist
from minitrainer.launch import run_on_local_ranks

Batch = tuple[torch.Tensor, torch.Tensor]

WARM_UP = 100  # steps before the clock starts


Contender = Callable[[list[Batch]], float]


class Steps:
    """The model of all contenders: an MLP 16-32-4 that takes the time by itself."""

    clock = staticmethod(time.process_time)

    def make(self) -> None:
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.first, self.last = WARM_UP, 0
        self.logs = False
        self.start = self.end = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.first:
            self.start = self.clock()
        elif batch_idx == self.last:
            self.end = self.clock()
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        if self.logs:
            self.log("loss", loss)  # type: ignore[attr-defined]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers.parameters(), lr=0.01)

    def prepare(self, num_steps: int, *, logs: bool = False) -> None:
        gc.collect()
        self.last, self.logs = num_steps - 1, logs

    @property
    def microseconds(self) -> float:
        """Per step, between the two batches."""
        return (self.end - self.start) / (self.last - self.first) * 1e6


class Net(Steps, mt.Module):
    """For the hand-written loops and for minitrainer."""

    def __init__(self) -> None:
        mt.Module.__init__(self)
        self.make()


class Wrapped(nn.Module):
    """What hand-written DDP wraps: `forward` is the step, as in any DDP script."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.net.training_step(batch, batch_idx)


def handwritten(batches: list[Batch]) -> float:
    net = Net()
    net.prepare(len(batches))
    optimizer = net.configure_optimizers()
    for batch_idx, batch in enumerate(batches):
        loss = net.training_step(batch, batch_idx)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.microseconds


def handwritten_ddp(batches: list[Batch]) -> float:
    net = Net()
    net.prepare(len(batches))
    model = DistributedDataParallel(Wrapped(net), gradient_as_bucket_view=True)
    optimizer = net.configure_optimizers()
    for batch_idx, batch in enumerate(batches):
        loss = model(batch, batch_idx)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.microseconds


def with_minitrainer(batches: list[Batch], *, logs: bool = False, **settings: Any) -> float:
    net = Net()
    # A list of batches is dealt out over the ranks: each gets as many as the hand-written loop.
    world_size = dist.world_size()
    net.prepare(len(batches), logs=logs)
    bare = {"loggers": [], "enable_progress_bar": False, "enable_checkpointing": False}
    mt.Trainer(accelerator="cpu", max_epochs=1, **{**bare, **settings}).fit(
        net, [batch for batch in batches for _ in range(world_size)]
    )
    return net.microseconds


def with_lightning(batches: list[Batch], *, logs: bool = False, **settings: Any) -> float:
    import lightning

    class LightningNet(Steps, lightning.LightningModule):
        def __init__(self) -> None:
            lightning.LightningModule.__init__(self)
            self.make()

    net = LightningNet()
    net.prepare(len(batches), logs=logs)
    bare = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_model_summary=False,
        **{**bare, **settings},
    ).fit(net, OneLoader(batches))
    return net.microseconds


class OneLoader:
    """Lightning takes a plain list for a list of loaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def measure(contenders: dict[str, Contender], rounds: int, steps: int) -> dict[str, list[float]]:
    """Run all contenders by turns, forwards and backwards, and return their figures by round."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(16, 16, generator=generator), torch.randint(4, (16,), generator=generator))
        for _ in range(steps)
    ]
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        for name in order:
            figure = contenders[name](batches)
            if number > 0:  # the first round warms everything up
                figures[name].append(figure)
    return figures


def one_rank(rounds: int, steps: int, folder: Path) -> list[Row]:
    contenders: dict[str, Contender] = {
        "hand-written": handwritten,
        "minitrainer": with_minitrainer,
        "minitrainer, one self.log": lambda batches: with_minitrainer(
            batches, logs=True, loggers=[mt.CSVLogger()], run_dir=folder
        ),
        "minitrainer, all defaults": lambda batches: with_minitrainer(
            batches,
            logs=True,
            loggers=None,
            enable_progress_bar=True,
            enable_checkpointing=True,
            run_dir=folder,
        ),
    }
    if importlib.util.find_spec("lightning") is not None:
        from lightning.pytorch.loggers import CSVLogger

        contenders["lightning"] = with_lightning
        contenders["lightning, one self.log"] = lambda batches: with_lightning(
            batches, logs=True, logger=CSVLogger(folder)
        )
    figures = measure(contenders, rounds, steps)
    bounds = {"minitrainer": 1.10, "minitrainer, one self.log": 1.25}
    return _rows(figures, bounds)


def two_ranks(rounds: int, steps: int) -> list[Row]:
    contenders: dict[str, Contender] = {
        "hand-written DDP": handwritten_ddp,
        "minitrainer, 2 ranks": with_minitrainer,
    }

    def in_each_rank() -> dict[str, list[float]]:
        Steps.clock = staticmethod(time.perf_counter)
        # One process group for all rounds: it is the steps that are compared.
        with dist.process_group(torch.device("cpu"), num_ranks=2, timeout=60):
            # Ranks that wait for each other on busy cores scatter more than one alone.
            return measure(contenders, 3 * rounds, max(steps // 2, 2 * WARM_UP))

    return _rows(run_on_local_ranks(in_each_rank, 2), {"minitrainer, 2 ranks": 1.10})


def import_time(rounds: int, folder: Path) -> Row:
    """Compare whole processes by turns; `*` because names are imported when first asked for.

    With bytecode, as pip leaves an installed package, whatever the variables of this process say.
    """
    statements = ("import torch", "import torch; from minitrainer import *")
    seconds: dict[str, list[float]] = {statement: [] for statement in statements}
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in range(rounds + 1):
        for statement in statements if number % 2 else reversed(statements):
            before = _seconds_of_children()
            subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
            if number > 0:
                seconds[statement].append(_seconds_of_children() - before)
    plain, ours = (seconds[statement] for statement in statements)
    above = median(b - a for a, b in zip(plain, ours, strict=True))
    return Row("import minitrainer, above torch", f"{median(plain):.2f} s +", above, 0.10)


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _rows(figures: dict[str, list[float]], bounds: dict[str, float]) -> list[Row]:
    reference = next(iter(figures.values()))
    return [
        Row(name, f"{median(values):.0f}", median_ratio(values, reference), bounds.get(name))
        for name, values in figures.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The libraries' notices and bars go where they cost the same and disturb nobody.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    show_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.chdir(folder),
    ):
        single = one_rank(args.rounds, args.steps, Path(folder))
        show("One rank, MLP 16-32-4, batch 16, SGD", "us per step", single)
        double = two_ranks(args.rounds, args.steps)
        show("Two gloo ranks, the same batch on each", "us per step", double)
        imports = import_time(max(3, args.rounds // 2), Path(folder) / "bytecode")
        show("Import: seconds above `import torch`", "torch alone", [imports])
    return exit_code([*single, *double, imports])


if __name__ == "__main__":
    sys.exit(main())
