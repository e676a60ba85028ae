"""docs/doctor.md shows what the doctor really says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minitrainer.cli import main


def test_the_documented_answer_is_the_real_one(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (repository / "docs/doctor.md").read_text()
    script, answer = re.findall(r"```(?:python|text)\n(.*?)```", document, re.DOTALL)[:2]
    Path("train.py").write_text(script)
    assert main(["doctor", "--script", "train.py"]) == 1
    assert capsys.readouterr().out == answer
