"""Turn values into what `torch.load(weights_only=True)` takes: tensors and plain containers."""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

from minitrainer.errors import CheckpointContentError

_Keys = tuple[object, ...]

# Loaded as they are; anything that holds other things is not here.
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray}
    | {torch.dtype, torch.device, torch.Size}
)
# Deeper than any checkpoint; a container that holds itself gets here.
_MAX_DEPTH = 64


def plain(value: Any) -> Any:
    """Return the value as tensors and plain containers, which can be loaded without running code.

    Config objects, mappings and dataclasses become dictionaries; paths, strings of other types and
    dates become strings; NumPy scalars become numbers and arrays become tensors; enum members
    become their value; named tuples become tuples, frozen sets sets, ranges and deques lists.
    Tensors are detached and share their memory with the originals.

    Args:
        value: Anything; containers may be nested.

    Raises:
        CheckpointContentError: Something in it has no plain form; the message names its key path.
    """
    return _plain(value, ())


def _plain(value: Any, keys: _Keys) -> Any:
    if type(value) in _ATOMS:
        return value
    if len(keys) > _MAX_DEPTH:
        raise _no_plain_form(value, keys, "it is nested too deep or contains itself")
    for kinds, convert in _CONVERSIONS:
        if isinstance(value, kinds):
            return convert(value, keys)
    return _plain_other(value, keys)


def _plain_tensor(value: torch.Tensor, keys: _Keys) -> torch.Tensor:
    if isinstance(value, (torch.nn.Parameter, torch.nn.Buffer)) or type(value) is torch.Tensor:
        return value.detach()
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # DTensor and others like it have no memory of their own that could be written.
        raise _no_plain_form(value, keys, "it is a wrapper around other tensors")
    return value.detach().as_subclass(torch.Tensor)


def _plain_enum(value: Enum, keys: _Keys) -> Any:
    return _plain(value.value, keys) if type(value.value) in _ATOMS else value.name


def _plain_mapping(value: Mapping[Any, Any], keys: _Keys) -> Any:
    if _is_config(value):
        return _plain_config(value, keys)
    items = {
        _plain_key(key, keys): item if type(item) in _ATOMS else _plain(item, (*keys, key))
        for key, item in value.items()
    }
    metadata = getattr(value, "_metadata", None)
    if metadata is None:
        return items
    # A module's state_dict carries the version of each submodule here; loading looks at it.
    state_dict = OrderedDict(items)
    state_dict._metadata = _plain(metadata, keys)  # type: ignore[attr-defined]
    return state_dict


def _plain_key(key: Any, keys: _Keys) -> Any:
    kept = key if type(key) in _ATOMS else _plain(key, (*keys, key))
    if isinstance(kept, (dict, list, set, bytearray, torch.Tensor)):
        raise _no_plain_form(key, keys, "it is the key of a mapping")
    return kept


def _plain_list(values: Iterable[Any], keys: _Keys) -> list[Any]:
    return [
        item if type(item) in _ATOMS else _plain(item, (*keys, index))
        for index, item in enumerate(values)
    ]


def _plain_other(value: Any, keys: _Keys) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in fields(value)}, keys)
    if _is_config(value):
        return _plain_config(value, keys)
    # Neither of these two is imported for this: without them there is nothing of theirs to convert.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _plain_array(value, keys)
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        return float(item) if isinstance(item, numpy.floating) else _plain(item, keys)
    raise _no_plain_form(value, keys)


def _plain_array(value: Any, keys: _Keys) -> Any:
    try:
        # The copy also settles negative strides and read-only memory.
        return torch.from_numpy(value.copy())
    except TypeError:
        return _plain(value.tolist(), keys)


def _is_config(value: Any) -> bool:
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and bool(omegaconf.OmegaConf.is_config(value))


def _plain_config(value: Any, keys: _Keys) -> Any:
    omegaconf = sys.modules["omegaconf"]
    try:
        container = omegaconf.OmegaConf.to_container(value, resolve=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = " ".join(str(error).split())
        raise _no_plain_form(value, keys, reason) from error
    return _plain(container, keys)


def _no_plain_form(value: Any, keys: _Keys, reason: str = "") -> CheckpointContentError:
    where = ".".join(str(key) for key in keys[:8]) or "The value"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return CheckpointContentError(
        f"{where} is of type {kind}{f': {reason}' if reason else ''}.",
        "A checkpoint holds tensors, numbers, strings and plain containers only, so that loading "
        "it runs no code.",
        "Leave it out (save_hyperparameters(ignore=[...])) or save a plain description of it.",
    )


# Subclasses of the atoms (torch.__version__ and np.float64 among them) would not be loaded, so
# they become the atom itself. The first that fits counts.
_CONVERSIONS: tuple[tuple[type | tuple[type, ...], Callable[[Any, _Keys], Any]], ...] = (
    (torch.Tensor, _plain_tensor),
    (Enum, _plain_enum),
    (dict, _plain_mapping),
    ((list, deque, range), _plain_list),
    (tuple, lambda value, keys: tuple(_plain_list(value, keys))),
    ((set, frozenset), lambda value, keys: set(_plain_list(value, keys))),
    (str, lambda value, _: str.__str__(value)),
    (int, lambda value, _: int(value)),
    (float, lambda value, _: float(value)),
    (complex, lambda value, _: complex(value)),
    (PurePath, lambda value, _: str(value)),
    ((date, time), lambda value, _: value.isoformat()),
    (timedelta, lambda value, _: value.total_seconds()),
    ((argparse.Namespace, types.SimpleNamespace), lambda value, keys: _plain(vars(value), keys)),
    (Mapping, _plain_mapping),
)
