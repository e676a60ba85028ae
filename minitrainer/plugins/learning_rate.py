"""The learning rate and the size of the global batch.

Pitfall: more ranks or more accumulation make the global batch larger, the learning rate stays as
it was found for a small one (or is scaled in silence), and training is slower or diverges.
Fix: a rule that is asked for, applied to each step whatever the scheduler, and said in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from minitrainer.errors import SettingError

Rule = Literal["linear", "sqrt"]


class LearningRateRule:
    """Multiply the learning rate by a function of global batch / base batch.

    "linear" multiplies by the ratio (Goyal et al. 2017, "Accurate, Large Minibatch SGD", found for
    SGD), "sqrt" by its square root (Krizhevsky 2014, "One weird trick for parallelizing
    convolutional neural networks"; often used with Adam). During the warm-up the factor goes in a
    straight line from 1 to its value, as Goyal et al. propose. The optimizer's own learning rates,
    and so the schedulers, never see the factor: it is put on for the step and taken off.

    Args:
        rule: "linear" or "sqrt".
        base_batch: The global batch, in samples, that the learning rate was found for.
        warmup_steps: Optimizer steps of the warm-up.

    Raises:
        SettingError: An argument makes no sense.
    """

    def __init__(self, rule: Rule = "linear", *, base_batch: int, warmup_steps: int = 0) -> None:
        if rule not in get_args(Rule):
            raise SettingError(f"rule={rule!r} is unknown.", fix="Use 'linear' or 'sqrt'.")
        for name, value, least in (
            ("base_batch", base_batch, 1),
            ("warmup_steps", warmup_steps, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(
                    f"LearningRateRule got {name}={value!r}.",
                    fix=f"Give a whole number of at least {least}.",
                )
        self.rule = rule
        self.base_batch = base_batch
        self.warmup_steps = warmup_steps

    def factor(self, global_batch: int, global_step: int | None = None) -> float:
        """Return what the learning rate is multiplied by.

        Args:
            global_batch: Samples per optimizer step over all ranks.
            global_step: Optimizer steps taken before this one; None for after the warm-up.
        """
        ratio = global_batch / self.base_batch
        full = ratio if self.rule == "linear" else ratio**0.5
        if global_step is None or global_step >= self.warmup_steps:
            return full
        return 1.0 + (full - 1.0) * (global_step + 1) / (self.warmup_steps + 1)

    @contextmanager
    def applied(
        self, optimizer: torch.optim.Optimizer, global_batch: int, global_step: int
    ) -> Iterator[None]:
        """Hold the optimizer's learning rates at their multiples while it steps."""
        factor = self.factor(global_batch, global_step)
        before = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate
