"""`plain`: what goes into a checkpoint loads with weights_only, and nothing else goes in."""

from __future__ import annotations

import argparse
import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from minitrainer.errors import CheckpointContentError
from minitrainer.plain import plain


class Color(enum.Enum):
    RED = "red"
    ODD = object()


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: float
    where: Path


Pair = namedtuple("Pair", "left right")


def reloaded(value: Any) -> Any:
    file = BytesIO()
    torch.save(plain(value), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (10**30, 10**30),
        (float("inf"), float("inf")),
        (1 + 2j, 1 + 2j),
        (b"ab", b"ab"),
        (bytearray(b"ab"), bytearray(b"ab")),
        (torch.float16, torch.float16),
        (torch.device("cuda:1"), torch.device("cuda:1")),
        (torch.Size([2, 3]), torch.Size([2, 3])),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.longdouble(0.5), 0.5),
        (np.datetime64("2024-02-03"), "2024-02-03"),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([Path("a"), 1], dtype=object), ["a", 1]),
        (Path("a/b"), "a/b"),
        (torch.__version__, str(torch.__version__)),
        (Color.RED, "red"),
        (Color.ODD, "ODD"),
        (Level.HIGH, 3),
        (Point(1.0, Path("p")), {"x": 1.0, "where": "p"}),
        (Pair(1, Path("p")), (1, "p")),
        (frozenset({1, 2}), {1, 2}),
        ({3, 4}, {3, 4}),
        (range(3), [0, 1, 2]),
        (deque([1, Path("p")]), [1, "p"]),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (datetime(2024, 2, 3, 4, 5), "2024-02-03T04:05:00"),
        (date(2024, 2, 3), "2024-02-03"),
        (timedelta(minutes=1), 60.0),
        (SimpleNamespace(a=Path("p")), {"a": "p"}),
        (argparse.Namespace(lr=np.float64(0.1)), {"lr": 0.1}),
        ({Path("k"): 1, Level.HIGH: 2, (1, Path("t")): 3}, {"k": 1, 3: 2, (1, "t"): 3}),
        (
            OmegaConf.create(
                {"lr": 1e-3, "sizes": [1, 2], "of": {"path": Path("p"), "n": "${lr}"}}
            ),
            {"lr": 1e-3, "sizes": [1, 2], "of": {"path": "p", "n": 1e-3}},
        ),
        (OmegaConf.create([1, {"a": 2}]), [1, {"a": 2}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_equal_and_of_plain_types(value: Any, expected: Any) -> None:
    """Case B79: config objects, numpy values and paths come back as plain values, equal."""
    got = reloaded({"nested": [value]})["nested"][0]
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3)[::-1],
        np.array(3, dtype=np.uint32),
        np.random.get_state()[1],
        np.zeros((0, 2), dtype=np.float16),
    ],
)
def test_arrays_become_tensors(array: np.ndarray[Any, Any]) -> None:
    got = reloaded(array)
    assert isinstance(got, torch.Tensor)
    assert np.array_equal(got.numpy(), array)
    assert got.numpy().dtype == array.dtype


def test_tensors_are_detached_and_keep_sharing() -> None:
    tied = torch.nn.Parameter(torch.ones(3))
    content = plain({"a": tied, "b": tied, "view": tied[1:]})
    assert all(type(value) is torch.Tensor for value in content.values())
    assert not any(value.requires_grad for value in content.values())
    got = reloaded({"a": tied, "b": tied})
    got["a"].zero_()
    assert got["b"].sum() == 0


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    saved = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    got = reloaded(saved)
    assert got._metadata == saved._metadata
    assert got._metadata["0"] == {"version": 2}


def test_every_state_of_torch_passes() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step(np.float32(1.0))
    state = {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": torch.get_rng_state(),
    }
    got = reloaded(state)
    optimizer.load_state_dict(got["optimizer"])
    assert got["scaler"] == state["scaler"]
    assert torch.equal(got["rng"], state["rng"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"callbacks": {"Mine": [1, object()]}}, ("callbacks.Mine.1", "object")),
        ({"hparams": {"net": torch.nn.Linear(1, 1)}}, ("hparams.net", "torch.nn", "ignore=")),
        ({"f": len}, ("f is of type builtin_function_or_method",)),
        ({"kind": int}, ("kind is of type type",)),
        ({"g": torch.Generator()}, ("Generator",)),
        ({frozenset({1}): 1}, ("key of a mapping",)),
        (object(), ("The value is of type object",)),
        (OmegaConf.create({"a": "${nowhere}"}), ("DictConfig", "nowhere")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_plain_form_is_named(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointContentError) as raised:
        plain(value)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_container_that_holds_itself_is_an_error_and_no_recursion() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(CheckpointContentError, match="contains itself"):
        plain(cycle)
