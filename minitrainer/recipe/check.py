"""All problems of a recipe at once, before anything of the user's is constructed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitrainer.datamodule import DataModule
from minitrainer.errors import RecipeError
from minitrainer.module import Module
from minitrainer.recipe.annotations import adapt, fits, mismatches
from minitrainer.recipe.load import Recipe
from minitrainer.recipe.nearest import did_you_mean, nearest
from minitrainer.recipe.overrides import SECTIONS
from minitrainer.recipe.planned import Planned, Signature
from minitrainer.recipe.targets import TargetError, find_target, make_importable
from minitrainer.recipe.yaml_text import MISSING

_TARGET = "_target_"
_MAX_LISTED = 8


@dataclass(frozen=True)
class Plan:
    """A recipe without problems: what to build, of which classes, with which arguments."""

    module: Planned
    data: Planned
    trainer: dict[str, Any]


def check_recipe(recipe: Recipe) -> Plan:
    """Look up every class, compare every argument with its signature, and raise what is wrong.

    User code is imported, but nothing of it is constructed or called. The recipe's folder comes
    first on the import path and stays there.

    Raises:
        RecipeError: With all problems, those from loading the recipe included.
    """
    from minitrainer.trainer import Trainer

    make_importable(recipe.folder)
    check = _Check(recipe.folder)
    check.problems.extend(recipe.problems)
    config = recipe.config
    check.top_level(config, Signature.of(Trainer))
    module = check.section("module", Module, config.get("module"))
    data = check.section("data", DataModule, config.get("data"))
    trainer = check.trainer(Signature.of(Trainer), config.get("trainer"))
    if check.problems:
        raise RecipeError(*check.problems)
    assert module is not None
    assert data is not None
    return Plan(module, data, trainer)


class _Check:
    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._failed: set[str] = set()

    def top_level(self, config: Mapping[str, Any], trainer: Signature) -> None:
        """Compare the keys of the recipe with the four there are."""
        for key in config:
            if key in SECTIONS:
                continue
            near = did_you_mean(key, SECTIONS)
            argument = nearest(key, trainer.annotations)
            if not near and argument is not None:
                near = f"; did you mean trainer.{argument}?"
            self.problems.append(
                f"{key}: unknown key{near or f'; a recipe has {_listed(SECTIONS)}.'}"
            )

    def section(self, name: str, kind: type, value: Any) -> Planned | None:
        """Check `module` or `data`: one object of the given kind."""
        example = "digits.DigitsNet" if kind is Module else "digits.Digits"
        if value == MISSING:
            return None
        if value is None:
            self.problems.append(
                f"{name}: missing; name a {kind.__name__} with _target_: {example}."
            )
        elif not isinstance(value, dict) or _TARGET not in value:
            near = nearest(_TARGET, map(str, value)) if isinstance(value, dict) else None
            todo = f"write {_TARGET} for {near}" if near else f"name a class, like {example}"
            self.problems.append(f"{name}.{_TARGET}: missing; {todo}.")
        else:
            planned: Planned = self._plan(name, value)
            self._compare(name, kind, planned)
            return planned
        return None

    def trainer(self, signature: Signature, value: Any) -> dict[str, Any]:
        """Check `trainer`: the arguments of the Trainer."""
        if value is None or value == MISSING:
            return {}
        if not isinstance(value, dict):
            self.problems.append("trainer: wants a mapping of arguments, like max_epochs: 10.")
            return {}
        return self._arguments("trainer", "the Trainer", signature, value)

    def _plan(self, path: str, value: Any) -> Any:
        """Return the value with each `_target_` in it looked up and checked."""
        if isinstance(value, list):
            return [self._plan(f"{path}.{at}", item) for at, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if _TARGET not in value:
            return {key: self._plan(f"{path}.{key}", item) for key, item in value.items()}
        name = value[_TARGET]
        given = {str(key): item for key, item in value.items() if key != _TARGET}
        target = self._find(path, name)
        if target is None:
            nested = {key: self._plan(f"{path}.{key}", item) for key, item in given.items()}
            return Planned(path, str(name), None, nested)
        self._refuse_abstract(path, name, target)
        arguments = self._arguments(path, name, Signature.of(target), given)
        return Planned(path, name, target, arguments)

    def _find(self, path: str, name: Any) -> Callable[..., Any] | None:
        if name == MISSING:
            return None
        if not isinstance(name, str):
            self.problems.append(
                f"{path}.{_TARGET}: wants a dotted name like digits.DigitsNet, not {name!r}."
            )
            return None
        module = name.partition(".")[0]
        if module in self._failed:  # its exception is reported already, once is enough
            return None
        try:
            return find_target(name, self._folder)
        except TargetError as error:
            if error.__cause__ is not None:
                self._failed.add(module)
            self.problems.append(_sentence(f"{path}.{_TARGET}: {error}"))
            return None

    def _refuse_abstract(self, path: str, name: str, target: Callable[..., Any]) -> None:
        if inspect.isabstract(target):
            missing = _listed(sorted(getattr(target, "__abstractmethods__", ())))
            self.problems.append(f"{path}.{_TARGET}: {name} has no {missing}; write it.")

    def _compare(self, path: str, annotation: Any, value: Any) -> None:
        """Add the problems of a value that is not of the kind its place wants."""
        for problem in mismatches(path, annotation, value):
            place, wrong_class, _ = problem.partition(f".{_TARGET}:")
            if wrong_class:  # then its arguments are beside the point
                self.problems = [p for p in self.problems if not p.startswith(f"{place}.")]
            self.problems.append(problem)

    def _arguments(
        self, path: str, name: str, signature: Signature, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check arguments against a signature and return them as they will be passed."""
        arguments: dict[str, Any] = {}
        for key, value in given.items():
            planned = self._plan(f"{path}.{key}", value)
            if key not in signature.annotations:
                if not signature.takes_anything or _is_special(key):
                    self.problems.append(_unknown(path, name, key, signature))
                arguments[key] = planned
                continue
            annotation = signature.annotations[key]
            if not (value is None and key in signature.nullable):
                self._compare(f"{path}.{key}", annotation, planned)
            arguments[key] = adapt(annotation, planned) if fits(annotation, planned) else planned
        for key in signature.required:
            if key not in given:
                self.problems.append(f"{path}.{key}: missing; {name} needs it.")
        return arguments


def _unknown(path: str, name: str, key: str, signature: Signature) -> str:
    names = list(signature.annotations)
    near = did_you_mean(key, names)
    if not near and len(names) > _MAX_LISTED:
        names = [*names[:_MAX_LISTED], "..."]
    takes = f"; {name} takes {_listed(names) or 'no arguments'}."
    return f"{path}.{key}: unknown key{near or takes}"


def _is_special(key: str) -> bool:
    """Return whether the key looks like one with a meaning of its own, such as `_partial_`."""
    return key.startswith("_") and key.endswith("_")


def _listed(names: Any) -> str:
    return ", ".join(str(name) for name in names)


def _sentence(text: str) -> str:
    return text if text.endswith(("?", ".")) else f"{text}."
