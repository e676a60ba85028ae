"""The memory of a rank, from shapes, against what really gets allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minitrainer import memory
from minitrainer.errors import ModelTooLargeError
from tests.toys import Lin, loader, quiet

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_optimizer_states_are_as_large_as_estimated(kind: Any, settings: Any) -> None:
    layer = torch.nn.Linear(64, 64)
    optimizer = kind(layer.parameters(), **settings)
    expected = memory.estimate(layer, optimizer)
    layer(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    real = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    assert expected.optimizer == real
    assert expected.parameters == expected.gradients == (64 * 64 + 64) * 4


def test_frozen_shared_and_unknown_parts() -> None:
    layer = torch.nn.BatchNorm1d(8)
    layer.weight.requires_grad_(False)
    pair = torch.nn.Sequential(layer, layer)

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    found = memory.estimate(pair, Own(pair.parameters()))
    assert (found.parameters, found.gradients, found.optimizer) == (64, 32, None)
    assert found.buffers == 8 * 4 * 2 + 8
    assert "optimizer unknown" in str(found)


def test_a_model_that_does_not_fit_is_an_error_before_training() -> None:
    """The error says that DDP copies the model and does not split it."""

    class Huge(Lin):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.layer = torch.nn.Linear(10**7, 10**7)

    with pytest.raises(ModelTooLargeError, match="copies the whole model"):
        quiet().fit(Huge(), loader([1.0]))
    assert memory.capacity(torch.device("cpu")) > 2**28
