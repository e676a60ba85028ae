"""What observes the loop: one callback per file, none importing another."""

from minitrainer.callbacks.checkpoint import ModelCheckpoint
from minitrainer.callbacks.early_stopping import EarlyStopping
from minitrainer.callbacks.lr_monitor import LearningRateMonitor
from minitrainer.callbacks.progress import ProgressBar

__all__ = ["EarlyStopping", "LearningRateMonitor", "ModelCheckpoint", "ProgressBar"]
