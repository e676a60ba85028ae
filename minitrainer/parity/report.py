"""A comparison of layouts from the recipe to the lines that the user reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minitrainer.parity.case import Cause
from minitrainer.parity.causes import Diagnosis
from minitrainer.parity.compare import Comparison, Parting, Tolerance, compare
from minitrainer.parity.record import Record
from minitrainer.parity.run import Facts, Runner
from minitrainer.recipe.load import Recipe

_ROWS = (
    ("samples", "samples"),
    ("first weights", "first"),
    ("loss", "loss"),
    ("gradients", "gradients"),
    ("learning rate", "learning_rates"),
    ("last weights", "weights"),
    ("buffers", "buffers"),
    ("step metrics", "training_metrics"),
    ("validation", "validation"),
)
_LONGEST_NAME = 32


@dataclass(frozen=True)
class Report:
    """What a comparison has found.

    Attributes:
        facts: What is known of the recipe.
        reference: The record that the others are compared with.
        comparisons: Of the other layouts with it, by key.
        causes: What differences are due to.
        tolerance: What was taken for rounding.
        notes: What the reader should know besides.
    """

    facts: Facts
    reference: Record
    comparisons: Mapping[str, Comparison]
    causes: list[Cause]
    tolerance: Tolerance
    notes: list[str]

    @property
    def parted(self) -> bool:
        """Whether layouts part for another reason than how things are."""
        if all(comparison.is_clean for comparison in self.comparisons.values()):
            return False
        return not self.causes or not all(cause.harmless for cause in self.causes)

    def lines(self) -> list[str]:
        """Return the table, the causes and the verdict."""
        layouts, facts = self.facts.layouts, self.facts
        key = layouts.reference.key
        described = [
            layout.describe(facts.batch_size) for layout in (layouts.reference, *layouts.others)
        ]
        cells = [["", *(f"({key}) vs ({other})" for other in self.comparisons)]]
        for title, name in _ROWS:
            if self._is_there(name):
                partings = [getattr(c, name) for c in self.comparisons.values()]
                cells.append([title, *map(self._cell, partings)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        return [
            "   ".join(described),
            f"{len(self.reference.windows)} steps, {self._samples()} samples; relative "
            f"differences up to {self.tolerance.relative:.0e} are rounding",
            *self.notes,
            "",
            *table,
            "",
            *(f"[{cause.code}] {cause.what}. {cause.fix}" for cause in self.causes),
            self._verdict(),
        ]

    def _is_there(self, name: str) -> bool:
        """Return whether the recipe has what a row is about."""
        there = {
            "buffers": self.reference.buffers,
            "training_metrics": any(window.metrics for window in self.reference.windows),
            "validation": self.reference.validation,
        }
        return bool(there.get(name, True))

    def _samples(self) -> str:
        return f"{sum(len(window.samples) for window in self.reference.windows):,}"

    def _cell(self, parting: Parting | None) -> str:
        if parting is None:
            return "same"
        step = "" if parting.step is None else f" from step {parting.step + 1}"
        name = parting.name
        if len(name) > _LONGEST_NAME:
            name = f"...{name[3 - _LONGEST_NAME :]}"
        many = f", {parting.count} of {parting.total}" if parting.total > 1 else ""
        return f"{parting.size:.1e}{step}{f' in {name}' if name else ''}{many}"

    def _verdict(self) -> str:
        if all(comparison.is_clean for comparison in self.comparisons.values()):
            return "no difference"
        if not self.parted:
            return "no difference between one process and the ranks"
        if not self.causes:
            return "different, and no cause was found"
        codes = list(dict.fromkeys(cause.code for cause in self.causes))
        return f"different: {', '.join(codes)} (minitrainer explain {codes[0]})"


def compare_layouts(recipe: Recipe, *, num_ranks: int, steps: int) -> Report:
    """Run a recipe for a few steps in three layouts of the same global batch, and compare them.

    (a) one process with the whole global batch as one micro-batch; (b) `num_ranks` local ranks;
    (c) one process that accumulates. All on the CPU, without autocast, and in float64 if the module
    allows it. Callbacks and loggers of the recipe are left out, and nothing is written.

    Args:
        recipe: The recipe as loaded; its batch size is that of a rank.
        num_ranks: Ranks of (b), at least 2.
        steps: Optimizer steps of each run.

    Raises:
        RecipeError: The recipe has problems.
        LoaderError: It has no training loader.
        MinitrainerError: A run failed; what it says is what `fit` would say.
    """
    runner = Runner(recipe, num_ranks, steps)
    layouts = runner.facts.layouts
    reference = runner.run_reference()
    records = {layouts.reference.key: reference}
    records |= {layout.key: runner.run(layout) for layout in layouts.others}
    in_double = runner.dtype == torch.float64 and reference.in_double
    tolerance = Tolerance.of(in_double=in_double)
    comparisons = {
        layout.key: compare(reference, records[layout.key], tolerance) for layout in layouts.others
    }
    causes: list[Cause] = []
    if not all(comparison.is_clean for comparison in comparisons.values()):
        causes = Diagnosis(runner, records, comparisons, tolerance).find()
    notes = []
    if runner.refusal is not None:
        notes.append(f"as float32, not float64, which hides small differences: {runner.refusal}")
    if layouts.whole is None:
        notes.append(
            "the batches of this loader cannot be joined, so there is no run (a) on whole batches"
        )
    return Report(runner.facts, reference, comparisons, causes, tolerance, notes)
