"""Does a value of a recipe fit the annotation of the argument it is for?

`float` takes ints, `bool` is no int, lists stand for tuples and sets, strings for paths and for
members of an Enum. What is not annotated, or not understood, takes anything.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import os
import types
import typing
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from minitrainer.errors import RecipeError
from minitrainer.recipe.planned import Planned
from minitrainer.recipe.yaml_text import MISSING, read_yaml

_ITEMS = {
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.Set,
}
_MAPPINGS = {dict, collections.abc.Mapping, collections.abc.MutableMapping}
_NUMBERS: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), complex: (int, float)}
_NULL = (None, types.NoneType)
_MAX_SHOWN = 60


def mismatches(path: str, annotation: Any, value: Any) -> Iterator[str]:
    """Yield one problem for each part of the value that does not fit, with its key path."""
    if fits(annotation, value):
        return
    members = [member for member in _members(annotation) if _is_for(member, value)]
    if len(members) == 1 and isinstance(value, list | dict):
        parts = list(_parts(members[0], value))
        if parts and not all(fits(wanted, part) for _, wanted, part in parts):
            for key, wanted, part in parts:
                yield from mismatches(f"{path}.{key}", wanted, part)
            return
    if isinstance(value, Planned):
        yield f"{path}._target_: {_wrong_kind(annotation, value)}."
    else:
        got = _describe_value(value)
        yield f"{path}: wants {describe(annotation)}, got {got}{_hint(annotation, value)}."


def fits(annotation: Any, value: Any) -> bool:
    """Return whether the value may stand for an argument with this annotation."""
    if isinstance(value, str) and value == MISSING:
        return True
    return any(_fits_member(member, value) for member in _members(annotation))


def adapt(annotation: Any, value: Any) -> Any:
    """Return a fitting value as the type that YAML cannot write: path, tuple, set, Enum member."""
    member = next((one for one in _members(annotation) if fits(one, value)), Any)
    kind, arguments = typing.get_origin(member) or member, typing.get_args(member)
    if isinstance(value, list):
        items = [adapt(wanted, part) for _, wanted, part in _parts(member, value)] or value
        return kind(items) if kind in (tuple, set, frozenset) else items
    if isinstance(value, dict) and kind in _MAPPINGS and arguments:
        return {key: adapt(arguments[-1], part) for key, part in value.items()}
    if isinstance(value, str) and value != MISSING and isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return kind[value] if value in kind.__members__ else kind(value)
        if issubclass(kind, PurePath):
            return kind(value)
    return value


def describe(annotation: Any) -> str:
    """Return an annotation in words: `int or null`, `list of Callback`."""
    names = list(dict.fromkeys(n for member in _members(annotation) for n in _names(member)))
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def is_protocol(kind: Any) -> bool:
    """Return whether the class is a Protocol, which anything with its methods satisfies."""
    return isinstance(kind, type) and bool(getattr(kind, "_is_protocol", False))


def missing_methods(kind: type, protocol: type) -> list[str]:
    """Return the methods of a Protocol that a class does not have."""
    wanted = [
        name
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    return [name for name in wanted if not callable(getattr(kind, name, None))]


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, unwrapped."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):  # NewType
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # `type X = ...`, Python 3.12
            annotation = annotation.__value__
        else:
            break
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for part in typing.get_args(annotation) for m in _members(part)]
    return [Any if annotation in (inspect.Parameter.empty, object) else annotation]


def _fits_member(member: Any, value: Any) -> bool:
    kind, arguments = typing.get_origin(member) or member, typing.get_args(member)
    if kind is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if isinstance(value, Planned):
        return _planned_fits(kind, value)
    if kind in _NULL:
        return value is None
    if kind is Any or not isinstance(kind, type):
        return True
    if kind in _ITEMS | _MAPPINGS:
        return (
            _is_for(kind, value)
            and _has_right_length(member, value)
            and all(fits(wanted, part) for _, wanted, part in _parts(member, value))
        )
    return _plain_fits(kind, value)


def _plain_fits(kind: type, value: Any) -> bool:
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if kind is os.PathLike or issubclass(kind, PurePath):
        return isinstance(value, str)
    if issubclass(kind, enum.Enum):
        names = [*kind.__members__, *(member.value for member in kind)]
        return isinstance(value, str) and value in names
    if typing.is_typeddict(kind):
        return isinstance(value, dict)
    return _is_instance(value, kind)


def _planned_fits(kind: Any, value: Planned) -> bool:
    if value.target is None or kind is Any or not isinstance(kind, type):
        return True
    built = value.kind
    if built is None:
        # A function that does not say what it returns is trusted, but not in our own places.
        return not kind.__module__.startswith("minitrainer")
    if is_protocol(kind):
        return not missing_methods(built, kind)
    return _is_subclass(built, kind)


def _wrong_kind(annotation: Any, value: Planned) -> str:
    wanted = [
        member
        for member in _members(annotation)
        if isinstance(member, type) and member is not types.NoneType
    ]
    built = value.kind
    if built is None:
        return f"{value.name} is a function; wanted is {describe(annotation)}"
    for protocol in filter(is_protocol, wanted):
        missing = ", ".join(missing_methods(built, protocol))
        return f"{value.name} is not a {protocol.__name__}: it has no {missing}"
    return f"{value.name} is not a subclass of {describe(annotation)}"


def _is_for(member: Any, value: Any) -> bool:
    kind = typing.get_origin(member) or member
    if isinstance(value, list):
        return kind in _ITEMS
    return isinstance(value, dict) and kind in _MAPPINGS


def _parts(member: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (key, annotation, part) for the items of a list or mapping."""
    arguments = typing.get_args(member)
    if isinstance(value, dict):
        wanted_key, wanted = arguments if len(arguments) == 2 else (Any, Any)
        for key, part in value.items():
            # A wrong key is shown as a part of its own.
            yield (key, wanted, part) if fits(wanted_key, key) else ("<key>", wanted_key, key)
    elif (typing.get_origin(member) or member) is tuple and arguments and arguments[-1] is not ...:
        for at, (wanted, part) in enumerate(zip(arguments, value, strict=False)):
            yield at, wanted, part
    else:
        wanted = arguments[0] if arguments else Any
        yield from ((at, wanted, part) for at, part in enumerate(value))


