"""Automatic mixed precision.

Pitfall: gradients are clipped while still scaled, and scheduler, counters and averages go on when
the scaler skipped the step; the scaler's state is forgotten in the checkpoint. With two steps in
one forward context, the second forward uses autocast's copies of the weights from before the first.
Fix: one component owns the order (unscale once per window, step or skip, update), says whether
the step was taken, forgets the copies, and has a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from minitrainer.errors import CheckpointMismatchError, PrecisionError

PrecisionName = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AMPPlugin:
    """Run the forward pass in a lower precision; parameters and gradients stay fp32.

    Args:
        precision: "fp32" (nothing to do), "bf16" (autocast) or "fp16" (autocast and loss scaling).
        init_scale: First loss scale; fp16 only, like the three below.
        growth_factor: What the scale is multiplied with after `growth_interval` good steps.
        backoff_factor: What the scale is multiplied with after a skipped step.
        growth_interval: Number of steps in a row without infinities before the scale grows.

    Raises:
        PrecisionError: Unknown precision, or factors that do not grow and shrink.
    """

    def __init__(
        self,
        precision: PrecisionName = "bf16",
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if precision not in _DTYPES:
            raise PrecisionError(
                f"precision={precision!r} is unknown.", fix=f"Use one of {', '.join(_DTYPES)}."
            )
        if not (growth_factor > 1.0 and 0.0 < backoff_factor < 1.0 and growth_interval >= 1):
            raise PrecisionError(
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"growth_interval={growth_interval}.",
                "A scale that does not shrink after an overflow skips steps for ever.",
                "Use a growth_factor above 1, a backoff_factor between 0 and 1, an interval >= 1.",
            )
        self.precision = precision
        self._scaler_settings: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        self._autocast: AbstractContextManager[Any] = nullcontext()
        self._scaler: torch.amp.GradScaler | None = None
        self._moves: list[float] | None = None

    def setup(self, device: torch.device) -> None:
        """Make autocast and, for fp16, the scaler for this device."""
        if self.precision == "fp32":
            return
        self._autocast = torch.autocast(device.type, dtype=_DTYPES[self.precision])
        if self.precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type, **self._scaler_settings)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass; the same object each time."""
        return self._autocast

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward on the loss, scaled for fp16."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward(retain_graph=retain_graph)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale; once per window, before clipping and logging."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer unless a gradient overflowed; return whether it was stepped.

        After the all-reduce every rank has the same gradients, so all decide alike.
        """
        # Several optimizers may step within one context of `autocast`, which keeps the weights
        # that it has cast: a forward after a step would use those from before.
        torch.clear_autocast_cache()
        scaler = self._scaler
        if scaler is None:
            optimizer.step()
            return True
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        after = scaler.get_scale()
        if self._moves is not None and after != before:
            self._moves.append(after)
            scaler.update(before)
        # The public sign of a skipped step: `GradScaler.step` returns None in both cases.
        return bool(after >= before)

    @contextmanager
    def one_scale(self) -> Iterator[None]:
        """Keep the loss scale while several optimizers step; it moves once, at the end.

        Gradients that wait for their step were made with the scale that they are divided by.
        """
        self._moves = []
        try:
            yield
        finally:
            moves, self._moves = self._moves, None
            if self._scaler is not None and moves:
                lowest = min(moves)
                shrinks = lowest < self._scaler.get_scale()
                self._scaler.update(lowest if shrinks else max(moves))

    def state_dict(self) -> dict[str, Any]:
        """Return the precision and the scaler's state (scale, growth tracker)."""
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return {"precision": self.precision, "scaler": scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back a state; a scaler's state is left out where there is no scaler now.

        Raises:
            CheckpointMismatchError: fp16 now, but the checkpoint has no scaler state.
        """
        if self._scaler is None:
            return
        if not state_dict.get("scaler"):
            raise CheckpointMismatchError(
                f"The checkpoint was made with precision {state_dict.get('precision')}.",
                "It holds no state of the fp16 loss scaler.",
                "Resume with the same precision, or start anew from its weights.",
            )
        self._scaler.load_state_dict(state_dict["scaler"])
