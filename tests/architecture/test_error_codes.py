"""Every error of the library can be looked up by its code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import Counter

import minitrainer
from minitrainer import errors
from minitrainer.errors import MinitrainerError, UsageError, error_class


def _all_errors() -> list[type[MinitrainerError]]:
    # A class could stand outside of errors.py; it is found when its module has been imported.
    for module in pkgutil.walk_packages(minitrainer.__path__, "minitrainer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: list[type[MinitrainerError]] = []
    todo = [MinitrainerError]
    while todo:
        kind = todo.pop()
        if kind.__module__.startswith("minitrainer"):
            found.append(kind)
        todo.extend(kind.__subclasses__())
    return found


def test_each_class_has_a_code_of_its_own() -> None:
    kinds = _all_errors()
    assert len(kinds) > 15
    assert not [kind for kind in kinds if "code" not in vars(kind)], "inherits the code of another"
    codes = Counter(kind.code for kind in kinds)
    assert not [code for code, uses in codes.items() if uses > 1]
    for kind in kinds:
        assert re.fullmatch(r"[LDSPCRT]\d\d", kind.code), kind
        assert error_class(kind.code) is kind


def test_classes_stand_in_the_family_that_their_code_names() -> None:
    assert not [kind for kind in _all_errors() if kind.__module__ != errors.__name__]
    order = [
        kind.code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, MinitrainerError)
    ]
    families = list(dict.fromkeys(code[0] for code in order if not code.endswith("00")))
    assert families == list("LDSPCRT")


def test_mistakes_of_the_user_end_with_exit_code_2() -> None:
    for kind in _all_errors():
        assert kind.exit_code == (2 if issubclass(kind, UsageError) else 1), kind


def test_a_message_is_one_line_with_its_code() -> None:
    error = UsageError("devices is 3.", "There are 2.", "Ask for 2.")
    assert str(error) == "[R00] devices is 3. There are 2. Ask for 2."
