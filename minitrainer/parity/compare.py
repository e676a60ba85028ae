"""Where two records part: the first step, the first tensor, and by how much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minitrainer.parity.record import Record, Tensors, WindowRecord


class Tolerance(NamedTuple):
    """What is rounding and what is a difference.

    A tensor parts when |x - y| / max(|x|, floor * |all|) exceeds `relative`, with 2-norms and `all`
    for the tensors of the model together: one whose gradient is zero but for rounding (a bias
    before batch norm) is not judged by its own size. `growth` multiplies the tolerance from step
    to step, since a model that trains amplifies rounding.
    """

    relative: float
    floor: float
    growth: float

    @classmethod
    def of(cls, *, in_double: bool) -> Tolerance:
        """Return the tolerance of float64 (eps 2e-16) or of float32 (eps 1e-7)."""
        return cls(1e-6, 1e-6, 1.0) if in_double else cls(1e-3, 1e-2, 2.0)

    def at(self, step: int) -> float:
        """Return the relative tolerance in a step, from 0."""
        return self.relative * self.growth**step


@dataclass(frozen=True)
class Parting:
    """Where something parts.

    Attributes:
        step: The step, from 0; None for what there is one of in a run.
        name: The first tensor or metric that parts.
        size: The relative difference there; of samples, the share that differs.
        count: How many part, in that step.
        total: Of how many.
    """

    step: int | None
    name: str
    size: float
    count: int
    total: int


@dataclass(frozen=True)
class Comparison:
    """What parts between the reference and another layout; None is: nothing."""

    samples: Parting | None
    first: Parting | None
    loss: Parting | None
    gradients: Parting | None
    learning_rates: Parting | None
    weights: Parting | None
    buffers: Parting | None
    training_metrics: Parting | None
    validation: Parting | None

    @property
    def is_clean(self) -> bool:
        """Whether nothing parts."""
        return all(parting is None for parting in vars(self).values())


def compare(reference: Record, other: Record, tolerance: Tolerance) -> Comparison:
    """Return where the other record parts from the reference."""
    pairs = list(enumerate(zip(reference.windows, other.windows, strict=False)))
    last = tolerance._replace(relative=tolerance.at(max(0, len(pairs) - 1)))
    return Comparison(
        samples=_first(_samples(step, *pair) for step, pair in pairs) or _lengths(reference, other),
        first=_tensors(None, reference.first, other.first, tolerance._replace(relative=0.0)),
        loss=_first(_loss(step, *pair, tolerance) for step, pair in pairs),
        gradients=_first(
            _tensors(
                step, a.gradients, b.gradients, tolerance._replace(relative=tolerance.at(step))
            )
            for step, (a, b) in pairs
        ),
        learning_rates=_first(_rates(step, *pair) for step, pair in pairs),
        weights=_tensors(None, reference.weights, other.weights, last),
        buffers=_tensors(None, reference.buffers, other.buffers, last),
        training_metrics=_first(
            _metrics(step, a.metrics, b.metrics, tolerance.at(step)) for step, (a, b) in pairs
        ),
        validation=_metrics(None, reference.validation, other.validation, tolerance.relative),
    )


def parted_metrics(
    reference: Mapping[str, float], other: Mapping[str, float], tolerance: float
) -> dict[str, float]:
    """Return the relative difference of each metric that parts."""
    sizes = {
        name: _relative(reference.get(name, math.nan), other.get(name, math.nan))
        for name in [*reference, *(name for name in other if name not in reference)]
    }
    return {name: size for name, size in sizes.items() if size > tolerance}


def scale_between(reference: Tensors, other: Tensors, tolerance: float) -> float | None:
    """Return the number that `other` times it is the reference; None if there is none."""
    if set(reference) != set(other) or not reference:
        return None
    here = torch.cat([reference[name] for name in reference])
    there = torch.cat([other[name] for name in reference])
    square = float(there @ there)
    if square == 0:
        return None
    scale = float(here @ there) / square
    rest = float((here - scale * there).norm()) / max(float(here.norm()), 1e-300)
    return scale if rest <= tolerance else None


def _first(partings: Iterable[Parting | None]) -> Parting | None:
    return next((parting for parting in partings if parting is not None), None)


def _samples(step: int, a: WindowRecord, b: WindowRecord) -> Parting | None:
    missing = Counter(a.samples) - Counter(b.samples)
    number = max(missing.total(), (Counter(b.samples) - Counter(a.samples)).total())
    if number == 0:
        return None
    total = max(len(a.samples), len(b.samples))
    return Parting(step, "", number / total, number, total)


def _lengths(reference: Record, other: Record) -> Parting | None:
    a, b = len(reference.windows), len(other.windows)
    return None if a == b else Parting(min(a, b), "", 1.0, abs(a - b), max(a, b))


def _loss(step: int, a: WindowRecord, b: WindowRecord, tolerance: Tolerance) -> Parting | None:
    if a.loss is None and b.loss is None:
        return None
    size = _relative(math.nan if a.loss is None else a.loss, math.nan if b.loss is None else b.loss)
    return Parting(step, "", size, 1, 1) if size > tolerance.at(step) else None


def _rates(step: int, a: WindowRecord, b: WindowRecord) -> Parting | None:
    if len(a.learning_rates) != len(b.learning_rates):
        return Parting(step, "", math.inf, 1, 1)
    sizes = [_relative(x, y) for x, y in zip(a.learning_rates, b.learning_rates, strict=True)]
    parted = [size for size in sizes if size > 1e-9]
    return Parting(step, "", max(parted), len(parted), len(sizes)) if parted else None


def _metrics(
    step: int | None, a: Mapping[str, float], b: Mapping[str, float], tolerance: float
) -> Parting | None:
    parted = parted_metrics(a, b, tolerance)
    if not parted:
        return None
    name, size = next(iter(parted.items()))
    return Parting(step, name, size, len(parted), len(a.keys() | b.keys()))


def _tensors(step: int | None, a: Tensors, b: Tensors, tolerance: Tolerance) -> Parting | None:
    parted = dict(_parted_tensors(a, b, tolerance))
    if not parted:
        return None
    name, size = next(iter(parted.items()))
    return Parting(step, name, size, len(parted), len(a.keys() | b.keys()))


def _parted_tensors(a: Tensors, b: Tensors, tolerance: Tolerance) -> Iterator[tuple[str, float]]:
    everything = math.sqrt(sum(float(_finite(x).square().sum()) for x in a.values()))
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b or a[name].shape != b[name].shape:
            yield name, math.inf
            continue
        # NaN in both at the same place is no difference; NaN in one of them is.
        if not torch.equal(a[name].isfinite(), b[name].isfinite()):
            yield name, math.inf
            continue
        x, y = _finite(a[name]), _finite(b[name])
        if torch.equal(x, y):
            continue
        norm = max(float(x.norm()), tolerance.floor * everything)
        size = float((x - y).norm()) / norm if norm > 0 else math.inf
        if size > tolerance.relative:
            yield name, size


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _relative(x: float, y: float) -> float:
    """Return |x - y| relative to |x|, which counts as no less than 0.001."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    size = abs(x - y) / max(abs(x), 1e-3)
    return math.inf if math.isnan(size) else size
