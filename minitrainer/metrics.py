"""Logged values, kept without reading them from the device until they are wanted.

A value is detached and copied at the door. Up to `_FOLD` copies per metric wait in a list, then
they are folded into a float64 sum on the device by one stack and one dot product, so neither
memory nor the cost of a step grows with the length of the epoch. Ranks are reduced at a flush, in
one collective for all metrics together, matched by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from minitrainer import dist
from minitrainer.errors import LogError, MetricMismatchError
from minitrainer.metric_objects import MetricObjects
from minitrainer.module import Reduction
from minitrainer.protocols import MetricObject

_FOLD = 32


@dataclass(frozen=True, slots=True)
class Flushed:
    """One metric, reduced over batches and ranks; equal on all ranks.

    `name` is the user's name, `shown` the one with `_step` or `_epoch` where both are logged.
    """

    name: str
    shown: str
    value: float
    synced: bool
    logger: bool
    prog_bar: bool


class Accumulated:
    """Values of one metric on one rank, folded now and then."""

    __slots__ = ("_folded", "_reduce", "_values", "_weights", "window")

    def __init__(self, reduce: Reduction) -> None:
        self._reduce = reduce
        self._values: list[torch.Tensor | float] = []
        self._weights: list[float | torch.Tensor] = []
        self._folded: torch.Tensor | None = None
        self.window = -1

    def add(self, value: torch.Tensor | float, weight: float | torch.Tensor) -> None:
        """Take one value, detached already."""
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= _FOLD:
            self._fold()

    def restart(self, window: int) -> None:
        """Forget all values and note the window that the next ones belong to."""
        self._values.clear()
        self._weights.clear()
        self._folded = None
        self.window = window

    def state(self) -> list[Any]:
        """Return what is kept, as JSON can hold it; reads the device.

        The values that wait to be folded stay apart: a sum in another order may differ in its last
        bit, and a run that goes on from here must not.
        """
        folded = None if self._folded is None else self._folded.tolist()
        weights = _stack(self._weights).tolist() if self._weights else []
        return [folded, _stack(self._values).tolist() if self._values else [], weights]

    def restore(self, states: list[list[Any]]) -> None:
        """Take over what `state` returned, on one rank or on several."""
        for folded, values, weights in states:
            if folded is not None:
                new = torch.tensor(folded, dtype=torch.float64)
                if self._folded is not None:
                    total = _combine(self._reduce, self._folded[0], new[0])
                    new = torch.stack([total, self._folded[1] + new[1]])
                self._folded = new
            self._values += values
            self._weights += weights

    def latest(self) -> float | None:
        """Return the newest value, None if there is none; reads the device."""
        if self._values:
            return float(self._values[-1])
        total, weight = self.totals()
        if weight == 0:
            return None
        return total / weight if self._reduce == "mean" else total

    def totals(self) -> tuple[float, float]:
        """Return (reduced value, weight); reads the device. For a mean the value is a sum."""
        if self._values:
            self._fold()
        if self._folded is None:
            return 0.0, 0.0
        total, weight = self._folded.tolist()
        return total, weight

    def _fold(self) -> None:
        values = _stack(self._values)
        weights = _stack(self._weights).to(values.device)
        if self._reduce == "mean":
            # A mean over nothing is NaN: with weight 0 it must not poison the sum.
            new = torch.where(weights == 0, 0.0, values * weights).sum()
        else:
            new = getattr(values, self._reduce)()
        weight = weights.sum()
        if self._folded is not None:
            old, old_weight = self._folded.to(values.device).unbind()
            new = _combine(self._reduce, old, new)
            weight = weight + old_weight
        self._folded = torch.stack([new, weight])
        self._values.clear()
        self._weights.clear()


@dataclass(slots=True)
class _Metric:
    options: tuple[Any, ...]
    reduce: Reduction
    synced: bool
    prog_bar: bool
    logger: bool
    step: Accumulated | None
    epoch: Accumulated | None


class MetricStore:
    """The sink of `Module.log` for one stage.

    Args:
        training: Whether values are logged per step unless the user says otherwise.
        owner: The module whose metrics they are.
    """

    def __init__(self, *, training: bool, owner: torch.nn.Module) -> None:
        self._training = training
        self._objects = MetricObjects(owner)
        self._metrics: dict[str, _Metric] = {}
        self._window = 0
        self.samples: float = 1.0
        """Number of samples of the micro-batch that runs; the loop sets it before each."""

    def next_window(self) -> None:
        """Note that the values to come belong to another optimizer step."""
        self._window += 1

    def log(
        self,
        name: str,
        value: torch.Tensor | float | MetricObject,
        *,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Reduction,
        sync_dist: bool,
        batch_size: float | torch.Tensor | None,
        prog_bar: bool,
        logger: bool,
    ) -> None:
        """Take one value of one metric; see `Module.log`."""
        weight: float | torch.Tensor = self.samples
        if batch_size is not None:
            weight = batch_size
            if isinstance(weight, torch.Tensor):
                weight = weight.detach().clone().reshape(())
        if not isinstance(value, (torch.Tensor, int, float)):
            by_epoch = not on_step and on_epoch is not False
            self._check_object(name, value, reduce_fx, by_epoch=by_epoch)
            self._objects.log(name, value, weight, [reduce_fx, sync_dist, logger, prog_bar])
            return
        options = (on_step, on_epoch, reduce_fx, sync_dist, prog_bar, logger)
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = self._new_metric(name, options)
        elif metric.options != options:
            raise MetricMismatchError(
                f"self.log({name!r}) was called with {options} and with {metric.options} "
                "(on_step, on_epoch, reduce_fx, sync_dist, prog_bar, logger).",
                fix="Use one name for one meaning.",
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise _not_scalar(name, f"a tensor of shape {tuple(value.shape)}")
            # A copy, since the user may go on with the tensor in place (`loss /= 2`).
            value = value.detach().clone().reshape(())
        if metric.step is not None:
            if metric.step.window != self._window:
                metric.step.restart(self._window)
            metric.step.add(value, weight)
        if metric.epoch is not None:
            metric.epoch.add(value, weight)

    def flush_step(self) -> list[Flushed]:
        """Reduce what was logged in the present window; collective."""
        chosen = {
            name: metric.step
            for name, metric in self._metrics.items()
            if metric.step is not None and metric.step.window == self._window
        }
        return self._flush(chosen, "_step", objects=False)

    def flush_epoch(self) -> list[Flushed]:
        """Reduce what was logged since the last flush of the epoch, objects too; collective."""
        chosen = {
            name: metric.epoch for name, metric in self._metrics.items() if metric.epoch is not None
        }
        flushed = self._flush(chosen, "_epoch", objects=True)
        for accumulated in chosen.values():
            accumulated.restart(-1)
        return flushed

    def state(self) -> list[list[Any]]:
        """Return the epoch so far of each number that is logged; reads the device.

        Objects that compute themselves are not among them: those that are parts of the module are
        in its `state_dict`, as far as they put themselves there.
        """
        return [
            [name, list(metric.options), metric.epoch.state()]
            for name, metric in self._metrics.items()
            if metric.epoch is not None
        ]

    def restore(self, per_rank: list[list[list[Any]]], rank: int, world_size: int) -> None:
        """Go on with the epoch where `state` was called; from other ranks, rank 0 takes it all.

        Args:
            per_rank: What `state` returned on each rank.
            rank: This rank.
            world_size: The number of ranks now.
        """
        mine = per_rank[rank : rank + 1] if len(per_rank) == world_size else per_rank
        if rank > 0 and len(per_rank) != world_size:
            return
        for entries in mine:
            for name, options, state in entries:
                metric = self._metrics.get(name)
                if metric is None:
                    metric = self._metrics[name] = self._new_metric(name, tuple(options))
                assert metric.epoch is not None
                metric.epoch.restore([state])

    def progress(self) -> dict[str, float]:
        """Return this rank's newest value of each metric of the progress bar."""
        shown = {}
        for name, metric in self._metrics.items():
            accumulated = metric.step if metric.step is not None else metric.epoch
            if metric.prog_bar and accumulated is not None:
                value = accumulated.latest()
                if value is not None:
                    shown[name] = value
        return shown

    def _new_metric(self, name: str, options: tuple[Any, ...]) -> _Metric:
        on_step, on_epoch, reduce_fx, sync_dist, prog_bar, logger = options
        _check_name(name, reduce_fx)
        if name in self._objects:
            raise _two_meanings(name)
        on_step = self._training if on_step is None else on_step
        on_epoch = (not self._training) if on_epoch is None else on_epoch
        if not self._training and on_step:
            raise LogError(
                f"self.log({name!r}) asked for on_step in an evaluation.",
                "An evaluation takes no optimizer steps, and ranks have different batches.",
                "Log on_epoch there.",
            )
        return _Metric(
            options,
            reduce_fx,
            sync_dist,
            prog_bar,
            logger,
            Accumulated(reduce_fx) if on_step else None,
            Accumulated(reduce_fx) if on_epoch else None,
        )

    def _check_object(
        self, name: str, value: object, reduce_fx: Reduction, *, by_epoch: bool
    ) -> None:
        if not isinstance(value, MetricObject):
            raise _not_scalar(name, type(value).__name__)
        _check_name(name, reduce_fx)
        if name in self._metrics:
            raise _two_meanings(name)
        if not by_epoch:
            raise LogError(
                f"self.log({name!r}) got {type(value).__name__} with on_step=True or "
                "on_epoch=False.",
                "An object is computed once, at the end of the epoch.",
                "Log the value of a step under another name.",
            )

    def _flush(
        self, chosen: dict[str, Accumulated], suffix: str, *, objects: bool
    ) -> list[Flushed]:
        mine = []
        for name, accumulated in chosen.items():
            metric = self._metrics[name]
            forked = metric.step is not None and metric.epoch is not None
            total, weight = accumulated.totals()
            about = [forked, metric.logger, metric.prog_bar]
            mine.append([name, metric.reduce, metric.synced, total, weight, *about])
        gathered = dist.gather_objects([mine, self._objects.about() if objects else []])
        per_rank, told = ([part[index] for part in gathered] for index in (0, 1))
        if any(told):
            # Known on all ranks, so that all compute the same objects in the same order.
            computed = dist.gather_objects(self._objects.compute(told))
            per_rank = [[*values, *more] for values, more in zip(per_rank, computed, strict=True)]
        flushed = []
        for name, entries in _by_name(per_rank).items():
            value = _reduced(name, entries)
            if value is not None:
                _, _, synced, _, _, forked, logger, prog_bar = entries[0][1]
                shown = name + suffix if forked else name
                flushed.append(Flushed(name, shown, value, synced, logger, prog_bar))
        return flushed


def _by_name(per_rank: Iterable[list[list[Any]]]) -> dict[str, list[tuple[int, list[Any]]]]:
    found: dict[str, list[tuple[int, list[Any]]]] = {}
    for rank, entries in enumerate(per_rank):
        for entry in entries:
            found.setdefault(entry[0], []).append((rank, entry))
    return found


def _reduced(name: str, entries: list[tuple[int, list[Any]]]) -> float | None:
    """Combine the ranks' totals of one metric; None when no rank has a value."""
    first_rank, (_, reduce, synced, *_) = entries[0]
    for rank, entry in entries:
        if entry[1:3] != [reduce, synced]:
            raise MetricMismatchError(
                f"Metric {name!r} is logged with reduce_fx={reduce}, sync_dist={synced} on rank "
                f"{first_rank} and with reduce_fx={entry[1]}, sync_dist={entry[2]} on rank {rank}.",
                fix="Use one name for one meaning on all ranks.",
            )
    if not synced:
        entries = [pair for pair in entries if pair[0] == 0] or entries[:1]
    # An entry of weight 0 has seen no value (or values that count for nothing).
    totals = [(entry[3], entry[4]) for _, entry in entries if entry[4] != 0]
    if not totals:
        return None
    if reduce == "mean":
        return math.fsum(total for total, _ in totals) / math.fsum(weight for _, weight in totals)
    values = [total for total, _ in totals]
    if reduce == "sum":
        return math.fsum(values)
    if any(math.isnan(value) for value in values):
        return math.nan
    return float(max(values) if reduce == "max" else min(values))


