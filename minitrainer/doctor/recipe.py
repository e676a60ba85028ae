"""The examination of a recipe on its real ranks: what they build, are dealt, draw and wait for.

Every rank builds the recipe itself, as under torchrun, so that what depends on the rank shows. It
is then run for a few steps without callbacks, and nothing is written.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minitrainer import dist
from minitrainer.callbacks import ModelCheckpoint
from minitrainer.doctor import recipe_codes as codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.models import compare_models, small_batch_norm
from minitrainer.doctor.shares import Shares, opened
from minitrainer.doctor.trial import Probe, reduction_seconds
from minitrainer.launch import (
    Environment,
    check_devices,
    pick_device,
    run_on_local_ranks,
    set_threads,
)
from minitrainer.recipe.build import build
from minitrainer.recipe.check import Plan, check_recipe
from minitrainer.recipe.load import Recipe
from minitrainer.recipe.planned import Planned

_PREVENTS_STEPS = (codes.OTHER_MODELS,)
_STEPS = 4
_VALIDATION_BATCHES = 2
_TIMEOUT = 600.0
_MUCH_WAITING = 0.3
_MOST_REDUCED = 2**28
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is to say of a recipe: rows of a label and a value, and what is wrong."""

    rows: list[tuple[str, str]]
    findings: list[Finding]


def examine(recipe: Recipe, ranks: int | None) -> Iterator[Answer]:
    """Start the ranks of a recipe and yield what they are, and then what a few steps show.

    In two parts, so that the first one is known when the steps fail.

    Args:
        recipe: As loaded.
        ranks: Local ranks on CPUs to start instead of those that the recipe asks for.

    Raises:
        RecipeError: The recipe has problems, or a constructor raised.
        MinitrainerError: What a rank raised while it took its first steps.
    """
    if ranks is not None:
        recipe = _changed(recipe, {"accelerator": "cpu", "devices": ranks})
    plan = check_recipe(recipe)
    environment = Environment.detect()
    accelerator, devices = plan.trainer.get("accelerator", "auto"), plan.trainer.get("devices")
    number = check_devices(accelerator, devices, environment)
    starts_ranks = environment.launcher == "none" and number > 1
    for part in (_Objects, _Steps):

        def look(part: type[_Part] = part) -> list[Any]:
            return part(recipe, plan).run()

        rows, found = run_on_local_ranks(look, number) if starts_ranks else look()
        findings = sorted((Finding(*entry) for entry in found), key=_severity)
        yield Answer([(label, value) for label, value in rows], findings)
        if any(finding.code in _PREVENTS_STEPS for finding in findings):
            return


class _Part(ABC):
    """What one rank does; all of them do it together.

    Args:
        recipe: The user's recipe.
        plan: The same, checked.
    """

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._recipe = recipe
        self._settings = plan.trainer
        self._environment = Environment.detect()
        self._rows: list[tuple[str, str]] = []

    def run(self) -> list[Any]:
        """Return rows and findings as plain values, which local ranks can hand over."""
        place = self._environment
        set_threads(place)
        device = pick_device(self._settings.get("accelerator", "auto"), place)
        with (
            _undisturbed(),
            place.export(),
            dist.process_group(device, num_ranks=place.world_size, timeout=_TIMEOUT),
        ):
            findings = [dataclasses.astuple(finding) for finding in self._look(device)]
        return [self._rows, findings]

    @abstractmethod
    def _look(self, device: torch.device) -> Iterator[Finding]:
        """Yield what is wrong, and note rows."""


class _Objects(_Part):
    """The module and the data, before any step."""

    def _look(self, device: torch.device) -> Iterator[Finding]:
        place, seed = self._environment, self._settings.get("seed", 0)
        started = "" if place.launcher == "none" else f", started by {place.launcher}"
        self._rows.append(("ranks", f"{place.world_size} on {device.type}{started}"))
        built = build(self._recipe)
        yield from compare_models(built.module)
        with opened(built.datamodule, seed) as loaders:
            shares = Shares(loaders, place, seed)
            yield from shares.examine()
        self._rows += shares.rows
        if not self._settings.get("sync_batchnorm"):
            yield from small_batch_norm(built.module, shares.batch_size)


