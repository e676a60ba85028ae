"""Every seam of the library on one page; anything of the right shape can take a place.

None has more than five methods. Shapes of what they exchange are in `step.py` and `state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from minitrainer.step import Ask, MicroBatch, StepOutput, WindowTotals


@runtime_checkable
class Stateful(Protocol):
    """Anything that has to survive in a checkpoint; plain values and tensors only."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        ...


@runtime_checkable
class Strategy(Protocol):
    """How the ranks share one model. Ships as `DDPStrategy` and `SingleStrategy`.

    `timeout` is the number of seconds after which a collective gives up.
    """

    timeout: float

    def setup(self, module: torch.nn.Module, device: torch.device) -> None:
        """Move the user's `Module` to the device, make it equal on all ranks and wrap it."""
        ...

    def training_step(self, micro_batch: MicroBatch, ask: Ask) -> StepOutput:
        """Run the user's `training_step`; its loss, weighted, is ready for backward.

        Gradients are reduced over ranks in the backward of a micro-batch with `sync` only.
        """
        ...

    def agree(self, local: WindowTotals) -> WindowTotals:
        """Return the totals of the window over all ranks, after its last backward."""
        ...

    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks, before validation and saving."""
        ...

    def teardown(self) -> None:
        """Give back what `setup` took; called always, also after an exception."""
        ...


@runtime_checkable
class Precision(Protocol):
    """Which number formats a step uses. Ships as `AMPPlugin`; may be `Stateful` too."""

    def setup(self, device: torch.device) -> None:
        """Get ready for this device, once, before the first step."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass."""
        ...

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward, scaling the loss if need be."""
        ...

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients true ones, once per window, before anything looks at them."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; return whether the step was really taken."""
        ...


class Exchange(Protocol):
    """What layers send to their copies on other ranks within a step (synced batch norm).

    A strategy finds it as `module._exchange`, None where no layer exchanges anything, and sees to
    it that a rank takes part in each step, also without a batch or a loss.
    """

    def open(self) -> None:
        """Let the layers exchange, before a training step that has a batch."""
        ...

    def close_after_backward(self) -> None:
        """Say to the other ranks that this one is through; called in the backward."""
        ...

    def close(self) -> None:
        """Say so at once, where optimizers are stepped by hand."""
        ...

    def follow(self) -> None:
        """Take part without a loss: return when the other ranks are through."""
        ...

    def check(self) -> None:
        """Raise what went wrong; called after the window, where the device is read anyway."""
        ...


@runtime_checkable
class OneScale(Protocol):
    """What a `Precision` with a loss scale has besides, for steps of several optimizers."""

    def one_scale(self) -> AbstractContextManager[None]:
        """Keep the loss scale while the context is open; let it move once, at the end."""
        ...


class Stepping(Protocol):
    """How a `Module` steps its optimizers itself. Ships as `plugins/manual.py`."""

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers, each behind an object whose `step` reduces its gradients first."""
        ...

    @property
    def lr_schedulers(self) -> Sequence[Any]:
        """The schedulers."""
        ...

    def backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """Run backward on a loss."""
        ...

    def clip(self, optimizer: Any, norm: float | None, value: float | None) -> None:
        """Clip the gradients in the coming step of this optimizer."""
        ...

    def toggle(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters get gradients; None undoes it."""
        ...


class Window(Protocol):
    """The micro-batches of one optimizer step, fetched one by one.

    `is_last` tells, once the window has been iterated, whether the epoch ends with it; false when
    that cannot be known.
    `expected_weight` is the number of samples over all ranks that the micro-batches' `share`
    was made for.
    """

    is_last: bool
    expected_weight: float

    def __iter__(self) -> Iterator[MicroBatch]: ...


class EpochData(Protocol):
    """What one rank trains on in (the rest of) one epoch.

    `num_batches` is the same on all ranks, None when unknown; then, on more than one rank, dry
    micro-batches follow for ever and the loop ends the epoch when all ranks are dry.
    `first_batch_idx` is the `batch_idx` of the first micro-batch, not 0 after a resume.
    """

    num_batches: int | None
    first_batch_idx: int

    def total_samples(self, batch_idx: int) -> int:
        """Return the samples of that micro-batch over all ranks (a guess when unknown)."""
        ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


@runtime_checkable
class Accumulator(Protocol):
    """How many micro-batches make one optimizer step. Ships as `Accumulator`."""

    def window_size(self, epoch: int) -> int:
        """Return the number of micro-batches of a full window in this epoch."""
        ...

    def windows(self, data: EpochData, epoch: int, world_size: int) -> Iterator[Window]:
        """Cut the epoch into windows, the last one shorter if need be."""
        ...


@runtime_checkable
class CheckpointIO(Protocol):
    """Where checkpoints are kept. Ships as `CheckpointIO`, one file in a folder."""

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the checkpoint: whole, or not at all. Called on rank 0 only."""
        ...

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint onto the CPU without running any code of it."""
        ...

    def verify(self, path: Path) -> object:
        """Raise `CheckpointUnreadableError` if the checkpoint is not whole."""
        ...

    def remove(self, path: Path) -> None:
        """Delete the checkpoint if it is there. Called on rank 0 only."""
        ...

    def exists(self, path: Path) -> bool:
        """Return whether there is a checkpoint at the path."""
        ...


@runtime_checkable
class MetricObject(Protocol):
    """A metric that computes itself, as torchmetrics' do; for `Module.log`.

    One whose attribute `sync_on_compute` is true exchanges its states between ranks in `compute`.
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take one batch; called by the user."""
        ...

    def compute(self) -> Any:
        """Return the metric of all batches since `reset`, one number."""
        ...

    def reset(self) -> None:
        """Forget all batches."""
        ...


@runtime_checkable
class Logger(Protocol):
    """Where metrics go. Called on rank 0 only; sees each `step` at most once."""

    def start(self, run_dir: Path, *, resume_step: int | None) -> None:
        """Open files; with `resume_step`, drop rows after that global_step and go on."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row."""
        ...

    def log_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Write the hyperparameters, plain values."""
        ...

    def finish(self) -> None:
        """Write what is pending and close files."""
        ...


class TrainerView(Protocol):
    """What a callback may see and ask of the trainer."""

    should_stop: bool
    """Set to true to stop: all ranks stop at the same step."""
    should_save: bool
    """Set to true, on any rank, to be told at the next save point of all (`SavePoint.asked`)."""

    @property
    def global_step(self) -> int: ...
    @property
    def current_epoch(self) -> int: ...
    @property
    def max_epochs(self) -> int | None: ...
    @property
    def min_epochs(self) -> int: ...
    @property
    def total_steps(self) -> int | None: ...
    @property
    def log_every_n_steps(self) -> int: ...
    @property
    def num_training_batches(self) -> int | None: ...
    @property
    def num_evaluation_batches(self) -> int | None: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def run_dir(self) -> Path | None: ...
    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...
    @property
    def callback_metrics(self) -> Mapping[str, float]:
        """The newest agreed value of each metric, equal on all ranks."""
        ...

    @property
    def progress_metrics(self) -> Mapping[str, float]:
        """This rank's newest value of each metric logged with `prog_bar`; reads the device."""
        ...

    @property
    def checkpoint_io(self) -> CheckpointIO: ...

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add values to the row of the current global_step; the same on all ranks."""
        ...

    def save_checkpoint(self, *paths: str | Path) -> None:
        """Save a checkpoint, under several names if need be; call it on all ranks.

        Inside a window it happens at its end.
        """
        ...
