"""How a run is set up and taken down.

In this order: threads and device -> process group -> signals -> data (seeded alike on all ranks)
-> weights of the checkpoint -> batch norm over ranks -> move to the device -> wrap -> optimizers
-> rest of the checkpoint -> run directory and loggers -> random numbers of this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minitrainer import dist, dynamo, protocols
from minitrainer.callback import Callback
from minitrainer.data import (
    EvaluationData,
    TrainingData,
    derive_seed,
    preserved_rng,
    seed_everything,
)
from minitrainer.errors import LoaderError, SettingError
from minitrainer.evaluation import VALIDATION, Stage
from minitrainer.hooks import Hooks
from minitrainer.launch import (
    Environment,
    StopSignals,
    check_identities,
    device_identity,
    pick_device,
    set_threads,
)
from minitrainer.ledger import log_ledger
from minitrainer.logs import rank_logging
from minitrainer.memory import check_fits, estimate
from minitrainer.metrics import MetricStore
from minitrainer.module import Module
from minitrainer.optimization import configure
from minitrainer.plugins import DDPStrategy, LearningRateRule, ManualStrategy, SingleStrategy
from minitrainer.plugins.batchnorm import synced_batch_norm
from minitrainer.resume import Wish, find, find_some, read
from minitrainer.rows import Rows
from minitrainer.run import FitRun, Progress, Run, Sources, planned_steps
from minitrainer.rundir import make_run_dir, write_recipe
from minitrainer.settings import Settings, ValidationClock, windows_in
from minitrainer.snapshot import restore
from minitrainer.storage import plain
from minitrainer.weights import load_weights

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a trainer was put together from."""

    settings: Settings
    accelerator: Literal["auto", "cpu", "cuda"]
    devices: int | None
    strategy: protocols.Strategy | None
    sync_batchnorm: bool
    precision: protocols.Precision
    accumulator: protocols.Accumulator
    callbacks: Sequence[Callback]
    loggers: Sequence[protocols.Logger]
    checkpoint_io: protocols.CheckpointIO
    lr_rule: LearningRateRule | None
    run_dir: Path | None
    default_run_dir: Path
    writes: bool


@contextmanager
def fitting(
    parts: Parts,
    progress: Progress,
    view: protocols.TrainerView,
    *,
    module: Module,
    sources: Sources,
    wish: Wish | None,
    recipe: dict[str, Any] | None,
) -> Iterator[FitRun]:
    """Set up everything that the training loop needs, and take it down whatever happens."""
    with ExitStack() as stack:
        base = stack.enter_context(_rank(parts, view, module))
        settings, environment = parts.settings, base.environment
        if not module.automatic_optimization:
            _check_manual(parts)
        loaders = stack.enter_context(_opened(sources, "fit", settings.seed))
        data = _training_data(loaders, settings, environment)
        evaluation = _validation_data(loaders, module, settings, environment)
        window_size = parts.accumulator.window_size(0)
        windows = None if data.num_batches is None else windows_in(data.num_batches, window_size)
        clock = ValidationClock(settings, windows)
        progress.total_steps = planned_steps(settings, parts.accumulator, data.num_batches)
        progress.num_training_batches = data.num_batches
        if evaluation is not None:
            progress.num_evaluation_batches = evaluation.num_batches
        ckpt_path = find(wish, parts.checkpoint_io)
        checkpoint = None if ckpt_path is None else read(ckpt_path, parts.checkpoint_io)
        if checkpoint is not None:
            load_weights(module, checkpoint)
        stack.enter_context(
            synced_batch_norm(
                module,
                base.device,
                everywhere=parts.sync_batchnorm,
                timeout=base.strategy.timeout,
            )
        )
        check_fits(estimate(module), base.device, environment.local_world_size)
        stack.enter_context(_wrapped(base, module))
        optimization = configure(module)
        needed = estimate(module, optimization.optimizer)
        check_fits(needed, base.device, environment.local_world_size)
        progress.optimizers = optimization.optimizers
        parts.precision.setup(base.device)
        manual = None
        if not module.automatic_optimization:
            base.strategy = manual = ManualStrategy(
                base.strategy, precision=parts.precision, optimization=optimization
            )
            stack.enter_context(_wrapped(base, module))
        loggers = parts.loggers if environment.rank == 0 else ()
        run = FitRun(
            module=module,
            environment=environment,
            device=base.device,
            strategy=base.strategy,
            precision=parts.precision,
            signals=base.signals,
            hooks=base.hooks,
            evaluation_data=evaluation,
            accumulator=parts.accumulator,
            optimization=optimization,
            parameters=[p for p in module.parameters() if p.requires_grad],
            train_data=data,
            train_metrics=MetricStore(training=True, owner=module),
            clock=clock,
            rows=Rows(loggers),
            lr_rule=parts.lr_rule,
            global_batch=_global_batch(parts, data, environment),
            manual=manual,
            steps_have_schedulers=any(s.interval == "step" for s in optimization.schedulers),
        )
        seed_everything(derive_seed(settings.seed, "rank", environment.rank))
        if checkpoint is not None:
            restore(run, progress.state, progress.metrics, checkpoint, seed=settings.seed)
        if parts.writes:
            progress.run_dir = make_run_dir(
                parts.run_dir,
                parts.default_run_dir,
                ckpt_path,
                reuse=wish is not None and wish.starts_anew,
            )
            if environment.rank == 0 and recipe is not None:
                write_recipe(progress.run_dir, recipe)
            stack.enter_context(_started(loggers, progress, module, ckpt_path))
        module._sink = run.train_metrics
        log_ledger(
            run,
            settings,
            steps=progress.total_steps,
            needed=needed,
            run_dir=str(progress.run_dir) if progress.run_dir else "none",
        )
        if not module.training:
            module.train()
        for parameter in run.parameters:
            parameter.grad = None
        yield run


