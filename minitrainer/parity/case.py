"""What a set of runs says, and what a difference between them is put down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minitrainer.parity.compare import Comparison
from minitrainer.parity.layouts import Layout
from minitrainer.parity.record import Record


class Cause(NamedTuple):
    """A pitfall, what was seen of it, and what to do.

    Attributes:
        code: Its code in the catalogue.
        what: What it is, where, with numbers.
        fix: What to do.
        harmless: Whether it is how things are, and no fault of the recipe.
    """

    code: str
    what: str
    fix: str
    harmless: bool = False


@dataclass(frozen=True)
class Case:
    """Records of all layouts, run with the same things switched off, and where they part.

    Attributes:
        records: By the key of the layout.
        comparisons: Of each other layout with the reference, by key.
    """

    records: Mapping[str, Record]
    comparisons: Mapping[str, Comparison]


def in_layouts(layouts: Sequence[Layout]) -> str:
    """Return "in (b) and (c)"."""
    return f"in {' and '.join(f'({layout.key})' for layout in layouts)}"
