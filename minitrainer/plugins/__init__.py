"""What wraps the step: one DDP pitfall per file, none importing another."""

from minitrainer.plugins.accumulate import Accumulator
from minitrainer.plugins.amp import AMPPlugin
from minitrainer.plugins.checkpoint_io import CheckpointIO
from minitrainer.plugins.ddp import DDPStrategy
from minitrainer.plugins.single import SingleStrategy

__all__ = ["AMPPlugin", "Accumulator", "CheckpointIO", "DDPStrategy", "SingleStrategy"]
