"""Digests tell samples apart whatever batch they are in, and what they are padded with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from minitrainer.parity.samples import item_digest, sample_digests


def test_a_sample_has_the_same_digest_in_any_batch() -> None:
    images, labels = torch.randn(6, 3, 2), torch.arange(6)
    together = sample_digests((images, labels))
    apart = [*sample_digests((images[:2], labels[:2])), *sample_digests((images[2:], labels[2:]))]
    assert together == apart
    assert len(set(together)) == 6
    assert sample_digests((images, labels.flip(0))) != together, "labels belong to the sample"


def test_padding_does_not_count() -> None:
    short = {"ids": torch.tensor([[5, 6], [7, 0]]), "labels": torch.tensor([[1, 2], [3, -100]])}
    padded = {
        "ids": torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]]),
        "labels": torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100]]),
    }
    assert sample_digests(short) == sample_digests(padded)
    padded["ids"][1, 0] = 8
    assert sample_digests(short)[0] == sample_digests(padded)[0]
    assert sample_digests(short)[1] != sample_digests(padded)[1]


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


@pytest.mark.parametrize(
    "make",
    [
        lambda v: torch.tensor([float(v), 1.0]),
        lambda v: [torch.tensor([[float(v)], [1.0]])],
        lambda v: (torch.ones(2), [f"name {v}", "other"]),
        lambda v: Batch(torch.ones(2), [f"name {v}", "other"]),
        lambda v: {"a": np.array([v, 1])},
        lambda v: [torch.ones(2, 1), {"deep": (torch.tensor([v, 1]),)}],
        lambda v: torch.tensor([v, 1], dtype=torch.bfloat16),
        lambda v: torch.tensor([bool(v - 4), True]),
    ],
)
def test_all_kinds_of_batches(make: object) -> None:
    assert callable(make)
    four, five = sample_digests(make(4)), sample_digests(make(5))
    assert len(four) == len(five) == 2
    assert four == sample_digests(make(4))
    assert four[0] != five[0], "the first sample differs"
    assert four[1] == five[1], "the second does not"


def test_items() -> None:
    assert item_digest((torch.ones(2), "a")) == item_digest((torch.ones(2), "a"))
    assert item_digest((torch.ones(2), "a")) != item_digest((torch.ones(2), "b"))
    assert item_digest(object()) == item_digest(object()), "an address is not the item's value"
