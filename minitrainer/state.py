"""The counters of a run and what is saved of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from minitrainer.errors import CheckpointMismatchError


@dataclass
class TrainState:
    """Where a run is. At a window border this is all the loop needs to go on.

    Attributes:
        epoch: The epoch that runs, from 0; after its end, the one that comes.
        global_step: Optimizer steps really taken.
        batch_idx: Micro-batches done in this epoch, per rank.
        window_idx: Windows done in this epoch, skipped steps included.
        samples_seen: Samples of this epoch done, over all ranks: the data cursor.
        skipped_steps: Steps that AMP skipped, in the whole run.
    """

    epoch: int = 0
    global_step: int = 0
    batch_idx: int = 0
    window_idx: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0

    def start_next_epoch(self) -> None:
        """Count the epoch and put the cursor to the start of the next one."""
        self.epoch += 1
        self.batch_idx = self.window_idx = self.samples_seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, plain integers."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back counters.

        Raises:
            CheckpointMismatchError: A counter is missing.
        """
        for field in fields(self):
            if field.name not in state_dict:
                raise CheckpointMismatchError(
                    f"The checkpoint has no counter {field.name}.",
                    "It was not made by this version of minitrainer.",
                    "Load its weights only: Module.load_from_checkpoint.",
                )
            setattr(self, field.name, int(state_dict[field.name]))
