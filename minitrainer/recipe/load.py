"""A recipe file and its overrides to resolved plain values; imports no torch and no user code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from minitrainer.errors import RecipeError
from minitrainer.recipe.nearest import did_you_mean
from minitrainer.recipe.overrides import Tree, apply_overrides
from minitrainer.recipe.yaml_text import MISSING, read_yaml

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")

KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class Recipe:
    """A recipe as read.

    `config` holds plain values, all `${...}` resolved. Values with a problem of their own are
    `"???"` in it; `problems` says what is wrong with them, and `check_recipe` raises these
    together with its own.
    """

    path: Path
    folder: Path
    config: dict[str, Any]
    problems: tuple[str, ...] = ()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and set the overrides in it.

    Args:
        path: The YAML file.
        overrides: `key=value` each, with values read as YAML: `module.lr=1e-4`.

    Raises:
        RecipeError: There is no such file, or it is not a YAML mapping.
    """
    # Absolute at once: user code may change the working directory later (case B5).
    file = Path(os.path.abspath(path))
    tree, problems = read_yaml(_read(file), name=str(path))
    if tree is None:
        raise RecipeError(f"{path}: the recipe is empty; it needs module, data and trainer.")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else repr(tree)
        raise RecipeError(f"{path}: a recipe is a mapping with module, data, trainer, not {kind}.")
    problems += apply_overrides(tree, overrides)
    reported = {problem.partition(":")[0] for problem in problems}
    problems += _missing_values(tree, reported)
    config, dangling = _resolve(tree)
    return Recipe(file, file.parent, config, (*problems, *dangling))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = file.parent.iterdir() if file.parent.is_dir() else ()
        near = did_you_mean(file.name, [sibling.name for sibling in siblings])
        reason = f"no such file{near or '.'}" if file.parent.is_dir() else "no such folder."
    except IsADirectoryError:
        found = ", ".join(sorted(entry.name for entry in file.glob("*.yaml"))[:5])
        reason = f"a folder, not a recipe; it holds {found or 'no .yaml file'}."
    except UnicodeDecodeError as error:
        reason = f"not a text file in UTF-8 (byte {error.start})."
    except OSError as error:
        reason = f"cannot be read: {error.strerror}."
    raise RecipeError(f"{file}: {reason}")


def _missing_values(tree: Tree, reported: set[str]) -> list[str]:
    found = []
    for keys, value in _leaves(tree):
        key = _dotted(keys)
        if value == MISSING and key not in reported:
            found.append(f"{key}: must be given, it is ??? in the recipe; add {key}=VALUE.")
    return found


def _resolve(tree: Tree) -> tuple[dict[str, Any], list[str]]:
    """Return the tree with every `${...}` replaced, and the problems with those that cannot be."""
    problems = []
    for keys, value in list(_leaves(tree)):
        if isinstance(value, str) and "${" in value and not _is_well_formed(value):
            problems.append(
                f"{_dotted(keys)}: {value} is not a valid reference; write ${{vars.name}}, "
                "or \\${ for the characters themselves."
            )
            _mark(tree, keys)
    known = [_dotted(keys) for keys in _paths(tree)]
    while failures := dict(_failures(tree)):
        for keys, error in failures.items():
            if not isinstance(error, InterpolationToMissingValueError):
                problems.append(f"{_dotted(keys)}: {_explain(_at(tree, keys), error, known)}")
        for keys in failures:
            _mark(tree, keys)
    config = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}, problems


def _failures(tree: Tree) -> Iterator[tuple[KeyPath, OmegaConfBaseException]]:
    """Yield each value whose references cannot be resolved."""
    config = OmegaConf.create(tree)
    for keys, value in list(_leaves(tree)):
        if not isinstance(value, str) or "${" not in value:
            continue
        try:
            _at(config, keys)
        except OmegaConfBaseException as error:
            yield keys, error


def _explain(value: str, error: OmegaConfBaseException, known: list[str]) -> str:
    reason = str(error).splitlines()[0].rstrip(".")
    for name in _REFERENCE.findall(value):
        if repr(name) in reason:
            return f"{value} points to nothing{did_you_mean(name, known) or '.'}"
    return f"{value} cannot be resolved: {reason}."


def _is_well_formed(value: str) -> bool:
    try:
        OmegaConf.create([value])
    except OmegaConfBaseException:
        return False
    return True


def _leaves(tree: Any, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _leaves(value, (*keys, key))
        else:
            yield (*keys, key), value


def _paths(tree: Tree) -> set[KeyPath]:
    """Return the paths of all values, those of mappings and lists included."""
    return {keys[:end] for keys, _ in _leaves(tree) for end in range(1, len(keys) + 1)}


def _at(tree: Any, keys: KeyPath) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _mark(tree: Tree, keys: KeyPath) -> None:
    _at(tree, keys[:-1])[keys[-1]] = MISSING


def _dotted(keys: KeyPath) -> str:
    return ".".join(str(key) for key in keys)
