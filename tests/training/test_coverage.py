"""The line that says that every sample was dealt once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler, WeightedRandomSampler

from tests.ranks import run_ranks
from tests.toys import Lin, loader, quiet


class Validated(Lin):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("value", batch.mean())


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("samples") or "D30" in text:
            self.lines.append(text)


def heard(train: Any, validation: Any = None, **settings: Any) -> list[str]:
    """What a fit says of the samples, on this rank."""
    logger, handler = logging.getLogger("minitrainer"), Heard()
    logger.addHandler(handler)
    try:
        quiet(max_epochs=3).fit(Validated(lr=0.01), train, validation, **settings)
    finally:
        logger.removeHandler(handler)
    return handler.lines


class ByRank(Sampler[int]):
    """Shuffles by something that differs between ranks."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        order = list(range(8))
        return iter(order[::-1] if os.environ.get("RANK") == "1" else order)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_epoch_ends_with_a_count_of_its_samples(ranks: int) -> None:
    def rank() -> list[str]:
        return heard(loader(range(21), batch_size=2, shuffle=True), loader(range(7), batch_size=2))

    said = run_ranks(rank, world_size=ranks)
    assert said[0] == ["samples        train 21/21 unique, validation 7/7 unique"]
    assert said[1:] == [[]] * (ranks - 1)


def test_samples_drawn_with_replacement_are_not_called_unique() -> None:
    sampler = WeightedRandomSampler([1.0, 0.0, 0.0], 5)
    assert heard(loader(range(3), sampler=sampler)) == [
        "samples        train 5 drawn, 1/3 different"
    ]


def test_ranks_that_do_not_agree_on_the_order_are_warned_of() -> None:
    def rank() -> list[str]:
        return heard(loader(range(8), batch_size=2, sampler=ByRank()))

    samples, warning = run_ranks(rank)[0]
    assert samples == "samples        train 8 dealt, not those of one order"
    assert warning.startswith("[D30] The 8 train samples that the ranks were dealt are not those")
