"""The entries of the pitfall catalogue that the examination of a recipe points to."""

from __future__ import annotations

from typing import Final

PADDED_VALIDATION: Final = "D20"
DIVISIBLE_LENGTH: Final = "D23"
SAME_RANDOMNESS: Final = "D27"
ORDER_OF_A_RANK: Final = "D30"
DATA_OF_A_RANK: Final = "D32"
DATA_WITH_MEMORY: Final = "D33"

OTHER_MODELS: Final = "S01"
UNEVEN_SHARES: Final = "S25"
OTHER_BUFFERS: Final = "S28"
SMALL_BATCH_NORM: Final = "S30"

NO_ROOM_FOR_CHECKPOINTS: Final = "C04"

SUM_LOSS: Final = "T31"

DATA_WAIT: Final = "F23"
