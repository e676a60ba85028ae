"""`doctor --script` on whole scripts: guides' kinds and careful ones."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from minitrainer import pitfalls
from minitrainer.doctor import checks, codes
from minitrainer.doctor.script import CHECKS, examine, examine_file

SCRIPTS = Path(__file__).parent / "scripts"
WRONG = {
    "beginner": {
        (15, codes.LOCAL_RANK_ARGUMENT, "error"),
        (18, codes.EVERY_RANK_ON_GPU_0, "warning"),
        (18, codes.GROUP_LEFT_OPEN, "warning"),
        (30, codes.KEPT_GRAPH, "warning"),
        (45, codes.NO_MAP_LOCATION, "warning"),
        (47, codes.LATE_SYNC_BATCH_NORM, "warning"),
        (49, codes.DIVISIBLE_LENGTH, "warning"),
        (50, codes.SAME_ORDER_EVERY_EPOCH, "error"),
        (50, codes.SHUFFLE_AND_SAMPLER, "error"),
        (51, codes.PADDED_VALIDATION, "warning"),
        (57, codes.LONELY_COLLECTIVE, "error"),
        (59, codes.SAVING_ON_EVERY_RANK, "error"),
        (59, codes.MODULE_PREFIX, "warning"),
    },
    "tuned": {
        (14, codes.VARIABLE, "warning"),
        (15, codes.VARIABLE, "warning"),
        (16, codes.VARIABLE, "note"),
        (22, codes.DEPRECATED_AMP, "warning"),
        (24, codes.NO_SYNC_MISSING, "warning"),
        (24, codes.UNDIVIDED_LOSS, "error"),
        (25, codes.CLIP_BEFORE_UNSCALE, "error"),
        (26, codes.SCALER_NOT_UPDATED, "error"),
        (33, codes.EVERY_RANK_ON_GPU_0, "error"),
        (33, codes.GROUP_LEFT_OPEN, "warning"),
        (37, codes.SAME_ORDER_EVERY_EPOCH, "error"),
        (41, codes.DEPRECATED_AMP, "warning"),
        (46, codes.DOUBLE_STEP, "error"),
        (48, codes.EMPTIED_CACHE, "warning"),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_pitfall_of_a_guides_script_is_named_with_its_line(name: str) -> None:
    """Rows A8-A10, A5, B5-B8, B14, B15, B18, B21, B22, B24, B30-B32, B34 and C4."""
    found = examine(name, (SCRIPTS / f"{name}.py.txt").read_text())
    seen = [(int(f.place.removeprefix(f"{name}:")), f.code, f.severity) for f in found]
    assert len(seen) == len(set(seen))
    assert set(seen) == WRONG[name]
    assert [line for line, _, _ in seen] == sorted(line for line, _, _ in seen)


def test_careful_scripts_give_no_finding(repository: Path) -> None:
    careful = [path for path in SCRIPTS.glob("*.py.txt") if path.name.split(".")[0] not in WRONG]
    benchmarks = list((repository / "benchmarks").glob("*.py"))
    assert len(careful) >= 4
    assert any(path.name == "handwritten_digits.py" for path in benchmarks)
    found = [finding for path in [*careful, *benchmarks] for finding in examine_file(path)]
    assert not found


def test_our_own_code_gives_no_finding(repository: Path) -> None:
    """None of it is a DDP script, and much of it looks like parts of one."""
    folders = ("minitrainer", "minitrainer/plugins", "minitrainer/data", "recipes")
    files = [path for folder in folders for path in (repository / folder).glob("*.py")]
    assert len(files) > 40
    assert not [finding for path in files for finding in examine_file(path)]


def test_every_check_is_registered_and_finds_something() -> None:
    modules = [m for m in vars(checks).values() if inspect.ismodule(m)]
    written = {
        function
        for module in modules
        for name, function in vars(module).items()
        if inspect.isgeneratorfunction(function) and not name.startswith("_")
    }
    assert written == set(CHECKS)


def test_codes_are_those_of_the_catalogue() -> None:
    used = {name: code for name, code in vars(codes).items() if name.isupper()}
    assert len(used) > 20
    assert not {name: code for name, code in used.items() if pitfalls.find(code) is None}


def test_scripts_are_python() -> None:
    for path in SCRIPTS.glob("*.py.txt"):
        ast.parse(path.read_text())
