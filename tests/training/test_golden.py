"""The golden test of promise 1: the same weights in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import minitrainer as mt
from tests.ranks import run_ranks
from tests.toys import quiet

GLOBAL_BATCH = 16
WIDTH = 6
CASES = [
    (accumulate, size, tokens)
    for accumulate in (1, 2, 4)
    for size in (64, 61)
    for tokens in (False, True)
]


class Net(mt.Module):
    """A small net on rows of which some entries are no tokens (negative)."""

    def __init__(self, *, tokens: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = tokens
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        valid = batch >= 0
        losses = (self.net(batch[..., None])[..., 0] - batch.sin()).square()
        if self.tokens:
            return {"loss": losses[valid].mean(), "weight": int(valid.sum())}
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def rows(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = torch.rand(size, WIDTH, generator=generator, dtype=torch.float64)
    # Between no token at all and six in a row, so that the means of the parts tell nothing.
    lengths = torch.randint(0, WIDTH + 1, (size,), generator=generator)
    data[torch.arange(WIDTH) >= lengths[:, None]] = -1.0
    return list(data)


def weights(ranks: int, accumulate: int, size: int, *, tokens: bool) -> list[float]:
    module = Net(tokens=tokens)
    batch_size = GLOBAL_BATCH // (ranks * accumulate)
    data = DataLoader(rows(size), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    quiet(max_epochs=2, accumulate=accumulate, gradient_clip_norm=0.5).fit(module, data)
    return [value for p in module.parameters() for value in p.flatten().tolist()]


@pytest.fixture(scope="module")
def reference() -> dict[tuple[int, bool], list[float]]:
    """One process, the whole global batch in one micro-batch."""
    return {
        (size, tokens): weights(1, 1, size, tokens=tokens)
        for size in (64, 61)
        for tokens in (False, True)
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_ends_with_the_same_weights(
    ranks: int, reference: dict[tuple[int, bool], list[float]]
) -> None:
    """Ranks 1, 2, 4 x accumulation 1, 2, 4 x tail or none x mean over samples or tokens."""

    def rank() -> list[list[float]]:
        return [weights(ranks, *case[:2], tokens=case[2]) for case in CASES]

    results = run_ranks(rank, world_size=ranks) if ranks > 1 else [rank()]
    for result in results:
        for (accumulate, size, tokens), found in zip(CASES, result, strict=True):
            expected = reference[size, tokens]
            assert found == pytest.approx(expected, abs=1e-9), (accumulate, size, tokens)
            assert found == results[0][CASES.index((accumulate, size, tokens))]


def test_plain_ddp_falls_in() -> None:
    """What the usual loop does with tokens: a mean of means, which depends on the split."""
    data = torch.stack(rows(GLOBAL_BATCH))
    valid = data >= 0
    whole = data[valid].mean()
    halves = [part[part >= 0].mean() for part in data.chunk(2)]
    assert abs(sum(halves) / 2 - whole) > 1e-3