def _combine(reduce: Reduction, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if reduce == "max":
        return torch.maximum(old, new)
    if reduce == "min":
        return torch.minimum(old, new)
    return old + new


def _stack(values: list[torch.Tensor | float]) -> torch.Tensor:
    """Return the values as one float64 vector, on the device of the tensors among them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=torch.float64)
    device = tensors[0].device
    if len(tensors) < len(values) or any(tensor.device != device for tensor in tensors):
        tensors = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    return torch.stack(tensors).double()


def _check_name(name: object, reduce_fx: object) -> None:
    if not isinstance(name, str) or not name:
        raise LogError(f"self.log got the name {name!r}.", fix="Use a non-empty string.")
    if reduce_fx not in get_args(Reduction):
        raise LogError(
            f"self.log({name!r}) got reduce_fx={reduce_fx!r}.",
            fix=f"Use one of {', '.join(get_args(Reduction))}.",
        )


def _two_meanings(name: str) -> MetricMismatchError:
    return MetricMismatchError(
        f"self.log({name!r}) got a number and an object.", fix="Use one name for one meaning."
    )


def _not_scalar(name: str, what: str) -> LogError:
    return LogError(
        f"self.log({name!r}) got {what}.",
        "A metric is one number, or an object with update, compute and reset.",
        "Log its mean, or each part under a name of its own.",
    )
