"""What every part of the doctor hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor has found.

    Args:
        code: The entry of the pitfall catalogue.
        severity: An error makes the run fail or its result wrong; a warning costs time, memory or
            accuracy, or will fail one day; a note is worth knowing.
        place: Where it was seen: "train.py:12", "environment" or the key path of a recipe.
        what: What was seen, with names and numbers; full sentences.
        fix: What to do about it; a full sentence.
    """

    code: str
    severity: Severity
    place: str
    what: str
    fix: str
