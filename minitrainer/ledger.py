"""What is in effect, said once before the first step."""

from __future__ import annotations

import logging

from minitrainer.run import FitRun
from minitrainer.settings import Settings

_logger = logging.getLogger(__name__)


def log_ledger(run: FitRun, settings: Settings, *, steps: int | None, run_dir: str) -> None:
    """Log ranks, batches, steps, precision and size of the model; rank 0 only."""
    if run.environment.rank > 0:
        return
    ranks = run.environment.world_size
    window = run.accumulator.window_size(0)
    data = run.train_data
    sizes = f"{data.batch_size or '?'} per rank x {window} accumulated x {ranks} ranks"
    if data.batch_size is not None:
        sizes += f" = {data.batch_size * window * ranks}"
    trained = sum(p.numel() for p in run.parameters)
    everything = sum(p.numel() for p in run.module.parameters())
    frozen = f", {everything - trained:,} frozen" if everything > trained else ""
    samples = "?" if data.num_samples is None else f"{data.num_samples:,}"
    dropped = f" ({data.num_dropped:,} dropped)" if data.num_dropped else ""
    last = settings.max_epochs if settings.max_epochs is not None else "until max_steps"
    evaluated = run.evaluation_data
    validation = (
        "none"
        if evaluated is None
        else f"{'?' if evaluated.num_samples is None else f'{evaluated.num_samples:,}'} samples"
    )
    lines = (
        ("ranks", f"{ranks} on {run.device.type}, started by {run.environment.launcher}"),
        ("global batch", sizes),
        ("training", f"{samples} samples per epoch{dropped}, epochs: {last}"),
        ("validation", validation),
        ("steps", f"{'unknown' if steps is None else f'{steps:,}'} in all"),
        ("model", f"{trained:,} trained parameters{frozen}"),
        ("precision", getattr(run.precision, "precision", type(run.precision).__name__)),
        ("seed", str(settings.seed)),
        ("run directory", run_dir),
    )
    for name, text in lines:
        _logger.info("%-14s %s", name, text)
