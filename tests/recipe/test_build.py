"""A recipe to objects."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minitrainer.errors import RecipeError, SettingError
from minitrainer.recipe.build import build
from minitrainer.recipe.load import Recipe

Load = Callable[..., Recipe]


def test_objects_and_the_resolved_recipe(recipe: Load) -> None:
    loaded = recipe("data.batch_size=${vars.size}", "vars.size=4", "trainer.max_epochs=3")
    built = build(loaded)
    assert type(built.module).__name__ == "Net"
    assert built.module.given["width"] == 3  # type: ignore[index]
    assert built.datamodule.batch_size == 4  # type: ignore[attr-defined]
    assert built.trainer.max_epochs == 3
    assert built.trainer.recipe == loaded.config
    assert loaded.config["data"] == {"_target_": "models.Data", "batch_size": 4}


def test_arguments_are_built_before_what_they_are_for(recipe: Load) -> None:
    inner = "{_target_: models.Pair, first: 1}"
    build(
        recipe(
            f"trainer.callbacks=[{{_target_: models.Pair, first: {inner}, second: [{inner}]}}]",
            "module.inner={_target_: models.make_linear, size: 2}",
            "module.betas=[0, 1]",
        )
    )
    first, second, outer, net = sys.modules["models"].BUILT
    assert first == second == ("Pair", 1, None)
    assert type(outer[1]).__name__ == type(outer[2][0]).__name__ == "Pair"
    assert net == "Net", "the trainer is built before the module: its mistakes cost no time"


def test_weights_follow_from_the_seed(recipe: Load) -> None:
    weights = [
        build(recipe(f"trainer.seed={seed}")).module.linear.weight.clone()  # type: ignore[operator,union-attr]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_constructor_that_raises_is_one_line(recipe: Load) -> None:
    with pytest.raises(RecipeError) as caught:
        build(recipe("module.lr=1000"))
    (problem,) = caught.value.problems
    assert re.fullmatch(
        r"module: models\.Net raised ValueError: lr is too large \(models\.py:\d+\)\.", problem
    )
    line = int(problem.split(":")[-1].rstrip(")."))
    assert "raise ValueError" in Path("models.py").read_text().splitlines()[line - 1]


def test_a_setting_that_makes_no_sense_keeps_its_own_words(recipe: Load) -> None:
    with pytest.raises(SettingError, match="max_epochs=-1"):
        build(recipe("trainer.max_epochs=-1"))
    assert sys.modules["models"].BUILT == []


def test_the_run_directory_starts_where_the_user_is(recipe: Load, tmp_path: Path) -> None:
    """Case B5: user code that changes the working directory does not move it."""
    loaded = recipe("trainer.limit_train_batches=1", "trainer.enable_progress_bar=false")
    models = tmp_path / "models.py"
    models.write_text(models.read_text().replace("BUILT = []", "BUILT = []\nos.chdir('/')"))
    for override, expected in (
        ("trainer.seed=0", r"runs/recipe-\d{8}-\d{6}"),
        ("trainer.run_dir=here", "here"),
        (f"trainer.run_dir={tmp_path}/there", "there"),
    ):
        os.chdir(tmp_path)
        sys.modules.pop("models", None)
        loaded = recipe(override, "trainer.limit_train_batches=1")
        built = build(loaded)
        built.trainer.fit(built.module, datamodule=built.datamodule)
        assert built.trainer.run_dir is not None
        assert re.fullmatch(expected, str(built.trainer.run_dir.relative_to(tmp_path)))
        assert (built.trainer.run_dir / "recipe.yaml").exists()
