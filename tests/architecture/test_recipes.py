"""Every recipe that ships loads and trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from minitrainer.cli import main

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_two_steps_and_writes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["fit", str(recipe), "trainer.dry_run=true", "trainer.accelerator=cpu"])
    assert code == 0, capsys.readouterr().err
    assert not list(tmp_path.iterdir())
