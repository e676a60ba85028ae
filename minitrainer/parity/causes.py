"""Why layouts part, as far as it can be told: by switching one thing off and looking again.

A rule of elimination does most of it. What splits a batch shows in (b) and in (c): batch norm, a
loss that is a sum. What only several ranks can do shows in (b) alone: data or code that look at
the rank, metrics that are not reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minitrainer.parity.adapt import Changes
from minitrainer.parity.case import Case, Cause, in_layouts
from minitrainer.parity.compare import (
    Comparison,
    Parting,
    Tolerance,
    compare,
    scale_between,
)
from minitrainer.parity.layouts import Layout
from minitrainer.parity.metric_causes import training_metric_causes, validation_causes
from minitrainer.parity.record import Record
from minitrainer.parity.run import Runner

_SEEDS = (1, 2)


class Diagnosis:
    """Find the causes of what three records show.

    Args:
        runner: Runs the recipe again with something switched off.
        records: Of the layouts, by key.
        comparisons: Of the other layouts with the reference, by key.
        tolerance: What is rounding.
    """

    def __init__(
        self,
        runner: Runner,
        records: Mapping[str, Record],
        comparisons: dict[str, Comparison],
        tolerance: Tolerance,
    ) -> None:
        self._runner = runner
        self._layouts = runner.facts.layouts
        self._tolerance = tolerance
        self._base = Case(records, comparisons)
        self.causes: list[Cause] = []

    def find(self) -> list[Cause]:
        """Return the causes, those of the data first, since all else may follow from them."""
        self._look_at_beginnings()
        self._look_at_learning_rates()
        comparable = [
            layout
            for layout in self._layouts.others
            if _steps_compare(self._base.comparisons[layout.key])
        ]
        rest: Case | None = self._base
        if any(_step_parts(self._base.comparisons[layout.key]) for layout in comparable):
            rest = self._without_layers(comparable)
        if rest is not None:
            self._look_at_steps(rest, comparable)
            shown = self._base.records[self._reference_key].validation
            self.causes += training_metric_causes(
                rest, self._reference_key, comparable, self._tolerance, besides=shown
            )
        self.causes += validation_causes(self._base, self._reference_key, self._tolerance)
        if rest is not None and [cause.code for cause in self.causes] == ["T32"]:
            random = self.causes[0]
            self.causes = [random._replace(what=f"{random.what}; without it they agree")]
        return self.causes

    # What is there before the first step -------------------------------------------------------

    def _look_at_beginnings(self) -> None:
        parted = self._where(self._base, "samples")
        if parted and self._runner.items_change():
            self._add(
                "D33",
                f"{in_layouts(parted)} the samples are others: the dataset gives another item when "
                "it is asked for the same one again, from random numbers of its own or what it "
                "keeps",
                "Draw from the global generators of torch, numpy or random, which the trainer "
                "seeds for each item; keep nothing between items.",
            )
        elif [layout.key for layout in parted] == ["b"]:
            share = self._base.comparisons["b"].samples
            assert share is not None
            self._add(
                "D32",
                f"in (b) {share.count} of {share.total} samples of step {_step_of(share) + 1} "
                "are others: the dataset, sampler or DataModule looks at the rank",
                "Leave the sharing to the trainer: no rank, RANK or world_size in data code.",
            )
        elif parted:
            self._add(
                "D33",
                f"{in_layouts(parted)} the samples are others: collate_fn makes them depend on the "
                "samples beside them",
                "Let it put samples together and no more; padding by other than zeros shows here "
                "too, and is harmless if the model masks it.",
            )
        parted = self._where(self._base, "first")
        if parted:
            first = self._base.comparisons[parted[0].key].first
            assert first is not None
            self._add(
                "D27",
                f"{in_layouts(parted)} the first weights are others ({first.name}), although the "
                "seed is the same: building the module draws from something that is not seeded",
                "Draw initial weights from torch's own generators only.",
            )

    def _look_at_learning_rates(self) -> None:
        for layout in self._where(self._base, "learning_rates"):
            comparison = self._base.comparisons[layout.key]
            rate, gradients = comparison.learning_rates, comparison.gradients
            assert rate is not None
            step = _step_of(rate)
            if gradients is not None and _step_of(gradients) < step:
                continue  # a scheduler that looks at a metric; it follows from the rest
            rates = [
                (self._base.records[key].windows[step].learning_rates or [float("nan")])[0]
                for key in (self._layouts.reference.key, layout.key)
            ]
            self._add(
                "R21",
                f"in ({layout.key}) the learning rate of step {step + 1} is {rates[1]:.4g} "
                f"instead of {rates[0]:.4g}, for the same global batch",
                "Set it for the global batch; do not compute it from ranks or loader lengths.",
            )

    # The step itself ---------------------------------------------------------------------------

    def _without_layers(self, comparable: Sequence[Layout]) -> Case | None:
        """Take out dropout and batch norm, naming them if it was them.

        Returns:
            The case without them; None if the step stays random, so that nothing can be told.
        """
        facts = self._runner.facts
        quiet = Changes()
        if self._is_random(quiet):
            quiet = Changes(no_dropout=bool(facts.dropouts))
            if not facts.dropouts or self._is_random(quiet):
                self._add_randomness([], more="; what else may part cannot be told from it")
                return None
            self._add_randomness(facts.dropouts)
        with_norm = self._base if quiet == Changes() else self._case(quiet)
        if not facts.batch_norms:
            return with_norm
        guilty = [layout for layout in comparable if self._is_norm(with_norm, layout)]
        if not guilty:
            return with_norm
        without = self._case(quiet._replace(no_batch_norm=True))
        if facts.synced_batch_norm:
            # Between ranks it is in step: what parts without it as well is not its doing.
            guilty = [layout for layout in guilty if not self._is_norm(without, layout)]
        if guilty:
            self._add_batch_norm(guilty)
        return without

    def _is_random(self, changes: Changes) -> bool:
        """Return whether the same step from other random streams comes out otherwise."""
        first, second = (
            self._runner.run(
                self._layouts.reference, changes=changes._replace(reseed=seed), steps=1
            )
            for seed in _SEEDS
        )
        comparison = compare(first, second, self._tolerance)
        return comparison.loss is not None or comparison.gradients is not None

    def _is_norm(self, case: Case, layout: Layout) -> bool:
        comparison = case.comparisons[layout.key]
        if comparison.gradients is not None:
            return self._scale(case, layout) is None
        norms = tuple(f"{name}." for name in self._runner.facts.batch_norms)
        return comparison.buffers is not None and comparison.buffers.name.startswith(norms)

    def _add_randomness(self, layers: Sequence[str], more: str = "") -> None:
        where = f"{_listed(layers)} drop out" if layers else "training_step draws random numbers"
        self._add(
            "T32",
            f"{where} at random: the same step from another seed has another gradient, so layouts "
            f"part by chance{more}",
            "Nothing, each layout is as right as another."
            if layers
            else "Switch it off to compare; the trainer gives every rank its own random numbers.",
        )

    def _add_batch_norm(self, guilty: Sequence[Layout]) -> None:
        facts = self._runner.facts
        layers = f"{len(facts.batch_norms)} batch norm layers ({_listed(facts.batch_norms)})"
        if facts.synced_batch_norm and [layout.key for layout in guilty] == ["c"]:
            self._add(
                "S30",
                f"in (c) {layers} normalise each micro-batch by itself; in (b) they are in step",
                "Nothing: this recipe shares batches over ranks. Accumulating is not the same.",
                harmless=True,
            )
            return
        fix = "Set trainer.sync_batchnorm=true, or use a norm that does not look at the batch."
        if facts.synced_batch_norm:
            fix = "sync_batchnorm joins ranks, not micro-batches: use accumulate=1 or another norm."
        elif self._runner.facts.window_size > 1:
            fix = f"{fix[:-1]}; micro-batches of an accumulated window stay apart all the same."
        self._add(
            "S30",
            f"{in_layouts(guilty)} {layers} normalise by their own share of the batch only",
            fix,
        )

    def _look_at_steps(self, case: Case, comparable: Sequence[Layout]) -> None:
        sums, others, buffers = [], [], []
        for layout in comparable:
            comparison = case.comparisons[layout.key]
            if comparison.gradients is None and comparison.loss is None:
                if comparison.buffers is not None:
                    buffers.append(layout)
                continue
            # A factor shows from the first step on; later ones part in direction as well.
            factor = all(
                parting is None or _step_of(parting) == 0
                for parting in (comparison.loss, comparison.gradients)
            )
            scale = self._scale(case, layout) if factor else None
            parts = layout.ranks * layout.micro_batches // self._reference_parts()
            if scale is not None and parts > 1 and abs(scale - parts) < 1e-3 * parts:
                sums.append(layout)
            elif scale is not None and abs(scale - 1) > 1e-3:
                self._add(
                    "T33",
                    f"in ({layout.key}) all gradients are the right ones times {1 / scale:.4g}: "
                    "training_step multiplies the loss by something that depends on the layout",
                    "Return the mean loss of the batch; the trainer weights ranks and windows.",
                )
            else:
                others.append(layout)
        if sums:
            self._add(
                "T31",
                f"the loss is a sum over the batch and not a mean: {in_layouts(sums)} all "
                f"gradients are smaller by the {_parts(sums[0])} that the batch is split into",
                'Return a mean (reduction="mean"); the trainer weights it by its samples.',
            )
        self._add_unexplained(others)
        self._add_buffers(case, buffers)

    def _add_unexplained(self, others: Sequence[Layout]) -> None:
        keys = [layout.key for layout in others]
        if keys == ["b"]:
            self._add(
                "T33",
                "only in (b) the step comes out otherwise, on the same samples: training_step or "
                "the model looks at the rank, or at how ranks share a batch",
                "Leave rank and world_size to the trainer; average in the loss, not over ranks.",
            )
        elif keys:
            self._add(
                "T22",
                f"{in_layouts(others)} the mean of the losses of the parts is not the loss of the "
                "whole: it is a mean over something else than samples, or compares samples of a "
                "batch",
                'Return {"loss": ..., "weight": what it was averaged over} for tokens or pixels; a '
                "contrastive loss depends on its batch, whatever is done.",
            )

    def _add_buffers(self, case: Case, layouts: Sequence[Layout]) -> None:
        if layouts:
            parting = case.comparisons[layouts[0].key].buffers
            assert parting is not None
            self._add(
                "S27",
                f"{in_layouts(layouts)} buffers part while gradients agree, {parting.name} first: "
                "they are updated from the rank's own micro-batches, and rank 0's are kept",
                "Update them from values that are equal on all ranks, or once per window.",
            )

    # Small change ------------------------------------------------------------------------------

    @property
    def _reference_key(self) -> str:
        return self._layouts.reference.key

    def _reference_parts(self) -> int:
        return self._layouts.reference.ranks * self._layouts.reference.micro_batches

    def _case(self, changes: Changes) -> Case:
        """Run all layouts with something switched off."""
        reference = self._layouts.reference
        records = {
            layout.key: self._runner.run(layout, changes=changes)
            for layout in (reference, *self._layouts.others)
        }
        return Case(
            records,
            {
                layout.key: compare(records[reference.key], records[layout.key], self._tolerance)
                for layout in self._layouts.others
            },
        )

    def _scale(self, case: Case, layout: Layout) -> float | None:
        """Return the number that the reference's gradients are of these, where they part first."""
        parting = case.comparisons[layout.key].gradients
        if parting is None:
            return None
        windows = [case.records[key].windows for key in (self._reference_key, layout.key)]
        a, b = (w[_step_of(parting)].gradients for w in windows)
        return scale_between(a, b, self._tolerance.relative)

    def _where(self, case: Case, what: str) -> list[Layout]:
        return [
            layout
            for layout in self._layouts.others
            if getattr(case.comparisons[layout.key], what) is not None
        ]

    def _add(self, code: str, what: str, fix: str, *, harmless: bool = False) -> None:
        self.causes.append(Cause(code, what, fix, harmless))


def _steps_compare(comparison: Comparison) -> bool:
    """Return whether the steps are comparable, that is, do not part for what came before them."""
    rates, gradients = comparison.learning_rates, comparison.gradients
    by_rate = rates is not None and (gradients is None or _step_of(rates) < _step_of(gradients))
    return comparison.samples is None and comparison.first is None and not by_rate


def _step_of(parting: Parting) -> int:
    return parting.step or 0


def _step_parts(comparison: Comparison) -> bool:
    parts = (comparison.loss, comparison.gradients, comparison.weights, comparison.buffers)
    return any(part is not None for part in parts)


def _parts(layout: Layout) -> str:
    return f"{layout.ranks * layout.micro_batches} parts"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
