"""The entries of the pitfall catalogue that the doctor points to."""

from __future__ import annotations

from typing import Final

INCOMPLETE_ENVIRONMENT: Final = "L01"
PORT_IN_USE: Final = "L06"
SHARED_DEVICE: Final = "L07"
LOCAL_RANK_ARGUMENT: Final = "L20"
EVERY_RANK_ON_GPU_0: Final = "L22"
GROUP_LEFT_OPEN: Final = "L23"
BACKEND_WITHOUT_DEVICE: Final = "L28"

PADDED_VALIDATION: Final = "D20"
SAME_ORDER_EVERY_EPOCH: Final = "D21"
DIVISIBLE_LENGTH: Final = "D23"
SHUFFLE_AND_SAMPLER: Final = "D31"
WORKERS_WITHOUT_ROOM: Final = "D34"

PAST_THE_WRAPPER: Final = "S20"
NO_SYNC_MISSING: Final = "S21"
LONELY_COLLECTIVE: Final = "S23"
VARIABLE: Final = "S29"
LATE_SYNC_BATCH_NORM: Final = "S30"

SCALER_NOT_UPDATED: Final = "P20"
CLIP_BEFORE_UNSCALE: Final = "P21"
DEPRECATED_AMP: Final = "P23"

RUN_DIRECTORY: Final = "C04"
MODULE_PREFIX: Final = "C21"
NO_MAP_LOCATION: Final = "C23"
SAVING_ON_EVERY_RANK: Final = "C26"

UNDIVIDED_LOSS: Final = "T21"
DOUBLE_STEP: Final = "T21"
KEPT_GRAPH: Final = "T25"
EMPTIED_CACHE: Final = "T25"

THREADS: Final = "F20"
DATA_PARALLEL: Final = "F22"