@contextmanager
def evaluating(
    parts: Parts,
    progress: Progress,
    view: protocols.TrainerView,
    *,
    stage: Stage,
    module: Module,
    sources: Sources,
    wish: Wish | None,
) -> Iterator[Run]:
    """Set up what validate, test and predict need, and take it down whatever happens."""
    if stage.name != "predict" and not stage.is_written(module):
        raise SettingError(
            f"{type(module).__name__} has no {stage.name}_step.",
            fix=f"Write one, or do not {stage.name} it.",
        )
    with ExitStack() as stack:
        run = stack.enter_context(_rank(parts, view, module))
        loaders = stack.enter_context(_opened(sources, stage.name, parts.settings.seed))
        if loaders.evaluation is None:
            raise _no_loader(stage.name)
        limits = {
            "validation": parts.settings.limit_val_batches,
            "test": parts.settings.limit_test_batches,
            "predict": parts.settings.limit_predict_batches,
        }
        run.evaluation_data = EvaluationData(
            loaders.evaluation,
            stage=stage.name,
            rank=run.environment.rank,
            world_size=run.environment.world_size,
            seed=parts.settings.seed,
            limit=limits[stage.name],
        )
        if wish is not None:
            load_weights(module, read(find_some(wish, parts.checkpoint_io), parts.checkpoint_io))
        stack.enter_context(_wrapped(run, module))
        parts.precision.setup(run.device)
        progress.num_evaluation_batches = run.evaluation_data.num_batches
        yield run


@contextmanager
def _rank(parts: Parts, view: protocols.TrainerView, module: Module) -> Iterator[Run]:
    """Take this process's place among the ranks, and let callbacks know of an exception."""
    environment = Environment.detect()
    set_threads(environment)
    device = pick_device(parts.accelerator, environment)
    strategy = parts.strategy
    if strategy is None:
        strategy = DDPStrategy() if environment.world_size > 1 else SingleStrategy()
    hooks = Hooks(parts.callbacks)
    with (
        dynamo.deferred(),
        environment.export(),
        dist.process_group(device, num_ranks=environment.world_size, timeout=strategy.timeout),
        rank_logging(environment.rank, environment.world_size, dist.first_to_say),
        StopSignals() as signals,
    ):
        if device.type == "cuda":
            check_identities(dist.gather_objects(device_identity(device)))
        module._trainer = view
        try:
            yield Run(
                module=module,
                environment=environment,
                device=device,
                strategy=strategy,
                precision=parts.precision,
                signals=signals,
                hooks=hooks,
                evaluation_data=None,
            )
        except BaseException as exception:
            for callback in hooks.exception:
                callback.on_exception(view, module, exception)
            raise
        finally:
            module._trainer = module._sink = None


