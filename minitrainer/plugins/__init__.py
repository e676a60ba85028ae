"""What wraps the step: one DDP pitfall per file, none importing another."""

from minitrainer.plugins.accumulate import Accumulator
from minitrainer.plugins.amp import AMPPlugin
from minitrainer.plugins.checkpoint_io import CheckpointIO
from minitrainer.plugins.ddp import DDPStrategy
from minitrainer.plugins.learning_rate import LearningRateRule
from minitrainer.plugins.manual import ManualStrategy
from minitrainer.plugins.single import SingleStrategy

__all__ = [
    "AMPPlugin",
    "Accumulator",
    "CheckpointIO",
    "DDPStrategy",
    "LearningRateRule",
    "ManualStrategy",
    "SingleStrategy",
]
