"""One directory per run, made once, by rank 0."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from minitrainer import dist
from minitrainer.errors import SettingError

CHECKPOINTS = "checkpoints"
RECIPE = "recipe.yaml"
_SIGNS_OF_A_RUN = (CHECKPOINTS, RECIPE, "metrics.csv")


def make_run_dir(wanted: Path | None, default: Path, resumed_from: Path | None) -> Path:
    """Make the directory of this run and return its absolute path, the same on all ranks.

    A directory that holds another run is left alone: the new run gets the next free name. A run
    resumed from `DIR/checkpoints/x.ckpt` goes on in DIR, unless another directory is wanted.

    Args:
        wanted: The directory the user wants, absolute.
        default: Where a new directory goes otherwise; a time stamp is added to the name.
        resumed_from: The checkpoint that the run goes on from.

    Raises:
        SettingError: The directory cannot be made.
    """
    if dist.rank() == 0:
        try:
            answer = {"path": str(_make(wanted, default, resumed_from)), "error": ""}
        except OSError as error:
            answer = {"path": "", "error": f"{error.strerror}: {error.filename}"}
    else:
        answer = {}
    answer = dist.broadcast_object(answer)
    if answer["error"]:
        raise SettingError(
            f"The run directory cannot be made: {answer['error']}.",
            fix="Choose another one with run_dir.",
        )
    return Path(answer["path"])


def write_recipe(run_dir: Path, recipe: dict[str, Any]) -> None:
    """Write the recipe as resolved into the run directory."""
    from omegaconf import OmegaConf  # not needed by runs without a recipe

    OmegaConf.save(OmegaConf.create(recipe), run_dir / RECIPE)


def _make(wanted: Path | None, default: Path, resumed_from: Path | None) -> Path:
    if resumed_from is not None:
        parent = resumed_from.parent
        if wanted is None and parent.name == CHECKPOINTS:
            wanted = parent.parent
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            return wanted
    if wanted is None:
        wanted = default.with_name(f"{default.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    candidate, number = wanted, 0
    while True:
        candidate.parent.mkdir(parents=True, exist_ok=True)
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            if not candidate.is_dir():
                raise
            if candidate == wanted and not _holds_a_run(candidate) and number == 0:
                return candidate
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")


def _holds_a_run(folder: Path) -> bool:
    return any((folder / sign).exists() for sign in _SIGNS_OF_A_RUN)
