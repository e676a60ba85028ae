"""Weights: prefixes are stripped, and a mismatch is never silent."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from minitrainer.errors import CheckpointMismatchError
from minitrainer.storage import read_checkpoint, write_file
from minitrainer.weights import load_weights, plain_state_dict


class Net(torch.nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class Wrapper(torch.nn.Module):
    """What DDP does to names."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("through_file", [True, False])
def test_nested_prefixes_are_stripped(prefix: str, through_file: bool, tmp_path: Path) -> None:
    """Case B77: a prefixed file fits the plain module, in any nesting."""
    source, target = Net(), Net()
    saved: dict[str, Any] = {prefix + name: value for name, value in source.state_dict().items()}
    if through_file:
        write_file({"state_dict": saved}, tmp_path / "a.ckpt")
        saved = read_checkpoint(tmp_path / "a.ckpt")
    report = load_weights(target, saved)
    assert same(source.state_dict(), target.state_dict())
    assert report.stripped == prefix
    assert report.matched == tuple(source.state_dict())
    assert report.missing == report.unexpected == ()
    assert str(report) == f"{len(report.matched)} matched, 0 missing, 0 unexpected" + (
        f", prefix {prefix} stripped" if prefix else ""
    )


def test_plain_torch_falls_in() -> None:
    """Case B77: with strict=False, plain torch leaves random weights without a word."""
    source, target = Net(), Net()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    target.load_state_dict({f"module.{n}": v for n, v in source.state_dict().items()}, strict=False)
    assert same(before, target.state_dict())


def test_a_compiled_module_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    """Case B77: keys of a compiled module are those of the plain module, and load into either."""
    net, other = Net(), Net()
    compiled = torch.compile(net, backend="eager")
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.")
    assert same(plain_state_dict(compiled), net.state_dict())
    write_file({"state_dict": plain_state_dict(compiled)}, tmp_path / "a.ckpt")
    saved = read_checkpoint(tmp_path / "a.ckpt")["state_dict"]
    other.load_state_dict(saved, strict=True)
    assert same(other.state_dict(), net.state_dict())
    report = load_weights(torch.compile(other, backend="eager"), saved)
    assert report.missing == report.unexpected == ()

    # A part compiled inside of a module, on either side.
    net.head = torch.compile(net.head, backend="eager")
    assert list(plain_state_dict(net)) == list(saved)
    with torch.no_grad():
        net.head.weight.fill_(7.0)
    load_weights(other, net.state_dict())
    assert torch.equal(other.head.weight, torch.full((1, 3), 7.0))
    load_weights(net, saved)
    assert torch.equal(net.head.weight, saved["head.weight"])


def test_versions_of_modules_follow_the_names() -> None:
    target = Wrapper(Net())
    seen: dict[str, Any] = {}

    def look(state_dict: Any, prefix: str, local_metadata: Any, *_: Any) -> None:
        seen[prefix] = local_metadata

    target.module.body[1]._register_load_state_dict_pre_hook(look)
    load_weights(target, Net().state_dict())
    assert seen == {"module.body.1.": {"version": 2}}
    assert plain_state_dict(Net())._metadata == Net().state_dict()._metadata  # type: ignore[attr-defined]


def test_prefixes_are_added_for_a_wrapped_module_and_kept_for_one_that_has_them() -> None:
    source = Net()
    target = Wrapper(Net())
    report = load_weights(target, source.state_dict())
    assert same(source.state_dict(), target.module.state_dict())
    assert report.stripped == ""
    again = Wrapper(Net())
    assert load_weights(again, target.state_dict()).stripped == ""
    assert same(again.state_dict(), target.state_dict())


def test_a_prefix_that_only_some_names_have_is_not_stripped() -> None:
    source = Net()
    saved = OrderedDict(source.state_dict())
    saved["module.head.bias"] = saved.pop("head.bias")
    with pytest.raises(CheckpointMismatchError, match=r"1 missing \(head.bias\), 1 unexpected"):
        load_weights(Net(), saved)


def test_strict_names_counts_and_first_names() -> None:
    saved = {f"extra.{n}": torch.zeros(1) for n in range(9)} | Net().state_dict()
    del saved["head.weight"]
    with pytest.raises(CheckpointMismatchError) as raised:
        load_weights(Net(), saved)
    assert "8 matched, 1 missing (head.weight), 9 unexpected (extra.0, " in str(raised.value)
    assert "extra.4, ...)" in str(raised.value)
    report = load_weights(Net(), saved, strict=False)
    assert report.missing == ("head.weight",)
    assert len(report.unexpected) == 9


@pytest.mark.parametrize("strict", [True, False])
def test_no_name_that_fits_always_raises_and_changes_nothing(strict: bool) -> None:
    """Case B77: 0 matched keys is never silent."""
    target = Net()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    for saved in ({"other.weight": torch.zeros(1)}, {"state_dict": {}}):
        with pytest.raises(CheckpointMismatchError, match="0 matched"):
            load_weights(target, saved, strict=strict)
    with pytest.raises(CheckpointMismatchError, match="no weights among epoch, step"):
        load_weights(target, {"epoch": 1, "step": 2}, strict=strict)
    assert same(before, target.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_named_with_both_and_change_nothing(strict: bool) -> None:
    target = Net(3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as raised:
        load_weights(target, Net(4).state_dict(), strict=strict)
    assert "body.0.weight is (4, 2) in the checkpoint and (3, 2) here" in str(raised.value)
    assert same(before, target.state_dict())


def test_modules_that_rename_old_names_have_their_say() -> None:
    old = torch.nn.Linear(2, 2)
    new = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    saved = {"bias": old.bias, "weight_g": torch.ones(2, 1), "weight_v": old.weight}
    report = load_weights(new, saved)
    assert report.missing == report.unexpected == ()
    assert torch.equal(new.parametrizations.weight.original1, old.weight)


def test_a_lazy_module_takes_its_shape_from_the_file() -> None:
    lazy = torch.nn.LazyLinear(2)
    load_weights(lazy, torch.nn.Linear(5, 2).state_dict())
    assert lazy.weight.shape == (2, 5)


def test_a_module_without_weights_takes_nothing() -> None:
    assert load_weights(torch.nn.ReLU(), {"state_dict": {}}).matched == ()