class _Steps(_Part):
    """A few steps."""

    def _look(self, device: torch.device) -> Iterator[Finding]:
        probe = self._take_steps()
        yield from self._loss(probe)
        yield from _same_draws(probe)
        yield from self._waiting(probe)
        self._reduction(probe, device)
        yield from self._room(probe)

    def _take_steps(self) -> Probe:
        """Train for a few steps, as the recipe says but for what writes and what observes."""
        limit = self._settings.get("limit_val_batches")
        if not isinstance(limit, int) or limit > _VALIDATION_BATCHES:
            limit = _VALIDATION_BATCHES
        probe = {"_target_": f"{Probe.__module__}.{Probe.__qualname__}", "steps": _STEPS}
        changes = {
            "min_epochs": 0,
            "limit_val_batches": limit,
            "run_dir": None,
            "callbacks": [probe],
            "loggers": [],
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "dry_run": False,
        }
        built = build(_changed(self._recipe, changes))
        built.trainer.fit(built.module, datamodule=built.datamodule)
        return next(c for c in built.trainer.callbacks if isinstance(c, Probe))

    def _loss(self, probe: Probe) -> Iterator[Finding]:
        ratios = [ratio for ratio in dist.gather_objects(probe.loss_ratio) if ratio is not None]
        if ratios and all(1.9 < ratio < 2.1 for ratio in ratios):
            several = self._environment.world_size > 1
            yield Finding(
                codes.SUM_LOSS,
                "error" if several else "warning",
                "module",
                f"The loss of a batch is {ratios[0]:.3g} times the mean of its halves' losses: it "
                "is a sum over samples. Gradients are averaged over ranks and micro-batches, so "
                "they depend on how a batch is split.",
                "Return the mean loss of the batch.",
            )

    def _waiting(self, probe: Probe) -> Iterator[Finding]:
        slowest = max(
            dist.gather_objects([probe.waiting, probe.working, probe.timed]),
            key=lambda times: float(times[0]),
        )
        waiting, working, timed = slowest
        if not timed or not waiting + working:
            self._rows.append(("steps", "too few in an epoch to be timed"))
            return
        share = waiting / (waiting + working)
        milliseconds = 1e3 * (waiting + working) / timed
        self._rows.append(
            ("steps", f"{milliseconds:.3g} ms per batch, {share:.0%} waiting for data ({timed})")
        )
        if share > _MUCH_WAITING:
            yield Finding(
                codes.DATA_WAIT,
                "warning",
                "data",
                f"Of {milliseconds:.3g} ms per batch, {share:.0%} are spent waiting for the loader "
                f"({timed} batches timed).",
                "Raise num_workers as long as there are cores, or do less for each item.",
            )

    def _reduction(self, probe: Probe, device: torch.device) -> None:
        if self._environment.world_size == 1 or probe.needed is None:
            return
        size = min(probe.needed.gradients, _MOST_REDUCED)
        seconds = reduction_seconds(size, device)
        self._rows.append(
            (
                "all-reduce",
                f"{size / _MIB:.3g} MiB of gradients in {1e3 * seconds:.3g} ms, "
                f"{size / 1e6 / seconds:.3g} MB/s",
            )
        )

    # Room for checkpoints ----------------------------------------------------------------------

    def _room(self, probe: Probe) -> Iterator[Finding]:
        settings, needed = self._settings, probe.needed
        if needed is None or settings.get("dry_run"):
            return
        size = needed.parameters + needed.buffers + (needed.optimizer or 0)
        saving = [
            callback.arguments
            for callback in settings.get("callbacks") or ()
            if isinstance(callback, Planned) and callback.kind is ModelCheckpoint
        ]
        if not saving and settings.get("enable_checkpointing", True):
            saving = [{}]
        for arguments in saving:
            files = self._files(arguments, probe.total_steps)
            folder = Path(arguments.get("dirpath") or settings.get("run_dir") or "runs")
            free = shutil.disk_usage(_standing(folder)).free
            text = f"{_size(size)} each, up to {files} of them"
            self._rows.append(("checkpoints", f"{text}, {_size(free)} free in {folder}"))
            if size * files > free:
                yield Finding(
                    codes.NO_ROOM_FOR_CHECKPOINTS,
                    "error",
                    "trainer.callbacks",
                    f"Checkpoints take {text}, {_size(size * files)} in all; {folder} has "
                    f"{_size(free)} free.",
                    "Lower save_top_k of ModelCheckpoint, or choose another folder with run_dir.",
                )

    def _files(self, arguments: dict[str, Any], total_steps: int | None) -> int:
        """Return how many files there are at the most, the one that is being written included."""
        kept = arguments.get("save_top_k", 1)
        if kept == -1:
            steps, epochs = arguments.get("every_n_steps"), arguments.get("every_n_epochs")
            kept = (self._settings.get("max_epochs") or 1) // (epochs or 1)
            if steps is not None and total_steps is not None:
                kept = total_steps // steps
        return int(kept) + int(arguments.get("save_last", True)) + 1


def _severity(finding: Finding) -> int:
    return ("error", "warning", "note").index(finding.severity)


def _same_draws(probe: Probe) -> Iterator[Finding]:
    draws = [of_rank for of_rank in dist.gather_objects(probe.draws) if of_rank]
    same = [
        name
        for name in (draws[0] if draws else ())
        if len({of_rank[name] for of_rank in draws}) < len(draws)
    ]
    if same:
        yield Finding(
            codes.SAME_RANDOMNESS,
            "warning",
            "module",
            f"Ranks draw the same random numbers in their second step ({', '.join(same)}), "
            "although the trainer seeds each rank by itself: dropout and noise are the same on "
            "all of them.",
            "Do not seed in the module or the data; set trainer.seed.",
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back the ledger and the like; warnings are shown."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        with warnings.catch_warnings():
            # Workers for which there are no cores.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            yield
    finally:
        logging.disable(before)


def _changed(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    trainer = {**(recipe.config.get("trainer") or {}), **settings}
    return replace(recipe, config={**recipe.config, "trainer": trainer})


def _standing(folder: Path) -> Path:
    path = folder.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
