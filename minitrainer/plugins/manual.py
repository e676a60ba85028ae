"""Optimizers that the user's `training_step` steps itself, one or several.

Pitfall: DDP's reducer expects one backward per forward and a gradient for every parameter. With
two losses and two optimizers that ends in "finished reduction in the prior iteration" or "unused
parameters"; without the reducer ranks drift apart, and a rank that runs dry leaves the others
waiting.
Fix: there is no reducer. An optimizer's `step` reduces the gradients of its own parameters,
whatever backwards came before, and a rank without a batch follows the steps of the others.

How ranks stay together is told in `gradients.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from minitrainer import dist, storage
from minitrainer.errors import ManualOptimizationError, SettingError
from minitrainer.gradients import GradientExchange, Said, parameters_of
from minitrainer.module import Module
from minitrainer.optimization import Optimization
from minitrainer.protocols import OneScale, Precision, Strategy
from minitrainer.step import Ask, MicroBatch, StepOutput, WindowTotals


class ManualOptimizer:
    """An optimizer as `Module.optimizers` hands it out; all but `step` is the optimizer's own.

    Args:
        stepping: Whose step it is.
        index: Its place in what `configure_optimizers` returned.
        optimizer: The optimizer itself.
    """

    def __init__(
        self, stepping: ManualStrategy, index: int, optimizer: torch.optim.Optimizer
    ) -> None:
        self._stepping = stepping
        self._index = index
        self.optimizer = optimizer

    def step(self) -> bool:
        """Reduce this optimizer's gradients over ranks, unscale and clip them, step.

        The gradient is sum(samples * gradient) / sum(samples) over the ranks, where the samples
        are those of the micro-batch that runs, also if gradients of earlier ones are in it. A
        parameter without a gradient counts with zeros where another rank has one, and is left out
        where none has.

        Returns:
            Whether the step was taken; AMP skips one that overflows.

        Raises:
            ManualOptimizationError: Called outside of `training_step`.
            StepsMismatchError: Another rank does not step this optimizer.
        """
        return self._stepping.step(self._index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class ManualStrategy:
    """A strategy around another one, for modules with `automatic_optimization = False`.

    Also what such a module finds as its `protocols.Stepping`.

    Args:
        strategy: Has moved the module to the device and made it equal on all ranks.
        precision: Runs backward and steps.
        optimization: The optimizers and schedulers.
    """

    def __init__(
        self, strategy: Strategy, *, precision: Precision, optimization: Optimization
    ) -> None:
        self.timeout = strategy.timeout
        self._strategy = strategy
        self._precision = precision
        self._optimization = optimization
        self.optimizers = [
            ManualOptimizer(self, index, optimizer)
            for index, optimizer in enumerate(optimization.optimizers)
        ]
        self.taken = 0
        """Steps of the present window that were taken, of all optimizers."""
        self.skipped = 0
        """Steps of the present window that AMP skipped."""

    @property
    def lr_schedulers(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        """The schedulers, which only the user steps."""
        return [entry.scheduler for entry in self._optimization.schedulers]

    def setup(self, module: torch.nn.Module, device: torch.device) -> None:
        """Take over the module's steps; the strategy within has been set up before."""
        self._module, self._device = cast(Module, module), device
        self._exchange = None
        if dist.world_size() > 1:
            self._exchange = GradientExchange(self._optimization.optimizers, device)
        self._windows = 0
        self._in_training_step = self._is_stepping = self._layers_open = False
        self._clips: dict[int, tuple[float | None, float | None]] = {}
        self._frozen: list[tuple[torch.nn.Parameter, bool]] = []
        self._guards = [
            optimizer.register_step_pre_hook(self._guard)
            for optimizer in self._optimization.optimizers
        ]
        self._module._stepping = self

    def training_step(self, micro_batch: MicroBatch, ask: Ask) -> StepOutput:
        """Run the user's `training_step`, which steps; what it returns is no loss."""
        self._windows += 1
        self._samples, self._ask = float(micro_batch.samples), ask
        self._totals, self._all_step = WindowTotals(0.0, 0.0), False
        self._own_steps = self.taken = self.skipped = 0
        self._leader: int | None = None
        if micro_batch.dry:
            return StepOutput(None, 0.0, None)
        self._open_layers()
        self._in_training_step = True
        try:
            with self._one_scale():
                outputs = self._module.training_step(micro_batch.batch, micro_batch.batch_idx)
        finally:
            self._in_training_step = False
            self._clips.clear()
            self.toggle(None)
        return StepOutput(None, self._samples if self._own_steps else 0.0, outputs)

    def agree(self, local: WindowTotals) -> WindowTotals:
        """Follow the ranks that still step, and return the totals when all are through.

        Raises:
            StepsMismatchError: This rank has stepped, and another one steps more often.
        """
        if self._exchange is None:
            return local
        if self._all_step and self._module._exchange is None:
            dist.call_before_others(self._end_window)
            return self._totals
        return self._end_window()

    def _end_window(self) -> WindowTotals:
        with self._one_scale():
            said, index = self._meet(None)
            while index is not None:
                self._follow(index)
                said, index = self._meet(None)
        if self._leader is not None:
            # What the user's code did besides steps: schedulers, weights clamped or averaged.
            self._share_rates(None, leads=self._leader == dist.rank())
            weights = [parameter.detach() for parameter in self._module.parameters()]
            dist.broadcast_tensors(weights, source=self._leader)
        if self._module._exchange is not None:
            self._module._exchange.check()
        return self._totals._replace(samples=said.samples, stop=said.stop, save=said.save)

    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks, as the strategy within does."""
        self._strategy.sync_buffers()

    def teardown(self) -> None:
        """Give the module its optimizers back; the strategy within is torn down after."""
        dist.call_before_others(None)
        for guard in self._guards:
            guard.remove()
        self.toggle(None)
        self._module._stepping = None
        del self._module, self._exchange

    # What the module calls ---------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """Run backward, scaling the loss if need be; nothing is reduced here."""
        self._precision.backward(loss, retain_graph=retain_graph)

    def clip(self, optimizer: Any, norm: float | None, value: float | None) -> None:
        """Clip in the coming step of this optimizer.

        Raises:
            SettingError: A bound is not above 0, or there is none.
        """
        bounds = [bound for bound in (norm, value) if bound is not None]
        if not bounds or not all(bound > 0 for bound in bounds):
            raise SettingError(
                f"clip_gradients got norm={norm}, value={value}.", fix="Give a number above 0."
            )
        for index, own in enumerate(self.optimizers):
            if optimizer is own or optimizer is own.optimizer:
                self._clips[index] = (norm, value)

    def toggle(self, optimizer: Any) -> None:
        """Freeze the parameters that only other optimizers have; None undoes it."""
        for parameter, was_trained in self._frozen:
            parameter.requires_grad_(was_trained)
        self._frozen = []
        if optimizer is None:
            return
        kept = {id(parameter) for parameter in parameters_of(optimizer)}
        for other in self._optimization.optimizers:
            for parameter in parameters_of(other):
                if id(parameter) not in kept:
                    kept.add(id(parameter))
                    self._frozen.append((parameter, parameter.requires_grad))
                    parameter.requires_grad_(False)

    def step(self, index: int) -> bool:
        """Step an optimizer on this rank, which has a batch; see `ManualOptimizer.step`."""
        if not self._in_training_step:
            raise ManualOptimizationError(
                f"Optimizer {index} was stepped outside of training_step.",
                "The other ranks would not know of it.",
                "Step it in training_step.",
            )
        if self._exchange is not None:
            said, _ = self._meet(index)
            self._all_step = said.through == 0
            if not self._all_step:
                self._share_rates(index, leads=True)
            self._open_layers()
        self._own_steps += 1
        return self._take(index)

    # How a step goes ---------------------------------------------------------------------------

    def _take(self, index: int) -> bool:
        optimizer = self._optimization.optimizers[index]
        norm, value = self._clips.pop(index, (None, None))
        self._precision.unscale(optimizer)
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), norm)
        if value is not None:
            torch.nn.utils.clip_grad_value_(parameters_of(optimizer), value)
        self._is_stepping = True
        try:
            taken = self._precision.step(optimizer)
        finally:
            self._is_stepping = False
        self.taken += int(taken)
        self.skipped += int(not taken)
        return taken

    def _follow(self, index: int) -> None:
        """Take a step of the other ranks with their gradients, which are here already."""
        self._share_rates(index, leads=False)
        # A scaler that has never scaled anything cannot unscale.
        self._precision.backward(torch.zeros((), device=self._device, requires_grad=True))
        self._take(index)
        for parameter in parameters_of(self._optimization.optimizers[index]):
            # This rank's training_step is not there to do it.
            parameter.grad = None

    def _meet(self, index: int | None) -> tuple[Said, int | None]:
        """Exchange with the other ranks: to step an optimizer, or as one that is through."""
        assert self._exchange is not None
        dist.call_before_others(None)
        self._close_layers()
        through = index is None
        said, stepped = self._exchange.meet(
            Said(
                weight=0.0 if through else self._samples,
                samples=self._samples,
                stop=self._ask.stop,
                save=self._ask.save,
                through=float(through),
                done=float(through and self._own_steps > 0),
                odd=float(self._windows % 2),
            ),
            index,
        )
        if stepped is not None:
            self._totals = WindowTotals(said.weight, said.samples, said.stop, said.save)
        return said, stepped

    def _share_rates(self, index: int | None, *, leads: bool) -> None:
        """Give ranks that follow what steps depend on besides gradients: rates and clipping."""
        clip = None if index is None else self._clips.get(index)
        told = storage.dumps({**self._optimization.rates(), "clip": clip}) if leads else b""
        parts = dist.gather_bytes(told)
        self._leader = next(rank for rank, part in enumerate(parts) if part)
        if not leads:
            rates = storage.loads(parts[self._leader])
            self._optimization.load_rates(rates)
            if index is not None and rates["clip"] is not None:
                self._clips[index] = rates["clip"]

    def _one_scale(self) -> AbstractContextManager[None]:
        precision: Any = self._precision
        return precision.one_scale() if isinstance(precision, OneScale) else nullcontext()

    def _guard(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise ManualOptimizationError(
                f"{type(optimizer).__name__}.step was called on the optimizer itself.",
                "Its gradients would be neither reduced over ranks nor unscaled.",
                "Step what self.optimizers() returns.",
            )

    # Layers that exchange something themselves (synced batch norm) do so between the meetings.

    def _open_layers(self) -> None:
        if self._module._exchange is not None:
            self._module._exchange.open()
            self._layers_open = True

    def _close_layers(self) -> None:
        if self._module._exchange is None:
            return
        if self._layers_open:
            self._module._exchange.close()
        else:
            self._module._exchange.follow()
        self._layers_open = False
