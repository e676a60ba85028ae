"""One directory per run, made once, by rank 0."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from minitrainer.agreed import on_rank_0
from minitrainer.errors import SettingError

CHECKPOINTS = "checkpoints"
RECIPE = "recipe.yaml"
_SIGNS_OF_A_RUN = (CHECKPOINTS, RECIPE, "metrics.csv")


def make_run_dir(
    wanted: Path | None, default: Path, resumed_from: Path | None, *, reuse: bool = False
) -> Path:
    """Make the directory of this run and return its absolute path, the same on all ranks.

    A directory that holds another run is left alone: the new run gets the next free name. A run
    resumed from `DIR/checkpoints/x.ckpt` goes on in DIR, unless another directory is wanted.

    Args:
        wanted: The directory the user wants, absolute.
        default: Where a new directory goes otherwise; a time stamp is added to the name.
        resumed_from: The checkpoint that the run goes on from.
        reuse: Take the directory that is wanted, whatever it holds: the run that began in it is
            the same one, and has not got as far as a checkpoint.

    Raises:
        SettingError: The directory cannot be made.
    """

    def make() -> str:
        try:
            return str(_make(wanted, default, resumed_from, reuse=reuse))
        except OSError as error:
            raise SettingError(
                f"The run directory cannot be made: {error.strerror}: {error.filename}.",
                fix="Choose another one with run_dir.",
            ) from error

    return Path(on_rank_0(make))


def write_recipe(run_dir: Path, recipe: dict[str, Any]) -> None:
    """Write the recipe as resolved into the run directory."""
    from omegaconf import OmegaConf  # not needed by runs without a recipe

    OmegaConf.save(OmegaConf.create(recipe), run_dir / RECIPE)


def _make(wanted: Path | None, default: Path, resumed_from: Path | None, *, reuse: bool) -> Path:
    if resumed_from is not None and wanted is None and resumed_from.parent.name == CHECKPOINTS:
        wanted = resumed_from.parent.parent
    if wanted is not None and (reuse or resumed_from is not None):
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
