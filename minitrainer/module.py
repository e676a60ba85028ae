"""`Module`: what a user must write is `training_step` and `configure_optimizers`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, Self

import torch

from minitrainer.errors import LogError, ManualOptimizationError
from minitrainer.protocols import Exchange, MetricObject, Stepping, TrainerView
from minitrainer.storage import read_checkpoint
from minitrainer.weights import load_weights

Reduction = Literal["mean", "sum", "max", "min"]


class LogSink(Protocol):
    """Where `Module.log` hands its values to."""

    def log(
        self,
        name: str,
        value: torch.Tensor | float | MetricObject,
        *,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Reduction,
        sync_dist: bool,
        batch_size: float | torch.Tensor | None,
        prog_bar: bool,
        logger: bool,
    ) -> None:
        """Take one value of one metric."""
        ...


class Hyperparameters(dict[str, Any]):
    """A dictionary whose entries can be read as attributes: `self.hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are {list(self)}") from None


class Module(torch.nn.Module, ABC):
    """A `torch.nn.Module` that knows its training step and its optimizers.

    Attributes:
        automatic_optimization: Set it to false, in the class or in `__init__`, to do backward and
            steps in `training_step`: `opt_g, opt_d = self.optimizers()`, then for each loss
            `opt.zero_grad()`, `self.manual_backward(loss)`, `opt.step()`. What `training_step`
            returns is then no loss. See `minitrainer/plugins/manual.py` for what holds on
            several ranks.
    """

    automatic_optimization: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._hparams = Hyperparameters()
        self._trainer: TrainerView | None = None
        self._sink: LogSink | None = None
        self._exchange: Exchange | None = None
        self._stepping: Stepping | None = None

    # What the user writes ----------------------------------------------------------------------

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean loss of one micro-batch.

        Args:
            batch: What the loader yields, on the device.
            batch_idx: Index of the micro-batch within the epoch, on this rank.

        Returns:
            A scalar tensor; or `{"loss": tensor, "weight": number}` where the weight is what the
            mean was taken over (tokens, valid pixels) instead of the number of samples; or None
            to skip the micro-batch (weight 0).
        """

    @abstractmethod
    def configure_optimizers(self) -> Any:
        """Return the optimizer, with a scheduler if wanted.

        Returns:
            An optimizer; or `(optimizer, scheduler)`; or `{"optimizer": ..., "lr_scheduler": ...}`
            where the scheduler is one or a mapping with `scheduler`, `interval` ("epoch", default,
            or "step"), `frequency` (default 1) and `monitor` (for ReduceLROnPlateau). With
            `automatic_optimization = False` also a list of optimizers or of such dictionaries, or
            `([optimizers], [schedulers])`; schedulers are then stepped by you alone.
        """

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Look at one validation batch; log what should be known of it."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Look at one test batch; log what should be known of it."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the prediction of one batch: `self(batch)` unless overridden."""
        return self(batch)

    # What the user calls -----------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: torch.Tensor | float | MetricObject,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        sync_dist: bool = True,
        batch_size: float | torch.Tensor | None = None,
        prog_bar: bool = False,
        logger: bool = True,
    ) -> None:
        """Log a metric; nothing is read from the device here.

        Args:
            name: Name of the metric. With both `on_step` and `on_epoch` it is logged as
                `name_step` and `name_epoch`.
            value: A scalar. It is detached and copied at once. Or an object with `update`,
                `compute` and `reset`, updated by you: it is computed and reset at the end of the
                epoch. One that exchanges its states between ranks itself (`sync_on_compute`, as
                torchmetrics' have) is exact over all ranks. Of any other, each rank's result is
                reduced by `reduce_fx`: the mean weighted by samples, which is exact for means
                over samples only.
            on_step: Log the value of a step (mean over the window's micro-batches and the ranks)
                every `log_every_n_steps`; by default in `training_step` only.
            on_epoch: Log the value over the epoch; by default everywhere but in `training_step`.
            reduce_fx: "mean" is weighted by the number of samples, over batches and ranks.
            sync_dist: Reduce over ranks. If false, the value is rank 0's, and loggers see the name
                with `@rank0` behind it.
            batch_size: What a mean weighs this value with, instead of the number of samples.
            prog_bar: Show the value in the progress bar.
            logger: Hand the value to the loggers.

        Raises:
            LogError: Called outside of a step, or with something that is not a scalar.
        """
        if self._sink is None:
            raise LogError(
                f"self.log({name!r}) was called outside of a run.",
                "There is no trainer that could take the value.",
                "Call it in training_step, validation_step or test_step.",
            )
        self._sink.log(
            name,
            value,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            sync_dist=sync_dist,
            batch_size=batch_size,
            prog_bar=prog_bar,
            logger=logger,
        )

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them if `configure_optimizers` made several.

        With `automatic_optimization = False` their `step` reduces gradients over ranks first; it
        returns whether the step was taken (AMP may skip it). Otherwise they are for looking at.
        """
        stepping = self._stepping
        return _one_or_all(self.trainer.optimizers if stepping is None else stepping.optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler to be stepped by hand, the list of several, or None.

        Raises:
            ManualOptimizationError: The trainer steps the schedulers.
        """
        return _one_or_all(self._by_hand("lr_schedulers").lr_schedulers)

    def manual_backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward on a loss, scaled for fp16; with `automatic_optimization = False`.

        Raises:
            ManualOptimizationError: The trainer runs backward.
        """
        self._by_hand("manual_backward").backward(loss, retain_graph=retain_graph)

    def clip_gradients(
        self, optimizer: Any, *, norm: float | None = None, value: float | None = None
    ) -> None:
        """Clip this optimizer's gradients in its coming step, once they are reduced over ranks.

        Args:
            optimizer: One of `self.optimizers()`.
            norm: The largest norm of all its gradients together.
            value: The largest size of each element.

        Raises:
            ManualOptimizationError: The trainer clips, by `gradient_clip_norm` and `_value`.
            SettingError: A bound is not above 0, or there is none.
        """
        self._by_hand("clip_gradients").clip(optimizer, norm, value)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters get gradients, until `untoggle_optimizer`.

        At the end of `training_step` at the latest everything is as it was.

        Raises:
            ManualOptimizationError: There is one optimizer, and the trainer steps it.
        """
        self._by_hand("toggle_optimizer").toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Let all parameters get gradients again that got them before `toggle_optimizer`."""
        self._by_hand("untoggle_optimizer").toggle(None)

    def save_hyperparameters(self, *, ignore: Iterable[str] = ()) -> None:
        """Keep the arguments of `__init__` in `self.hparams` and in every checkpoint.

        Call it in `__init__`. Arguments of subclasses' constructors are found as well.

        Args:
            ignore: Names of arguments to leave out, for example modules.
        """
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        left_out = set(ignore)
        while caller is not None and _is_constructor_of(self, caller):
            for name, value in _arguments(caller).items():
                if name not in left_out:
                    self._hparams.setdefault(name, value)
            caller = caller.f_back

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` kept."""
        return self._hparams

    @classmethod
    def load_from_checkpoint(
        cls, path: str | Path, *, strict: bool = True, **overrides: Any
    ) -> Self:
        """Build the module from the hyperparameters of a checkpoint and load its weights.

        Args:
            path: A checkpoint of minitrainer, or a file with a `state_dict`.
            strict: Refuse missing and unexpected keys.
            **overrides: Arguments for the constructor, over those in the checkpoint.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CheckpointUnreadableError: It is not a whole checkpoint, or would run code.
            CheckpointMismatchError: The weights do not fit.
        """
        checkpoint = read_checkpoint(Path(path))
        saved = checkpoint.get("hyperparameters") or {}
        module = cls(**{**saved, **overrides})
        load_weights(module, checkpoint, strict=strict)
        return module

    # What the user may ask ---------------------------------------------------------------------

    @property
    def trainer(self) -> TrainerView:
        """The trainer of the present run."""
        if self._trainer is None:
            raise LogError(
                f"{type(self).__name__}.trainer was asked for outside of a run.",
                fix="Pass the module to trainer.fit, validate, test or predict first.",
            )
        return self._trainer

    @property
    def global_step(self) -> int:
        """Optimizer steps really taken; 0 outside of a run."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def device(self) -> torch.device:
        """Where the first parameter or buffer lies."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    def _by_hand(self, name: str) -> Stepping:
        if self._stepping is None:
            raise ManualOptimizationError(
                f"self.{name} was called, but training_step does not step the optimizers.",
                "That is for a fit with automatic_optimization = False.",
                "Set it in the class, or leave backward and steps to the trainer.",
            )
        return self._stepping

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind when the module is copied or pickled (EMA, worker processes)."""
        return {
            **self.__dict__,
            "_trainer": None,
            "_sink": None,
            "_exchange": None,
            "_stepping": None,
        }


def _one_or_all(found: Sequence[Any]) -> Any:
    if not found:
        return None
    return found[0] if len(found) == 1 else list(found)


def _is_constructor_of(module: Module, frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name != "__init__" or code.co_argcount == 0:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is module


def _arguments(frame: FrameType) -> dict[str, Any]:
    names, _, keywords, values = inspect.getargvalues(frame)
    keyword_only = frame.f_code.co_varnames[
        frame.f_code.co_argcount : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    ]
    found = {name: values[name] for name in dict.fromkeys([*names, *keyword_only])}
    found.pop(frame.f_code.co_varnames[0])
    if keywords is not None:
        found.update(values[keywords])
    return {name: value for name, value in found.items() if not name.startswith("__")}
