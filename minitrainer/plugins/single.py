"""The no-op twin of `DDPStrategy` for one process.

Pitfall: code for one process and code for many drift apart, so that only one of them is tested.
Fix: both are strategies of the same shape, and the loop does not know which one it has.
"""

from __future__ import annotations

from typing import cast

import torch

from minitrainer.module import Module
from minitrainer.step import Ask, MicroBatch, StepOutput, WindowTotals, weigh


class SingleStrategy:
    """One process, one device, no communication."""

    timeout = 1800.0

    def setup(self, module: torch.nn.Module, device: torch.device) -> None:
        """Move the module to the device."""
        self._module = cast(Module, module.to(device))

    def training_step(self, micro_batch: MicroBatch, ask: Ask) -> StepOutput:
        """Run the user's `training_step` and weigh its loss."""
        if micro_batch.dry:
            return StepOutput(None, 0.0, None)
        return weigh(
            self._module.training_step(micro_batch.batch, micro_batch.batch_idx), micro_batch
        )

    def agree(self, local: WindowTotals) -> WindowTotals:
        """Return the totals: there is nobody to agree with."""
        return local

    def sync_buffers(self) -> None:
        """Do nothing: there is one copy."""

    def teardown(self) -> None:
        """Let go of the module."""
        del self._module
