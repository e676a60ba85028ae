"""What a run did, noted while it runs: samples, losses, gradients, weights, metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minitrainer import dist
from minitrainer.callback import Callback
from minitrainer.data import count_samples
from minitrainer.module import Module
from minitrainer.parity.samples import sample_digests
from minitrainer.protocols import TrainerView
from minitrainer.step import StepResult

Tensors = dict[str, torch.Tensor]

_KEPT = 65536
"""Elements kept of one tensor; of a larger one evenly spaced ones, and the norm of all."""


@dataclass
class WindowRecord:
    """One optimizer step.

    Attributes:
        samples: A digest for each sample, over all ranks and micro-batches, sorted.
        loss: The mean over the window, weighted as the gradient is; None if all was skipped.
        gradients: By name of the parameter, as the optimizer got them, but not clipped by norm.
        learning_rates: Of each parameter group.
        metrics: The trainer's metrics after the step.
    """

    samples: list[str] = field(default_factory=list)
    loss: float | None = None
    gradients: Tensors = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """A whole run.

    Attributes:
        windows: One for each step.
        first: Parameters and buffers before the first step.
        weights: Parameters after the last step.
        buffers: Buffers of rank 0 after the last step.
        in_double: Whether all losses were float64.
        validation: The metrics of a validation, all runs having the same weights.
        logged: What its steps logged, by name of the metric and by batch over all ranks.
        unsynced: Metrics that were logged with `sync_dist=False`.
    """

    windows: list[WindowRecord] = field(default_factory=list)
    first: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    in_double: bool = True
    validation: dict[str, float] = field(default_factory=dict)
    logged: dict[str, dict[int, float]] = field(default_factory=dict)
    unsynced: list[str] = field(default_factory=list)

    def as_plain(self) -> dict[str, Any]:
        """Return plain values and tensors, which can be handed over from local ranks."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Record:
        """Return the record that `as_plain` was called on."""
        windows = [WindowRecord(**window) for window in values["windows"]]
        return cls(**{**values, "windows": windows})


class Recorder(Callback):
    """Note what a run does and ask it to stop after some steps.

    Args:
        steps: Optimizer steps to take.
        clip_norm: The trainer's `gradient_clip_norm`. Clipping hides by how much a gradient is too
            large, so the record undoes it.
    """

    def __init__(self, steps: int, clip_norm: float | None = None) -> None:
        self.record = Record()
        self._steps = steps
        self._clip_norm = clip_norm
        self._names: dict[torch.Tensor, str] = {}
        self._window = WindowRecord()
        self._losses: list[tuple[float, float]] = []
        self._windows_here: list[tuple[list[str], list[tuple[float, float]]]] = []
        self._batch_idx: int | None = None
        self._logged_here: dict[str, dict[int, float]] = {}

    # Training ----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: TrainerView, module: Module) -> None:
        """Note the first weights and watch the optimizers."""
        self.record.first = _kept([*module.named_parameters(), *module.named_buffers()])
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def on_train_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Note the samples; in the last window ask to stop, before the ranks agree on it."""
        self._window.samples += sample_digests(batch)
        if trainer.global_step >= self._steps - 1:
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss, and what it weighs."""
        weight: Any = None
        if isinstance(outputs, Mapping):
            outputs, weight = outputs["loss"], outputs.get("weight")
        if outputs is None:
            return
        self.record.in_double &= outputs.dtype == torch.float64
        weight = count_samples(batch) if weight is None else weight
        self._losses.append((float(outputs.detach()), float(weight)))

    def on_train_step_end(self, trainer: TrainerView, module: Module, result: StepResult) -> None:
        """Close the window."""
        window = self._window
        if result.grad_norm is not None and self._clip_norm is not None:
            # What torch's clip_grad_norm_ has divided by, taken back.
            factor = max(1.0, (float(result.grad_norm) + 1e-6) / self._clip_norm)
            window.gradients = {name: factor * g for name, g in window.gradients.items()}
        window.metrics = dict(trainer.callback_metrics)
        self.record.windows.append(window)
        self._windows_here.append((window.samples, self._losses))
        self._window, self._losses = WindowRecord(), []

    def on_fit_end(self, trainer: TrainerView, module: Module) -> None:
        """Put together what the ranks have noted, and note the last weights."""
        for window, *parts in zip(
            self.record.windows, *dist.gather_objects(self._windows_here), strict=True
        ):
            window.samples = sorted(digest for digests, _ in parts for digest in digests)
            pairs = [pair for _, losses in parts for pair in losses if pair[1] != 0]
            if pairs:
                window.loss = sum(x * w for x, w in pairs) / sum(w for _, w in pairs)
        self.record.weights = _kept(module.named_parameters())
        self.record.buffers = _kept(module.named_buffers())

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        self._window.learning_rates += [float(group["lr"]) for group in groups]
        stepped = [parameter for group in groups for parameter in group["params"]]
        self._window.gradients |= _kept(
            (self._names[p], p.grad) for p in stepped if p.grad is not None
        )

    # Validation --------------------------------------------------------------------------------

    def on_validation_start(self, trainer: TrainerView, module: Module) -> None:
        """Forget what an earlier validation logged."""
        self._logged_here = {}

    def on_validation_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Note which batch it is that values are logged for."""
        self._batch_idx = batch_idx

    def on_validation_end(self, trainer: TrainerView, module: Module) -> None:
        """Put together what was logged on the ranks."""
        logged: dict[str, dict[int, float]] = {}
        for per_rank in dist.gather_objects(self._logged_here):
            for name, values in per_rank.items():
                # JSON knows no numbers as keys.
                logged.setdefault(name, {}).update({int(k): v for k, v in values.items()})
        self.record.logged = logged
        self._batch_idx = None

    def logged(self, name: str, value: Any, *, sync_dist: bool) -> None:
        """Note what the module has logged: in a validation the value, always how."""
        # An object that gathers a metric by itself has no value for one batch.
        if self._batch_idx is not None and isinstance(value, torch.Tensor | int | float):
            number = value.detach() if isinstance(value, torch.Tensor) else value
            self._logged_here.setdefault(name, {})[self._batch_idx] = float(number)
        if not sync_dist and name not in self.record.unsynced:
            self.record.unsynced.append(name)


def _kept(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: _thinned(tensor.detach()) for name, tensor in named}


def _thinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float64 on the CPU, flat; of a large tensor only a part and the norm."""
    flat = tensor.flatten().cpu().double()
    if flat.numel() <= _KEPT:
        return flat.clone()
    return torch.cat([flat[:: -(-flat.numel() // _KEPT)], flat.norm()[None]])