def _has_right_length(member: Any, value: Any) -> bool:
    arguments = typing.get_args(member)
    if typing.get_origin(member) is not tuple or arguments[-1:] == (...,):
        return True
    return len(value) == len(arguments)


def _names(member: Any) -> list[str]:
    """Return one alternative of an annotation in words; several for Literal and Enum."""
    kind, arguments = typing.get_origin(member) or member, typing.get_args(member)
    if kind is typing.Literal:
        return [_describe_value(choice, bare=True) for choice in arguments]
    if kind in _NULL:
        return ["null"]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind.__members__)[:8]
    if kind in _MAPPINGS:
        of = f" of {describe(arguments[0])} to {describe(arguments[1])}" if arguments else ""
        return [f"mapping{of}"]
    if kind in _ITEMS:
        return [_name_list(kind, arguments)]
    ours = str(getattr(kind, "__module__", "")).startswith("minitrainer.")
    prefix = "minitrainer." if ours and not is_protocol(kind) else ""
    return [f"{prefix}{getattr(kind, '__name__', kind)}"]


def _name_list(kind: Any, arguments: tuple[Any, ...]) -> str:
    if kind is tuple and arguments and arguments[-1] is not ...:
        return f"list of {len(arguments)} ({', '.join(describe(part) for part in arguments)})"
    return f"list of {describe(arguments[0])}" if arguments else "list"


def _describe_value(value: Any, *, bare: bool = False) -> str:
    if isinstance(value, Planned):
        return value.name
    if value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    else:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    if len(text) > _MAX_SHOWN:
        text = f"{text[:_MAX_SHOWN]}..."
    return text if bare or value is None else f"the {type(value).__name__} {text}"


def _hint(annotation: Any, value: Any) -> str:
    if isinstance(value, str):
        try:
            bare, _ = read_yaml(value, keys=("value",))
        except RecipeError:
            return ""
        return "; drop the quotes" if bare != MISSING and fits(annotation, bare) else ""
    if isinstance(value, bool) and fits(annotation, "text"):
        return "; YAML reads yes, no, on and off as bools, quote them for a string"
    if isinstance(value, float) and value.is_integer() and fits(annotation, int(value)):
        return f"; write {int(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and fits(annotation, str(value)):
        return "; put it in quotes"
    return ""


def _is_instance(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a Protocol that cannot be asked at run time
        return True


def _is_subclass(built: type, kind: type) -> bool:
    try:
        return issubclass(built, kind)
    except TypeError:  # a Protocol that cannot be asked at run time
        return True
