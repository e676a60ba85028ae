from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from minitrainer.data import count_samples, move_to_device
from minitrainer.errors import BatchSizeError

# The meta device takes copies of anything, so moving can be seen without a GPU.
META = torch.device("meta")

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    names: list[str]
    size: int = field(default=0, init=False)


class Own:
    def __init__(self, device: str = "cpu", *, returns: bool = True) -> None:
        self.device = device
        self.returns = returns

    def to(self, device: torch.device) -> Own | None:
        if self.returns:
            return Own(str(device))
        self.device = str(device)
        return None


class Rows(list[Any]):
    pass


def moved(batch: Any) -> Any:
    return move_to_device(batch, META, non_blocking=True)


def test_tensors_move_through_containers_of_all_kinds() -> None:
    x = torch.zeros(2, 3)
    batch = {
        "list": [x, "name", 3],
        "tuple": (x, None),
        "named": Pair(x, {"z": x}),
        "frozen": Frozen(x, ["a", "b"]),
    }
    result = moved(batch)
    assert type(result) is dict
    assert result["list"][0].device == META
    assert result["list"][1:] == ["name", 3]
    assert type(result["tuple"]) is tuple
    assert result["tuple"][0].device == META
    assert type(result["named"]) is Pair
    assert result["named"].y["z"].device == META
    assert type(result["frozen"]) is Frozen
    assert result["frozen"].x.device == META
    assert result["frozen"].names == ["a", "b"]
    assert result["frozen"].size == 0
    assert batch["frozen"].x.device.type == batch["list"][0].device.type == "cpu"


def test_the_kinds_of_mappings_and_lists_are_kept() -> None:
    x = torch.zeros(2)
    default = defaultdict(list, x=x)
    result = moved(default)
    assert type(result) is defaultdict
    assert result.default_factory is list
    assert default["x"].device.type == "cpu"
    for batch in (OrderedDict(x=x), UserDict(x=x), MappingProxyType({"x": x})):
        result = moved(batch)
        assert type(result) is type(batch)
        assert result["x"].device == META
    rows = Rows([x])
    rows.source = "here"
    result = moved(rows)
    assert type(result) is Rows
    assert result.source == "here"
    assert result[0].device == META
    assert rows[0].device.type == "cpu"


def test_anything_with_to_is_asked_to_move() -> None:
    assert moved([Own()])[0].device == "meta"
    in_place = Own(returns=False)
    assert moved({"own": in_place})["own"] is in_place
    assert in_place.device == "meta"
    packed = moved((pack_sequence([torch.zeros(3), torch.zeros(2)]),))[0]
    assert packed.data.device == META


def test_what_has_no_tensors_is_returned_as_it_is() -> None:
    for batch in ("text", 3, None, {1, 2}, torch.Tensor):
        assert moved(batch) is batch


def test_on_the_cpu_the_batch_itself_comes_back() -> None:
    batch = {"x": [torch.zeros(2), Own("elsewhere")]}
    cpu = torch.device("cpu")
    assert move_to_device(batch, cpu, non_blocking=True) is batch
    assert batch["x"][1].device == "elsewhere"


def test_batches_come_back_to_the_cpu_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    result = move_to_device([Own("elsewhere")], torch.device("cpu"), non_blocking=False)
    assert result[0].device == "cpu"


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(4), torch.zeros(4)), 4),
        ([torch.zeros(0, 2)], 0),
        (torch.tensor(1.5), 1),
        ({"scale": torch.tensor(2.0), "x": torch.zeros(6)}, 6),
        (("name", [{"x": torch.zeros(3)}]), 3),
        (Frozen(torch.zeros(7), ["a"]), 7),
        (Pair(1, torch.zeros(8)), 8),
        ((np.zeros((9, 2)), 1), 9),
        ((pack_sequence([torch.zeros(3), torch.zeros(2)]), torch.zeros(2)), 2),
        (["a", "b", "c"], 3),
        ([("a", "b"), ("c", "d")], 2),
        ({"text": ["a", "b"], "size": 3}, 2),
        ([{"id": 1}, {"id": 2}, {"id": 3}], 3),
        ((torch.nn.Parameter(torch.zeros(3, 1)), 0), 3),
    ],
)
def test_samples_are_counted(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize("batch", [3.5, "text", {"id": 1}, [], {}, None, Own()])
def test_a_batch_that_cannot_be_counted_is_named_by_its_type(batch: Any) -> None:
    with pytest.raises(BatchSizeError, match=f"type {type(batch).__name__} "):
        count_samples(batch)
