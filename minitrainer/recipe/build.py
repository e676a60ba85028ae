"""A recipe to objects: the trainer, the module and its data."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitrainer.datamodule import DataModule
from minitrainer.errors import MinitrainerError, RecipeError
from minitrainer.module import Module
from minitrainer.recipe.check import check_recipe
from minitrainer.recipe.load import Recipe
from minitrainer.recipe.planned import Planned
from minitrainer.recipe.targets import location, one_line

if TYPE_CHECKING:
    from minitrainer.trainer import Trainer


@dataclass(frozen=True)
class Built:
    """What a recipe describes, ready for `trainer.fit(module, datamodule=datamodule)`."""

    trainer: Trainer
    module: Module
    datamodule: DataModule


def build(recipe: Recipe) -> Built:
    """Check a recipe and construct what it names, arguments before what they are for.

    The trainer comes first, because its mistakes cost no time; then all generators are seeded, so
    that every rank builds the same module; then the module and the data. Where the recipe names
    no run directory it is `runs/RECIPE-TIME` in the present working directory.

    Args:
        recipe: As loaded.

    Raises:
        RecipeError: The recipe has problems, or a constructor raised.
        UsageError: The settings make no sense to the Trainer or to a part of it.
    """
    from minitrainer.data import seed_everything
    from minitrainer.trainer import Trainer

    # Absolute before any user code runs, which may change the working directory (case B5).
    start = Path.cwd()
    plan = check_recipe(recipe)
    settings = _construct(plan.trainer, recipe.folder)
    if settings.get("run_dir") is not None:
        settings["run_dir"] = start / settings["run_dir"]
    trainer = Trainer(**settings)
    trainer.take_recipe(recipe.config, start / "runs" / recipe.path.stem)
    seed_everything(settings.get("seed", inspect.signature(Trainer).parameters["seed"].default))
    module = _construct(plan.module, recipe.folder)
    datamodule = _construct(plan.data, recipe.folder)
    return Built(trainer, module, datamodule)


def _construct(value: Any, folder: Path) -> Any:
    """Return the value with each planned object in it constructed, innermost first."""
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_construct(item, folder) for item in value)
    if isinstance(value, dict):
        return {key: _construct(item, folder) for key, item in value.items()}
    if not isinstance(value, Planned):
        return value
    arguments = _construct(value.arguments, folder)
    assert value.target is not None
    try:
        return value.target(**arguments)
    except MinitrainerError:
        raise  # it says by itself what is wrong
    except Exception as error:  # whatever the user's constructor raises
        raise RecipeError(
            f"{value.path}: {value.name} raised {one_line(error)} ({location(error, folder)})."
        ) from error
