"""The way of the data: order, shares of the ranks, seeds, moving batches to the device."""

from minitrainer.data.digest import Coverage, Digest, Share, coverage
from minitrainer.data.evaluation import EvaluationData
from minitrainer.data.sampling import draw_order
from minitrainer.data.seeding import (
    collect_rng_states,
    derive_seed,
    preserved_rng,
    restore_rng_states,
    seed_everything,
)
from minitrainer.data.training import TrainingData
from minitrainer.data.transfer import count_samples, move_to_device

__all__ = [
    "Coverage",
    "Digest",
    "EvaluationData",
    "Share",
    "TrainingData",
    "collect_rng_states",
    "count_samples",
    "coverage",
    "derive_seed",
    "draw_order",
    "move_to_device",
    "preserved_rng",
    "restore_rng_states",
    "seed_everything",
]
