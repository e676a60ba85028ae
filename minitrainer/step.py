"""One micro-batch and what becomes of it: the values that loop, strategies and data exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from minitrainer.errors import StepOutputError


class MicroBatch(NamedTuple):
    """One call of `training_step` on one rank.

    `dry` says that this rank has no samples left while others have: it takes part with weight 0.
    `samples` is the number of samples of this rank. `share` is this rank's part of the weight the
    window is expected to have, if all ranks had the same: the loss counts weight / share.
    `sync` is true for the last micro-batch of its window.
    """

    batch: Any
    batch_idx: int
    samples: int
    dry: bool = False
    share: float = 1.0
    sync: bool = True


class Ask(NamedTuple):
    """What this rank asks of all ranks at the coming window border: 1.0 to ask, else 0.0."""

    stop: float = 0.0
    save: float = 0.0


class StepOutput(NamedTuple):
    """A micro-batch after the forward pass.

    `loss` is ready for backward (weighted, not scaled for AMP); `weight` is what it counts in the
    mean over window and ranks; `outputs` is what the user's `training_step` returned.
    """

    loss: torch.Tensor | None
    weight: float
    outputs: Any


class WindowTotals(NamedTuple):
    """Sums over the micro-batches of a window and over all ranks."""

    weight: float
    samples: float
    stop: float = 0.0
    save: float = 0.0


class SavePoint(NamedTuple):
    """A place where a checkpoint is consistent, the same on all ranks.

    Attributes:
        epoch_end: Whether the epoch has ended and nothing of it is left.
        validated: Whether a validation ran since the last save point.
        asked: Whether a rank has set `trainer.should_save` since the last save point.
    """

    epoch_end: bool
    validated: bool
    asked: bool


class StepResult(NamedTuple):
    """What one window did; scheduler, counters, log and callbacks all read this one.

    `taken` is false when AMP skipped the step or when the window had no weight at all (`empty`).
    `grad_norm` is the norm before clipping, a tensor on the device, when clipping by norm is on.
    """

    taken: bool
    empty: bool
    totals: WindowTotals
    grad_norm: torch.Tensor | None = None


def weigh(outputs: Any, micro_batch: MicroBatch) -> StepOutput:
    """Turn what `training_step` returned into a loss weighted for its window.

    The gradient of a global batch is sum(weight_i * grad_i) / sum(weight_i) over all micro-batches
    of all ranks. A weight is the number of samples, or what the user returned as `weight`.

    Args:
        outputs: A scalar mean loss, a mapping with "loss" and perhaps "weight", or None to skip.
            A weight that is a tensor on a GPU is read here, which waits for the device; a plain
            number is better.
        micro_batch: The micro-batch the loss belongs to.

    Raises:
        StepOutputError: The loss is missing, not a tensor or not a scalar.
    """
    if outputs is None:
        return StepOutput(None, 0.0, None)
    loss, weight = outputs, float(micro_batch.samples)
    if isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise _not_a_loss(outputs)
        loss = outputs["loss"]
        if outputs.get("weight") is not None:
            weight = float(outputs["weight"])
        if loss is None or weight == 0:
            # A mean over nothing is 0/0, and so is its gradient: it is left out, not multiplied.
            return StepOutput(None, 0.0, outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise _not_a_loss(outputs)
    # The usual case, equal micro-batches and no accumulation, costs no operation at all.
    factor = weight / micro_batch.share
    return StepOutput(loss if factor == 1.0 else loss * factor, weight, outputs)


def zero_loss(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return a zero whose backward gives every parameter a zero gradient.

    A rank without samples, or whose `training_step` returned None, takes part with it in the
    reduction of the gradients, so that the others do not wait for ever.
    """
    loss: torch.Tensor = _ZeroLoss.apply(*[p for p in parameters if p.requires_grad])
    return loss


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def _not_a_loss(outputs: Any) -> StepOutputError:
    shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else ""
    return StepOutputError(
        f"training_step returned {type(outputs).__name__}{shape}.",
        "The loss must be one number with a graph behind it.",
        'Return a scalar tensor, {"loss": tensor, "weight": number}, or None to skip the batch.',
    )
