"""minitrainer: one recipe, any number of ranks, the same result.

    import minitrainer as mt

    class Net(mt.Module): ...
    mt.Trainer(max_epochs=10, devices=2).fit(Net(), train_loader, val_loader)

Names are imported when they are first asked for, so that `minitrainer --help` and a misspelt
command line need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minitrainer.version import __version__

if TYPE_CHECKING:
    from minitrainer.callback import Callback
    from minitrainer.callbacks import (
        EarlyStopping,
        LearningRateMonitor,
        ModelCheckpoint,
        ProgressBar,
    )
    from minitrainer.data import seed_everything
    from minitrainer.datamodule import DataModule
    from minitrainer.errors import MinitrainerError
    from minitrainer.launch import Interrupted
    from minitrainer.loggers import CSVLogger
    from minitrainer.module import Module
    from minitrainer.plugins import (
        Accumulator,
        AMPPlugin,
        CheckpointIO,
        DDPStrategy,
        LearningRateRule,
        SingleStrategy,
    )
    from minitrainer.step import SavePoint, StepResult
    from minitrainer.trainer import Trainer

__all__ = [
    "AMPPlugin",
    "Accumulator",
    "CSVLogger",
    "Callback",
    "CheckpointIO",
    "DDPStrategy",
    "DataModule",
    "EarlyStopping",
    "Interrupted",
    "LearningRateMonitor",
    "LearningRateRule",
    "MinitrainerError",
    "ModelCheckpoint",
    "Module",
    "ProgressBar",
    "SavePoint",
    "SingleStrategy",
    "StepResult",
    "Trainer",
    "__version__",
    "seed_everything",
]

_HOMES = {
    "callback": ["Callback"],
    "callbacks": ["EarlyStopping", "LearningRateMonitor", "ModelCheckpoint", "ProgressBar"],
    "data": ["seed_everything"],
    "datamodule": ["DataModule"],
    "errors": ["MinitrainerError"],
    "launch": ["Interrupted"],
    "loggers": ["CSVLogger"],
    "module": ["Module"],
    "plugins": [
        "AMPPlugin",
        "Accumulator",
        "CheckpointIO",
        "DDPStrategy",
        "LearningRateRule",
        "SingleStrategy",
    ],
    "step": ["SavePoint", "StepResult"],
    "trainer": ["Trainer"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
