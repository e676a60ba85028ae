"""The public names and their signatures as text.

After a change that is meant, write the snapshot anew and look at the difference:

    python -m tests.architecture.public_api
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import minitrainer
from minitrainer import protocols

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def describe() -> str:
    """Return one line per public name, constructor and method."""
    lines: list[str] = []
    for name in minitrainer.__all__:
        lines += _describe(f"minitrainer.{name}", getattr(minitrainer, name))
    for name, value in vars(protocols).items():
        if inspect.isclass(value) and value.__module__ == protocols.__name__:
            lines += _describe(f"minitrainer.protocols.{name}", value)
    return "\n".join(lines) + "\n"


def _describe(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})"
        constructor = vars(value).get("__init__")
        if constructor is not None and not getattr(value, "_is_protocol", False):
            yield f"{name}{_signature(constructor)}"
        for member in _members(value):
            yield from _describe_member(f"{name}.{member}", value, member)
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield name


def _members(kind: type) -> list[str]:
    """Return the public members of a class, without those of torch and of other public classes."""
    public = {getattr(minitrainer, name) for name in minitrainer.__all__ if name != "__version__"}
    bases = [
        base
        for base in kind.__mro__
        if base.__module__.startswith("minitrainer") and (base is kind or base not in public)
    ]
    names = {
        name for base in bases for name in [*vars(base), *vars(base).get("__annotations__", {})]
    }
    return sorted(name for name in names if not name.startswith("_"))


def _describe_member(name: str, kind: type, member: str) -> Iterator[str]:
    annotations = [vars(base).get("__annotations__", {}) for base in kind.__mro__]
    annotated = [found[member] for found in annotations if member in found]
    value = inspect.getattr_static(kind, member, None)
    if annotated:
        yield f"{name}: {getattr(annotated[0], '__forward_arg__', annotated[0])}"
    elif isinstance(value, property):
        assert value.fget is not None
        yield f"{name} -> {inspect.signature(value.fget).return_annotation}"
    elif isinstance(value, staticmethod | classmethod):
        yield f"{name}{_signature(value.__func__)}"
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    else:
        yield name


def _signature(function: object) -> str:
    assert callable(function)
    signature = inspect.signature(function)
    parts: list[str] = []
    star_written = False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            star_written = True
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star_written:
            parts.append("*")
            star_written = True
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not inspect.Parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not inspect.Parameter.empty:
            text += f" = {parameter.default!r}"
        if parameter.name not in ("self", "cls"):
            parts.append(text)
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {returned}"
    return f"({', '.join(parts)}){arrow}"


if __name__ == "__main__":
    SNAPSHOT.write_text(describe())
    print(f"{SNAPSHOT.name}: {len(describe().splitlines())} lines written")
