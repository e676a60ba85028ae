"""The code that README.md shows is code that runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from minitrainer.cli import main


def test_the_module_and_the_recipe_run(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (repository / "README.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    for name in ("digits.py", "digits.npz"):
        shutil.copy(repository / "recipes" / name, tmp_path)
    (tmp_path / "linear.py").write_text(module)
    (tmp_path / "linear.yaml").write_text(recipe)
    code = main(["fit", "linear.yaml", "trainer.dry_run=true", "trainer.accelerator=cpu"])
    assert code == 0, capsys.readouterr().err


def test_it_shows_two_commands_that_set_up(repository: Path) -> None:
    # .ci/run reads them from there.
    readme = (repository / "README.md").read_text()
    commands = re.findall(r"^ +(pip install .*)$", readme, re.MULTILINE)
    assert [command.partition(" && ")[2] for command in commands] == [
        "python -m minitrainer fit recipes/digits.yaml",
        "python -m pytest",
    ]
