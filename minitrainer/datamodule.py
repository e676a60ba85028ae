"""`DataModule`: the loaders of a run in one place, named by a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class DataModule:
    """Loaders for the four stages; return plain loaders, the trainer shares them over ranks."""

    def prepare_data(self) -> None:
        """Download or write files; called on local rank 0 only, before `setup`."""

    def setup(self, stage: str) -> None:
        """Make datasets; called on every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def train_dataloader(self) -> Iterable[Any] | None:
        """Return the training loader."""
        return None

    def val_dataloader(self) -> Iterable[Any] | None:
        """Return the validation loader."""
        return None

    def test_dataloader(self) -> Iterable[Any] | None:
        """Return the test loader."""
        return None

    def predict_dataloader(self) -> Iterable[Any] | None:
        """Return the loader whose batches `predict_step` gets."""
        return None

    def teardown(self, stage: str) -> None:
        """Clean up; called on every rank, also after an exception."""