@contextmanager
def _opened(sources: Sources, stage: str, seed: int) -> Iterator[Sources]:
    """Hold the loaders open; a datamodule that splits at random splits alike on all ranks."""
    try:
        with preserved_rng():
            seed_everything(derive_seed(seed, "setup"))
            loaders = sources.open(stage)
        yield loaders
    finally:
        sources.close(stage)


@contextmanager
def _wrapped(run: Run, module: Module) -> Iterator[None]:
    strategy = run.strategy
    strategy.setup(module, run.device)
    try:
        yield
    finally:
        strategy.teardown()


@contextmanager
def _started(
    loggers: Sequence[protocols.Logger],
    progress: Progress,
    module: Module,
    ckpt_path: Path | None,
) -> Iterator[None]:
    assert progress.run_dir is not None
    resume_step = None if ckpt_path is None else progress.state.global_step
    try:
        for logger in loggers:
            logger.start(progress.run_dir, resume_step=resume_step)
            if module.hparams:
                logger.log_hyperparameters(plain(dict(module.hparams)))
        yield
    finally:
        for logger in loggers:
            logger.finish()


def _training_data(loaders: Sources, settings: Settings, environment: Environment) -> TrainingData:
    if loaders.train is None:
        raise _no_loader("training")
    return TrainingData(
        loaders.train,
        rank=environment.rank,
        world_size=environment.world_size,
        seed=settings.seed,
        limit=settings.limit_train_batches,
    )


def _check_manual(parts: Parts) -> None:
    """Refuse what the trainer does around steps where `training_step` takes them."""
    settings = parts.settings
    epochs = range(min(settings.max_epochs or 1000, 1000))
    for name, is_set, by_hand in (
        (
            "accumulate",
            any(parts.accumulator.window_size(epoch) != 1 for epoch in epochs),
            "call opt.zero_grad() and opt.step() every so many batches",
        ),
        (
            "gradient_clip_norm",
            settings.gradient_clip_norm is not None,
            "call self.clip_gradients(opt, norm=...) before opt.step()",
        ),
        (
            "gradient_clip_value",
            settings.gradient_clip_value is not None,
            "call self.clip_gradients(opt, value=...) before opt.step()",
        ),
        ("lr_rule", parts.lr_rule is not None, "scale the rates in configure_optimizers"),
    ):
        if is_set:
            raise SettingError(
                f"{name} is set, but the module has automatic_optimization = False.",
                "Its training_step steps the optimizers, the trainer does nothing around that.",
                f"Drop the setting and do it by hand: {by_hand}.",
            )


def _global_batch(parts: Parts, data: TrainingData, environment: Environment) -> int:
    """Return the samples of a full window over all ranks, 0 when unknown."""
    if data.batch_size is None:
        if parts.lr_rule is not None:
            raise SettingError(
                "lr_rule needs the global batch, but the loader does not tell its batch size.",
                fix="Use a DataLoader with a batch_size, or drop lr_rule.",
            )
        return 0
    return data.batch_size * parts.accumulator.window_size(0) * environment.world_size


def _validation_data(
    loaders: Sources, module: Module, settings: Settings, environment: Environment
) -> EvaluationData | None:
    if loaders.evaluation is None or settings.limit_val_batches == 0:
        return None
    if not VALIDATION.is_written(module):
        _logger.warning(
            "[T29] There is a validation loader, but %s has no validation_step: "
            "nothing is validated.",
            type(module).__name__,
        )
        return None
    return EvaluationData(
        loaders.evaluation,
        stage="validation",
        rank=environment.rank,
        world_size=environment.world_size,
        seed=settings.seed,
        limit=settings.limit_val_batches,
    )


def _no_loader(stage: str) -> LoaderError:
    return LoaderError(
        f"There is no loader for {stage}.",
        fix=f"Pass one, or a DataModule whose {stage} loader is not None.",
    )
