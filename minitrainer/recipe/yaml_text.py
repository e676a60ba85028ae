"""YAML text to plain values; what YAML would silently read as something else is refused.

`1e-4` is a float (YAML 1.1 says string). `010` (8 to YAML), `0x1F` and `1:30` (90 to YAML) are
refused with a message that says what YAML would have made of them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from minitrainer.errors import RecipeError

MISSING = "???"
"""OmegaConf's mark for a value that must still be given; here also for one that is refused."""

_INTEGER = re.compile(r"[-+]?(0|[1-9][\d_]*)")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")
_LEADING_ZERO = re.compile(r"([-+]?)0[\d_]+")
_OTHER_BASE = re.compile(r"[-+]?0[xXbBoO][\da-fA-F_]+")
_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp")}


def read_yaml(text: str, *, name: str = "", keys: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """Return the value of a YAML text and the problems with its numbers.

    A refused number is `MISSING` in the value, so that nothing else complains about it.

    Args:
        text: One YAML document.
        name: What to call the text in messages, when it is that of a file.
        keys: The key path of the value, when it is that of one override.

    Raises:
        RecipeError: The text is not valid YAML, or a mapping holds a key twice or one that is
            neither a string nor an int.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        where = ".".join(keys) or name
        raise RecipeError(f"{where}: {_describe(error, in_file=not keys)}") from error
    reader = _Reader(in_file=not keys)
    value = None if node is None else reader.value(node, keys)
    if reader.broken:
        raise RecipeError(*reader.broken, *reader.problems)
    return value, list(dict.fromkeys(reader.problems))


def _describe(error: Any, *, in_file: bool) -> str:
    place = getattr(error, "problem_mark", None)
    if place is None:
        return f"invalid YAML: {str(error).splitlines()[0]}."
    problem = error.problem or error.context or "unreadable"
    if problem.startswith("but "):
        problem = f"{error.context}, {problem}"
    hint = "; indent with spaces" if "'\\t'" in problem else ""
    if any(f"'{character}'" in problem for character in "@`%?"):
        hint = "; put the value in quotes"
    line = f" in line {place.line + 1}, column {place.column + 1}" if in_file else ""
    return f"invalid YAML{line}: {problem}{hint}."


class _Reader:
    """Turn YAML nodes into values; `broken` holds what leaves no value to go on with."""

    def __init__(self, *, in_file: bool) -> None:
        self.problems: list[str] = []
        self.broken: list[str] = []
        self._in_file = in_file
        self._open: set[int] = set()

    def value(self, node: Any, keys: tuple[str, ...]) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, keys)
        if id(node) in self._open:
            self.broken.append(f"{'.'.join(keys)}: the alias refers to itself.")
            return None
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            return self._refuse_tag(node, keys)
        self._open.add(id(node))
        result = (
            self._mapping(node, keys)
            if isinstance(node, yaml.MappingNode)
            else [self.value(item, (*keys, str(at))) for at, item in enumerate(node.value)]
        )
        self._open.discard(id(node))
        return result

    def _mapping(self, node: Any, keys: tuple[str, ...]) -> dict[str | int, Any]:
        own: dict[str | int, Any] = {}
        merged: dict[str | int, Any] = {}
        lines: dict[str | int, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                sources = (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                for source in sources:
                    found = self.value(source, keys)
                    merged = {**found, **merged} if isinstance(found, dict) else merged
                continue
            line = key_node.start_mark.line + 1
            key = self.value(key_node, keys)
            if isinstance(key, bool) or not isinstance(key, str | int):
                self._refuse_key(key_node, key, keys)
                continue
            path = (*keys, str(key))
            if key in own:
                at = f" (lines {lines[key]} and {line})" if self._in_file else ""
                self.broken.append(f"{'.'.join(path)}: given twice{at}; keep one of them.")
            lines[key] = line
            own[key] = self.value(value_node, path)
        return {**merged, **own}

    def _scalar(self, node: Any, keys: tuple[str, ...]) -> Any:
        raw: str = node.value
        quoted = node.style is not None
        if node.tag not in _KNOWN_TAGS or (quoted and node.tag != f"{_TAG}str"):
            return self._refuse_tag(node, keys)
        number = int if _INTEGER.fullmatch(raw) else float if _FLOAT.fullmatch(raw) else None
        if quoted:
            return raw
        if number is not int and _is_surprising(raw, node.tag):
            return self._refuse_number(node, keys)
        if number is not None:
            return number(raw.replace("_", ""))
        if node.tag in (f"{_TAG}bool", f"{_TAG}null", f"{_TAG}float"):
            return yaml.safe_load(raw)
        return raw

    def _refuse_number(self, node: Any, keys: tuple[str, ...]) -> str:
        raw: str = node.value
        made = yaml.safe_load(raw)
        zeros = _LEADING_ZERO.fullmatch(raw)
        meant = zeros[1] + (raw.lstrip("-+0_") or "0") if zeros else made
        reads = f'the string "{made}"' if isinstance(made, str) else str(made)
        if isinstance(made, str) and not zeros:
            meant = int(raw.replace("_", ""), base=0)
        self.problems.append(
            f"{'.'.join(keys)}: YAML reads {raw} as {reads}{self._at(node)}; "
            f'write {meant} for the number or "{raw}" for a string.'
        )
        return MISSING

    def _refuse_tag(self, node: Any, keys: tuple[str, ...]) -> str:
        tag = node.tag.replace(_TAG, "!!")
        what = (
            f'put {node.value} in quotes: "{node.value}"'
            if tag == "!!value"
            else f"the tag {tag} is not supported; leave it out"
        )
        self.problems.append(f"{'.'.join(keys)}: {what}{self._at(node)}.")
        return MISSING

    def _refuse_key(self, node: Any, key: Any, keys: tuple[str, ...]) -> None:
        raw = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        path = f"{'.'.join(keys)}: " if keys else ""
        self.broken.append(
            f"{path}the key {raw} is neither a string nor an int to YAML, "
            f"but {type(key).__name__}{self._at(node)}; put it in quotes."
        )

    def _at(self, node: Any) -> str:
        return f" (line {node.start_mark.line + 1})" if self._in_file else ""


def _is_surprising(raw: str, tag: str) -> bool:
    """Return whether YAML makes something else of it than a reader who counts in tens."""
    if _LEADING_ZERO.fullmatch(raw) or _OTHER_BASE.fullmatch(raw) or tag == f"{_TAG}int":
        return True
    return tag == f"{_TAG}float" and ":" in raw
