"""Why metrics part where losses agree, on the same weights and batches: how they are averaged."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from minitrainer.parity.case import Case, Cause, in_layouts
from minitrainer.parity.compare import Tolerance, parted_metrics
from minitrainer.parity.layouts import Layout
from minitrainer.parity.record import Record


def training_metric_causes(
    case: Case,
    reference_key: str,
    layouts: Sequence[Layout],
    tolerance: Tolerance,
    *,
    besides: Container[str],
) -> list[Cause]:
    """Return the causes of what `training_step` logs.

    Args:
        case: The runs, without what makes their losses part.
        reference_key: The layout that others are compared with.
        layouts: Those whose samples and first weights are the same.
        tolerance: What is rounding.
        besides: Metrics that a validation tells more of.
    """
    guilty: dict[str, list[Layout]] = {}
    for layout in layouts:
        comparison = case.comparisons[layout.key]
        if comparison.loss is not None or comparison.gradients is not None:
            continue  # then the metrics part with the loss
        windows = [case.records[key].windows for key in (reference_key, layout.key)]
        for a, b in zip(*windows, strict=False):
            for name in parted_metrics(a.metrics, b.metrics, tolerance.relative):
                where = guilty.setdefault(name, [])
                if layout not in where:
                    where.append(layout)
    causes = []
    for name, where in guilty.items():
        if name in besides:
            continue
        if _is_unsynced(name, case.records["b"]):
            causes.append(_unsynced(f"{name} is another"))
            continue
        causes.append(
            Cause(
                "T35",
                f"{in_layouts(where)} {name} is averaged over other parts than in "
                f"({reference_key}), while the losses agree: what training_step logs is no mean "
                "over the samples of its batch",
                'Log means of the batch, counts with reduce_fx="sum", and no running averages.',
            )
        )
    return causes


def validation_causes(case: Case, reference_key: str, tolerance: Tolerance) -> list[Cause]:
    """Return the causes of what `validation_step` logs, with the same weights in all layouts."""
    reference, ranks = case.records[reference_key], case.records["b"]
    causes = []
    for name in parted_metrics(reference.validation, ranks.validation, tolerance.relative):
        there, here = ranks.logged.get(name, {}), reference.logged.get(name, {})
        value = (
            f"{name} is {ranks.validation.get(name, math.nan):.4g} instead of "
            f"{reference.validation.get(name, math.nan):.4g}"
        )
        if _is_unsynced(name, ranks):
            causes.append(_unsynced(value))
            continue
        batches = here.keys() & there.keys()
        if any(parted_metrics({"": here[k]}, {"": there[k]}, tolerance.relative) for k in batches):
            why = (
                "what is logged for the same batch depends on the batches that the rank saw before "
                "(a running average, a counter in the module), or on random numbers"
            )
        else:
            why = "the values of the batches are the same, so it is the averaging that differs"
        causes.append(
            Cause(
                "T35",
                f"in (b) {value}, with the same weights on the same batches: {why}",
                'Log the mean of the batch, or counts with reduce_fx="sum"; the trainer averages.',
            )
        )
    return causes


def _unsynced(value: str) -> Cause:
    return Cause(
        "T34",
        f"in (b) {value}: it is logged with sync_dist=False, and so is rank 0's alone",
        "Leave sync_dist=False out.",
    )


def _is_unsynced(name: str, record: Record) -> bool:
    """Return whether it is; `x_step` and `x_epoch` are `x` where both are logged."""
    plain = name.removesuffix("_step").removesuffix("_epoch")
    return name in record.unsynced or plain in record.unsynced
