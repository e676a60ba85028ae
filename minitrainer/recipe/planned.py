"""What a recipe says should be built, looked up and checked but not built yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Planned:
    """A `_target_` and its arguments.

    `target` is None when it could not be looked up; that problem is already known. `arguments`
    may hold further `Planned`, at any depth of lists and mappings.
    """

    path: str
    name: str
    target: Callable[..., Any] | None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type | None:
        """The class of what will be built; None when a function does not tell."""
        if isinstance(self.target, type):
            return self.target
        told = Signature.of(self.target).returns if self.target is not None else None
        return told if isinstance(told, type) and told is not inspect.Signature.empty else None


@dataclass(frozen=True)
class Signature:
    """What a class or function can be given by name.

    `takes_anything` is true when it has `**kwargs`, or when Python cannot tell. `nullable` names
    those whose default is None, whatever their annotation says.
    """

    annotations: dict[str, Any]
    required: tuple[str, ...]
    nullable: tuple[str, ...]
    takes_anything: bool
    returns: Any = None

    @classmethod
    def of(cls, target: Callable[..., Any]) -> Signature:
        """Read the signature of a class or function."""
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):  # some classes written in C have none
            return cls({}, (), (), takes_anything=True)
        names = _namespace(target)
        given_by_name = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        return cls(
            {p.name: _evaluate(p.annotation, names) for p in given_by_name},
            tuple(p.name for p in given_by_name if p.default is p.empty),
            tuple(p.name for p in given_by_name if p.default is None),
            takes_anything=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
            returns=_evaluate(signature.return_annotation, names),
        )


def _namespace(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the names that the annotations of the target may use."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    return {**getattr(inspect.unwrap(function), "__globals__", {})}


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
    """Turn an annotation kept as text into a type; `Any` when that is not possible."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)  # the user's source, as typing.get_type_hints does it
    except Exception:  # noqa: BLE001 names that only a type checker imports: nothing is checked
        return Any
