"""What a checkpoint holds, and how a run goes on from one.

A checkpoint is a dictionary of tensors and plain values:

    format_version, minitrainer_version, torch_version
    state_dict         the module's weights, under the names of the plain module
    hyperparameters    what `save_hyperparameters` kept
    counters           `TrainState`: epoch, global_step, the data cursor, ...
    optimizers, lr_schedulers, precision, metrics, callbacks
    seed, world_size, rng    one state of the random generators per rank
    epoch_metrics      of each rank, the sums of the metrics of the epoch so far
    data               how many samples an epoch, a global batch and a round of all ranks have
    recipe             the resolved recipe, if the run has one
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from minitrainer import dist
from minitrainer.callback import Callback
from minitrainer.data import collect_rng_states, restore_rng_states
from minitrainer.errors import CheckpointMismatchError
from minitrainer.protocols import Stateful
from minitrainer.run import FitRun, Metrics
from minitrainer.state import TrainState
from minitrainer.version import __version__
from minitrainer.weights import plain_state_dict

FORMAT_VERSION = 1

_logger = logging.getLogger(__name__)


def capture(
    run: FitRun,
    state: TrainState,
    metrics: Metrics,
    *,
    seed: int,
    recipe: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the checkpoint of a run at a window border; collective, complete on every rank."""
    run.strategy.sync_buffers()
    precision = run.precision.state_dict() if isinstance(run.precision, Stateful) else {}
    return {
        "format_version": FORMAT_VERSION,
        "minitrainer_version": __version__,
        "torch_version": str(torch.__version__),
        "state_dict": plain_state_dict(run.module),
        "hyperparameters": dict(run.module.hparams),
        "counters": state.state_dict(),
        **run.optimization.state_dict(),
        "precision": precision,
        "metrics": {name: list(entry) for name, entry in metrics.values.items()},
        "callbacks": callback_states(run.hooks.callbacks),
        "seed": seed,
        "world_size": run.environment.world_size,
        "rng": dist.gather_objects(collect_rng_states(run.device)),
        "epoch_metrics": dist.gather_objects(run.train_metrics.state()),
        "data": _data(run),
        "recipe": recipe,
    }


def restore(
    run: FitRun, state: TrainState, metrics: Metrics, checkpoint: dict[str, Any], *, seed: int
) -> None:
    """Take everything but the weights back from a checkpoint.

    On another number of ranks the random generators cannot go on where they were; they start
    anew, each rank differently.

    Raises:
        CheckpointMismatchError: It is no checkpoint of a run, or of another kind of run.
    """
    needed = ("counters", "optimizers", "lr_schedulers", "precision", "callbacks", "rng", "seed")
    missing = [key for key in needed if key not in checkpoint]
    if missing:
        raise CheckpointMismatchError(
            f"The checkpoint has no {', '.join(missing)}.",
            "It holds weights, but a run cannot go on from it.",
            "Load the weights with Module.load_from_checkpoint and start anew.",
        )
    if checkpoint["seed"] != seed:
        raise CheckpointMismatchError(
            f"The checkpoint's run has seed {checkpoint['seed']}, this one {seed}.",
            "The order of the samples depends on the seed: some would be seen twice, some never.",
            f"Resume with seed={checkpoint['seed']}.",
        )
    state.load_state_dict(checkpoint["counters"])
    run.optimization.load_state_dict(checkpoint)
    if isinstance(run.precision, Stateful):
        run.precision.load_state_dict(checkpoint["precision"])
    metrics.values = {
        name: (float(value), int(updates))
        for name, (value, updates) in checkpoint.get("metrics", {}).items()
    }
    load_callback_states(run.hooks.callbacks, checkpoint["callbacks"])
    place = run.environment
    run.train_metrics.restore(checkpoint.get("epoch_metrics", [[]]), place.rank, place.world_size)
    _adapt(run, state, checkpoint.get("data", {}))
    states = checkpoint["rng"]
    if len(states) == run.environment.world_size:
        restore_rng_states(states[run.environment.rank], run.device)
    else:
        _logger.info(
            "The checkpoint was made on %d ranks, this run has %d: random numbers (dropout) start "
            "anew; the remaining samples of the epoch are the same.",
            len(states),
            run.environment.world_size,
        )


def _data(run: FitRun) -> dict[str, int | None]:
    return {
        "num_samples": run.train_data.num_samples,
        "global_batch": run.global_batch,
        "round": (run.train_data.batch_size or 0) * run.environment.world_size,
    }


def _adapt(run: FitRun, state: TrainState, saved: dict[str, int | None]) -> None:
    """Say what has changed in data and layout, and count batches as this run deals them."""
    now = _data(run)
    changed = {name for name, value in saved.items() if value != now[name]}
    if "global_batch" in changed:
        _logger.warning(
            "[C28] The global batch is %s now and was %s. The samples of the epoch that are left "
            "are trained as they would have been, in steps of another size: their number changes, "
            "the learning rate does not.",
            now["global_batch"] or "unknown",
            saved["global_batch"] or "unknown",
        )
    if "num_samples" in changed:
        _logger.warning(
            "[C29] An epoch has %s samples now and had %s. Their order is another one: in the "
            "epoch that was begun, some are seen twice and some not at all.",
            now["num_samples"],
            saved["num_samples"],
        )
    if changed and now["round"] and now["global_batch"]:
        state.batch_idx = -(-state.samples_seen // now["round"])
        state.window_idx = -(-state.samples_seen // now["global_batch"])


def callback_states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the states of the callbacks that have one, by class name and position among equals."""
    states = {name: callback.state_dict() for name, callback in _named(callbacks)}
    return {name: state for name, state in states.items() if state}


def load_callback_states(callbacks: Sequence[Callback], states: dict[str, Any]) -> None:
    """Give each callback its state back, where there is one."""
    for name, callback in _named(callbacks):
        if name in states:
            callback.load_state_dict(states[name])


def _named(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    seen: dict[str, int] = {}
    named = []
    for callback in callbacks:
        name = type(callback).__qualname__
        seen[name] = seen.get(name, 0) + 1
        named.append((name if seen[name] == 1 else f"{name}-{seen[name]}", callback))
    return named
