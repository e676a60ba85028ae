"""`key=value` from the command line, set in the values of a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minitrainer.errors import RecipeError
from minitrainer.recipe.nearest import did_you_mean
from minitrainer.recipe.yaml_text import read_yaml

SECTIONS = ("module", "data", "trainer", "vars")
"""The keys a recipe may have."""

Tree = dict[Any, Any]


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> list[str]:
    """Set each `key=value` in `tree`, in place, and return the problems.

    A new key is set only where keys are arguments, which `check.py` compares with signatures
    (B101); in other mappings an override may change what is there, but not add to it.
    """
    problems: list[str] = []
    added: list[str] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        keys = tuple(key.split("."))
        if not equals or not all(part.strip() == part != "" for part in keys):
            problems.append(
                f"{text}: not an override; write key=value, for example trainer.max_epochs=3."
            )
            continue
        if not raw.strip():
            problems.append(f'{key}: no value after "="; write {key}=null or {key}=\'""\'.')
            continue
        try:
            value, found = read_yaml(raw, keys=keys)
        except RecipeError as error:
            problems.extend(error.problems)
            continue
        problems.extend(found)
        if keys[0] == "vars" and len(keys) == 2 and keys[1] not in (tree.get("vars") or {}):
            added.append(keys[1])
        problem = _set(tree, keys, value)
        if problem is not None:
            problems.append(problem)
    return problems + list(_unused_variables(tree, added))


def strings(tree: Any) -> Iterator[str]:
    """Yield every string among the values of a tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from strings(value)


def _set(tree: Tree, keys: tuple[str, ...], value: Any) -> str | None:
    """Set one value; return what is wrong with its key path, if anything."""
    if keys[0] in SECTIONS and len(keys) > 1 and tree.get(keys[0]) is None:
        tree[keys[0]] = {}
    place: Any = tree
    for depth, part in enumerate(keys):
        last = depth == len(keys) - 1
        path = ".".join(keys[: depth + 1])
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                return f"{path}: the list has {len(place)} items, counted from 0."
            key: Any = int(part)
        elif isinstance(place, dict):
            key = next((known for known in place if str(known) == part), part)
            if key not in place and not (last and _takes_arguments(place, keys)):
                return f"{path}: no such key in the recipe{_suggest(part, place, depth)}"
        else:
            parent = ".".join(keys[:depth])
            return f"{path}: {parent} is {place!r}, which has no keys."
        if last:
            place[key] = value
        else:
            place = place[key]
    return None


def _takes_arguments(place: Tree, keys: tuple[str, ...]) -> bool:
    """Return whether the keys of the mapping are arguments, sections or variables."""
    return "_target_" in place or len(keys) == 1 or (len(keys) == 2 and keys[0] in SECTIONS)


def _suggest(part: str, place: Tree, depth: int) -> str:
    names = [str(name) for name in place]
    if depth == 0:
        return did_you_mean(part, {*names, *SECTIONS}) or f"; it has {', '.join(SECTIONS)}."
    return did_you_mean(part, names) or "; give the whole mapping instead."


def _unused_variables(tree: Tree, added: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each new variable that nothing refers to: a misspelt one."""
    for name in added:
        reference = re.compile(rf"\$\{{[^}}]*\b{re.escape(name)}\b")
        if not any(reference.search(text) for text in strings(tree)):
            known = [str(key) for key in tree.get("vars") or {} if key != name]
            yield f"vars.{name}: nothing in the recipe uses it{did_you_mean(name, known) or '.'}"
