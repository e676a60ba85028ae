"""Every failure the library raises: one class each, with the code of its catalogue entry.

A message is one line, so it can be searched for: what happened, why it is an error, what to do.
The first letter of a code is its family:

    L launch   D data   S sync   P precision   C checkpoint   R recipe and settings   T training

What each code means stands in `minitrainer/pitfalls`, along with pitfalls that are no errors.
"""

from __future__ import annotations

from typing import ClassVar


class MinitrainerError(Exception):
    """Base of all errors of the library.

    Args:
        what: What happened, with names and numbers.
        why: Why that is an error.
        fix: What to do instead.
    """

    code: ClassVar[str] = "T00"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        text = " ".join(part for part in (self.what, self.why, self.fix) if part)
        return f"[{self.code}] {text}"


class UsageError(MinitrainerError):
    """The user asked for something that cannot be done; nothing was started (exit code 2)."""

    code = "R00"
    exit_code = 2


def error_class(code: str) -> type[MinitrainerError]:
    """Return the error class with this catalogue code, or `MinitrainerError` when unknown."""
    todo: list[type[MinitrainerError]] = [MinitrainerError]
    while todo:
        candidate = todo.pop()
        if candidate.code == code:
            return candidate
        todo.extend(candidate.__subclasses__())
    return MinitrainerError


# L: launch -------------------------------------------------------------------------------------


class IncompleteEnvironmentError(UsageError):
    """Only some of the variables that tell a process its rank are set, or they contradict."""

    code = "L01"


class DevicesError(UsageError):
    """More devices asked for than there are, fewer than one, or other than the launcher gave."""

    code = "L02"


class ForkUnsafeError(UsageError):
    """Local ranks cannot be forked from this process, because it has already used CUDA."""

    code = "L03"


class RankFailedError(MinitrainerError):
    """A rank raised or died; `why` holds its own traceback when it could write one."""

    code = "L04"


class ResultError(MinitrainerError):
    """What the ranks computed could not be handed back to the starting process."""

    code = "L05"


class PortError(UsageError):
    """The port that MASTER_PORT asks for cannot be used."""

    code = "L06"


class SharedDeviceError(MinitrainerError):
    """Two ranks compute on the same GPU."""

    code = "L07"


# D: data ---------------------------------------------------------------------------------------


class EmptyDataError(UsageError):
    """A loader has no samples, or a limit leaves none."""

    code = "D01"


class LoaderError(UsageError):
    """A loader is missing for the stage, or is of a kind that cannot be shared over ranks."""

    code = "D02"


class BatchSizeError(UsageError):
    """The number of samples of a batch cannot be told from its contents."""

    code = "D03"


# S: sync ---------------------------------------------------------------------------------------


class ModelMismatchError(MinitrainerError):
    """The ranks did not build the same model."""

    code = "S01"


class UnusedParametersError(MinitrainerError):
    """Parameters got no gradient in a step, which DDP does not allow unless told so."""

    code = "S02"


class MetricMismatchError(MinitrainerError):
    """One metric name was logged with two reductions, on one rank or on several."""

    code = "S03"


class BatchNormError(UsageError):
    """A batch norm layer is of a kind whose statistics cannot be taken over all ranks."""

    code = "S04"


class LayerOrderError(MinitrainerError):
    """Ranks ran different batch norm layers at the same time, which all have to run together."""

    code = "S05"


class StepsMismatchError(MinitrainerError):
    """Ranks stepped different optimizers by hand, or some stepped more often than others."""

    code = "S06"


# P: precision ----------------------------------------------------------------------------------


class PrecisionError(UsageError):
    """The precision is unknown, or cannot be used with this optimizer or device."""

    code = "P01"


# C: checkpoint ---------------------------------------------------------------------------------


class CheckpointNotFoundError(UsageError):
    """The checkpoint path does not exist."""

    code = "C01"


class CheckpointUnreadableError(UsageError):
    """The file is not a whole checkpoint, or would run code when unpickled."""

    code = "C02"


class CheckpointMismatchError(UsageError):
    """The checkpoint does not fit the module, the optimizers or the settings."""

    code = "C03"


class CheckpointWriteError(MinitrainerError):
    """The checkpoint could not be written: disk full, no permission, folder gone."""

    code = "C04"


class CheckpointContentError(MinitrainerError):
    """Something in the checkpoint is not a tensor or a plain value, and cannot be made one."""

    code = "C05"


# R: recipe and settings ------------------------------------------------------------------------


class SettingError(UsageError):
    """An argument of the Trainer, a callback or a plugin has a value that makes no sense."""

    code = "R01"


class RecipeError(UsageError):
    """The recipe has problems; all of them are listed, each on its own line.

    Args:
        problems: One line per problem, each starting with the key path.
    """

    code = "R02"

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(f"[{self.code}] {problem}" for problem in self.problems)


class CommandError(UsageError):
    """The command line is not understood."""

    code = "R03"


# T: training -----------------------------------------------------------------------------------


class OptimizersError(UsageError):
    """`configure_optimizers` returned something that is not an optimizer or a scheduler."""

    code = "T01"


class StepOutputError(MinitrainerError):
    """`training_step` returned something that is not a loss."""

    code = "T02"


class MonitorError(MinitrainerError):
    """A callback or scheduler monitors a metric that nobody logs."""

    code = "T03"


class LogError(MinitrainerError):
    """`self.log` was called with a value or at a place that has no meaning."""

    code = "T04"


class ModelTooLargeError(UsageError):
    """The model, its gradients and the optimizer's state do not fit on one device."""

    code = "T05"


class ManualOptimizationError(MinitrainerError):
    """An optimizer was stepped by hand in a way or at a place where that does not work."""

    code = "T06"
