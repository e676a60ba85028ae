"""The form in which all benchmarks give their results: one table, and a verdict."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Row:
    """One line: a figure, and how it compares with its reference, which was measured by turns.

    `ratio` is the median over the rounds of this run; `bound` is what it may be at most, None
    for a line that is there for comparison only.
    """

    what: str
    figure: str
    ratio: float | None = None
    bound: float | None = None

    @property
    def broken(self) -> bool:
        return self.bound is not None and (self.ratio is None or self.ratio > self.bound)


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the median of the ratios round by round: what slows a round slows both of it."""
    return median(value / reference for value, reference in zip(values, references, strict=True))


def show(title: str, unit: str, rows: Sequence[Row]) -> None:
    """Print the table."""
    width = max(len(row.what) for row in rows)
    print(f"\n{title}")
    print(f"{'':{width}}  {unit:>12}  {'ratio':>7}  {'bound':>6}")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        bound = "" if row.bound is None else f"{row.bound:.2f}"
        verdict = "" if row.bound is None else "  BROKEN" if row.broken else "  ok"
        print(f"{row.what:{width}}  {row.figure:>12}  {ratio:>7}  {bound:>6}{verdict}")


def show_machine() -> None:
    """Print what the figures were measured on."""
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)"
    )


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 when a bound is broken, else 0."""
    broken = [row.what for row in rows if row.broken]
    if broken:
        print(f"\nBROKEN: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0
