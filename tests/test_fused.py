"""Optimizers step by their fused kernel, unless the user has chosen or it would not work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minitrainer.fused import use_fused

Make = Callable[[Any], torch.optim.Optimizer]

ADAMW: Make = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)  # noqa: E731


class _Own(torch.optim.SGD):
    """A user's own optimizer may do anything in its step."""


def _net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def _train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 25) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") is True for group in optimizer.param_groups)


@pytest.mark.parametrize(
    "make",
    [
        ADAMW,
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, maximize=True),
        lambda parameters: torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
        ),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    ],
)
def test_the_fused_kernel_computes_the_same(make: Make) -> None:
    plain, fused = _net(), _net()
    ours = make(fused.parameters())
    use_fused(ours, fused)
    assert _is_fused(ours)
    theirs = make(plain.parameters())
    assert not _is_fused(theirs)
    _train(plain, theirs)
    _train(fused, ours)
    for expected, got in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, fused=False),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, foreach=False),
        lambda parameters: torch.optim.SGD(parameters, differentiable=True),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        lambda parameters: _Own(parameters, lr=0.1),
    ],
)
def test_what_the_user_chose_or_has_no_kernel_stays(make: Make) -> None:
    net = _net()
    optimizer = make(net.parameters())
    before = [dict(group) for group in optimizer.param_groups]
    use_fused(optimizer, net)
    assert [dict(group) for group in optimizer.param_groups] == before
    assert not _is_fused(optimizer)


def test_an_optimizer_that_has_stepped_stays() -> None:
    net = _net()
    optimizer = ADAMW(net.parameters())
    _train(net, optimizer, steps=1)
    use_fused(optimizer, net)
    assert not _is_fused(optimizer)
    _train(net, optimizer, steps=1)


def test_sparse_gradients_stay() -> None:
    net = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    use_fused(optimizer, net)
    net(torch.tensor([1])).sum().backward()
    optimizer.step()  # the fused kernel refuses
    fused = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    with pytest.raises(RuntimeError, match="sparse"):
        fused.step()


def test_complex_parameters_stay() -> None:
    net = torch.nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = ADAMW(net.parameters())
    use_fused(optimizer, net)
    net(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    assert not _is_fused(optimizer)


def test_a_state_goes_from_one_kernel_to_the_other_and_back() -> None:
    """A checkpoint of an optimizer that was not fused goes on as it was, and the other way."""
    for before, after in ((None, True), (True, None)):
        reference, resumed = _net(), _net()
        whole = torch.optim.AdamW(reference.parameters(), fused=before)
        _train(reference, whole, steps=5)
        resumed.load_state_dict(reference.state_dict())
        part = torch.optim.AdamW(resumed.parameters(), fused=after)
        part.load_state_dict(copy.deepcopy(whole.state_dict()))
        _train(reference, whole, steps=5)
        _train(resumed, part, steps=5)
        for expected, got in zip(reference.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(got, expected)
