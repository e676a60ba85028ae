"""Metrics that compute themselves: objects with `update`, `compute` and `reset`.

Such an object is kept by reference and asked once, at the end of the epoch. One that exchanges its
states between ranks in `compute` (torchmetrics' do) must be asked on all ranks, in one order, also
where it was never logged because the rank had no batch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from minitrainer.errors import LogError, MetricMismatchError
from minitrainer.protocols import MetricObject


@dataclass(slots=True)
class _Kept:
    metric: MetricObject
    options: list[Any]
    weight: float | torch.Tensor = 0.0


class MetricObjects:
    """The objects that were logged since the last flush.

    Args:
        owner: The user's module; an object that is an attribute of it, or of a part of it, is
            found on ranks that did not log it.
    """

    def __init__(self, owner: torch.nn.Module) -> None:
        self._owner = owner
        self._kept: dict[str, _Kept] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def log(
        self, name: str, metric: MetricObject, weight: float | torch.Tensor, options: list[Any]
    ) -> None:
        """Keep the object; `options` are (reduce_fx, sync_dist, logger, prog_bar).

        Raises:
            MetricMismatchError: Another object or other options were logged under this name.
        """
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept(metric, options)
        elif kept.metric is not metric or kept.options != options:
            raise MetricMismatchError(
                f"self.log({name!r}) got two objects, or one with two sets of options.",
                fix="Use one name for one meaning.",
            )
        kept.weight = kept.weight + weight

    def about(self) -> list[list[Any]]:
        """Return what other ranks must know: name, how it exchanges, where it is, options."""
        return [
            [name, _exchange_of(kept.metric), self._path_of(kept.metric), kept.options]
            for name, kept in self._kept.items()
        ]

    def compute(self, told: list[list[list[Any]]]) -> list[list[Any]]:
        """Compute and reset all objects that any rank has logged.

        Args:
            told: What `about` returned on each rank.

        Returns:
            Entries of this rank, as `MetricStore` reduces them.

        Raises:
            MetricMismatchError: An object must be asked on a rank that cannot find it.
            LogError: An object computed something other than one number.
        """
        agreed: dict[str, list[Any]] = {}
        for entries in told:
            for name, *about in entries:
                agreed.setdefault(name, about)
        computed = []
        for name, (exchange, path, options) in agreed.items():
            kept = self._kept.get(name)
            if exchange != "none":
                _check_lacking(name, exchange, path, told)
            if kept is None and exchange != "none":
                kept = _Kept(attrgetter(path)(self._owner), options)
            with warnings.catch_warnings():
                if name not in self._kept:
                    # torchmetrics warns of a compute without an update, which is meant here.
                    warnings.simplefilter("ignore", UserWarning)
                computed.append(_entry(name, kept, options, exchanges=exchange != "none"))
            if kept is not None:
                kept.metric.reset()
        self._kept.clear()
        return computed

    def _path_of(self, metric: MetricObject) -> str:
        for path, part in self._owner.named_modules():
            if part is metric:
                return str(path)
            for name, value in vars(part).items():
                if value is metric:
                    return f"{path}.{name}" if path else str(name)
        return ""


def _entry(name: str, kept: _Kept | None, options: list[Any], *, exchanges: bool) -> list[Any]:
    reduce, synced, logger, prog_bar = options
    value, weight = 0.0, 0.0
    if kept is not None:
        value = _number(name, kept.metric.compute())
        weight = float(kept.weight)
    if exchanges:
        # Equal on all ranks already.
        reduce, weight = "max", 1.0
    elif reduce == "mean":
        value *= weight
    return [name, reduce, synced, value, weight, False, logger, prog_bar]


def _exchange_of(metric: MetricObject) -> str:
    """Return what an object exchanges in compute: "none", "tensors", or also "lists" of them."""
    if not getattr(metric, "sync_on_compute", False):
        return "none"
    states = getattr(metric, "metric_state", {})
    return "lists" if any(isinstance(state, list) for state in states.values()) else "tensors"


def _check_lacking(name: str, exchange: str, path: str, told: list[list[list[Any]]]) -> None:
    """Raise, on all ranks alike, if a rank that did not log an object cannot take part in it."""
    for rank, entries in enumerate(told):
        if any(name == entry[0] for entry in entries):
            continue
        what = f"The object logged as {name!r} was not logged on rank {rank}."
        if not path:
            raise MetricMismatchError(
                what,
                "It exchanges its states in compute, where all ranks have to take part.",
                "Make it an attribute of the module, then every rank finds it.",
            )
        if exchange == "lists":
            raise MetricMismatchError(
                what,
                "It keeps its values in lists, which torchmetrics cannot gather from a rank "
                "that has none.",
                "Use a kind with states of one size (thresholds=100, say), or more batches.",
            )


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    raise LogError(
        f"The object logged as {name!r} computed {type(value).__name__}.",
        "A metric is one number.",
        "Log each part under a name of its own.",
    )
