"""Precision: what a hand-written loop with GradScaler gets wrong (see also tests/training)."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.pitfalls.plain import codes


def test_plain_clipping_of_scaled_gradients() -> None:
    """P21: a gradient of 3 clipped to 1 while scaled by 1024 moves w by 1/1024."""
    w = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    scaler.scale(3 * w).backward()
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    assert w.item() == pytest.approx(-1 / 1024, rel=1e-5)


def test_plain_resume_without_the_scaler() -> None:
    """P22: the scale that was found is forgotten, and the first steps overflow again."""
    w = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def steps(scaler: torch.amp.GradScaler, number: int) -> int:
        """Take steps whose scaled loss is a float16; return how many were skipped."""
        skipped = 0
        for _ in range(number):
            before = scaler.get_scale()
            (scaler.scale(w * 1e3).half().float()).backward()
            w.grad.copy_(w.grad.half())  # what float16 activations do to it
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += scaler.get_scale() < before
        return skipped

    scaler = torch.amp.GradScaler("cpu")
    assert steps(scaler, 20) > 0
    assert steps(scaler, 5) == 0
    assert steps(torch.amp.GradScaler("cpu"), 20) > 0


def test_plain_old_names_are_deprecated() -> None:
    """P23: torch.cuda.amp warns, and its scaler switches itself off without a GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.amp.GradScaler()
        torch.cuda.amp.autocast()
    messages = [str(w.message) for w in caught if w.category is FutureWarning]
    assert len(messages) == 2
    assert all(codes(message) == ["P23"] for message in messages)
