"""What users import does not change unnoticed."""

from __future__ import annotations

import difflib

import minitrainer
from tests.architecture.public_api import SNAPSHOT, describe


def test_public_names_are_sorted_and_there() -> None:
    assert list(minitrainer.__all__) == sorted(minitrainer.__all__)
    for name in minitrainer.__all__:
        assert getattr(minitrainer, name) is not None


def test_names_and_signatures_are_those_of_the_snapshot() -> None:
    difference = "\n".join(
        difflib.unified_diff(
            SNAPSHOT.read_text().splitlines(), describe().splitlines(), lineterm="", n=0
        )
    )
    assert not difference, f"see tests/architecture/public_api.py\n{difference}"
