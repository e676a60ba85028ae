"""What is in effect, said once before the first step."""

from __future__ import annotations

import logging

import torch

from minitrainer import dist
from minitrainer.data import coverage
from minitrainer.memory import MemoryEstimate
from minitrainer.run import FitRun
from minitrainer.settings import Settings, windows_in

_logger = logging.getLogger(__name__)


def log_ledger(
    run: FitRun,
    settings: Settings,
    *,
    steps: int | None,
    needed: MemoryEstimate,
    run_dir: str,
) -> None:
    """Log ranks, batches, steps, learning rate, size of the model and memory; rank 0 only."""
    if run.environment.rank > 0:
        return
    evaluated = run.evaluation_data
    validation = "none" if evaluated is None else f"{_count(evaluated.num_samples)} samples"
    lines = (
        ("ranks", _ranks(run)),
        ("global batch", _global_batch(run)),
        ("training", _training(run)),
        ("validation", validation),
        ("steps", _steps(run, settings, steps)),
        ("optimizer", ", ".join(map(_optimizer, run.optimization.optimizers))),
        ("learning rate", _learning_rate(run)),
        ("model", _model(run)),
        ("memory", str(needed)),
        ("precision", getattr(run.precision, "precision", type(run.precision).__name__)),
        ("seed", str(settings.seed)),
        ("run directory", run_dir),
    )
    for name, text in lines:
        _logger.info("%-14s %s", name, text)


def log_coverage(run: FitRun) -> None:
    """Log that the shares of the ranks are disjoint and complete; call it on all ranks.

    Says something, in one collective, at the end of the first epoch that was trained from its
    start, and no more afterwards.
    """
    trained = run.train_data.share()
    if trained is None:
        return
    evaluated = None if run.evaluation_data is None else run.evaluation_data.share()
    train, validation = zip(*dist.gather_objects([trained, evaluated]), strict=True)
    if run.environment.rank > 0:
        return
    covered = {"train": coverage(train)}
    if evaluated is not None:
        covered["validation"] = coverage(validation)
    text = ", ".join(f"{name} {part}" for name, part in covered.items())
    _logger.info("%-14s %s", "samples", text)
    for name, part in covered.items():
        if not part.whole:
            _logger.warning(
                "[D30] The %d %s samples that the ranks were dealt are not those of one order: "
                "some were lost or repeated. The sampler has a source of randomness that is not "
                "seeded, or looks at the rank. Give it a set_epoch that seeds it.",
                part.dealt,
                name,
            )


def _ranks(run: FitRun) -> str:
    place = run.environment
    nodes = -(-place.world_size // place.local_world_size)
    where = f" on {nodes} machines" if nodes > 1 else ""
    return f"{place.world_size} on {run.device.type}{where}, started by {place.launcher}"


def _global_batch(run: FitRun) -> str:
    size, window = run.train_data.batch_size, run.accumulator.window_size(0)
    text = f"{_count(size)} per rank x {window} accumulated x {run.environment.world_size} ranks"
    return text if size is None else f"{text} = {run.global_batch:,}"


def _training(run: FitRun) -> str:
    dropped = run.train_data.num_dropped
    text = f"{_count(run.train_data.num_samples)} samples per epoch"
    return f"{text}, {dropped:,} dropped in each" if dropped else f"{text}, none dropped"


def _steps(run: FitRun, settings: Settings, steps: int | None) -> str:
    batches = run.train_data.num_batches
    per_epoch = None
    if batches is not None:
        per_epoch = windows_in(batches, run.accumulator.window_size(0))
    epochs = "" if settings.max_epochs is None else f" in {settings.max_epochs} epochs"
    return f"{_count(per_epoch)} per epoch, {_count(steps)} in all{epochs}"


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}{' (fused)' if fused else ''}"


def _learning_rate(run: FitRun) -> str:
    groups = [group for o in run.optimization.optimizers for group in o.param_groups]
    rates = dict.fromkeys(f"{float(group['lr']):.4g}" for group in groups)
    text, rule = ", ".join(rates), run.lr_rule
    if rule is None:
        return f"{text}, as given: no rule follows the global batch"
    warmup = f", after {rule.warmup_steps} steps of warm-up" if rule.warmup_steps else ""
    return (
        f"{text} x {rule.factor(run.global_batch):.4g} ({rule.rule} rule: global batch "
        f"{run.global_batch:,} / {rule.base_batch:,}{warmup})"
    )


def _model(run: FitRun) -> str:
    trained = sum(p.numel() for p in run.parameters)
    everything = sum(p.numel() for p in run.module.parameters())
    frozen = f", {everything - trained:,} frozen" if everything > trained else ""
    return f"{trained:,} trained parameters{frozen}"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
