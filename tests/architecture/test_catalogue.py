"""The catalogue of pitfalls says what is there: codes, components, tests, rows, documentation."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

from minitrainer.errors import MinitrainerError
from minitrainer.pitfalls import ENTRIES, FAMILIES, Entry, find, match, nearest
from minitrainer.pitfalls.document import document
from minitrainer.pitfalls.rows import ROWS, ROWS_WITHOUT_ENTRY

CODES = [entry.code for entry in ENTRIES]
by_entry = pytest.mark.parametrize("entry", ENTRIES, ids=CODES)


def error_codes() -> dict[str, str]:
    """Return the code of each error class of the library and its name, but of the two bases."""
    found: dict[str, str] = {}
    todo = [MinitrainerError]
    while todo:
        kind = todo.pop()
        if kind.__module__ == "minitrainer.errors":
            found[kind.code] = kind.__name__
        todo.extend(kind.__subclasses__())
    return {code: name for code, name in found.items() if not code.endswith("00")}


def trees(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


@functools.cache
def names_of_tests(file: Path) -> set[str]:
    return {
        node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_codes_are_unique_and_of_the_right_form() -> None:
    assert len(set(CODES)) == len(CODES)
    assert not [code for code in CODES if not re.fullmatch(rf"[{''.join(FAMILIES)}]\d\d", code)]
    assert [code for letter in FAMILIES for code in CODES if code[0] == letter] == CODES
    for letter in FAMILIES:
        family = [code for code in CODES if code[0] == letter]
        assert family == sorted(family)


def test_each_error_class_has_an_entry_and_no_other_entry_has_such_a_code() -> None:
    errors = error_codes()
    assert len(errors) > 20
    assert not {code: name for code, name in errors.items() if code not in CODES}
    assert {code for code in CODES if int(code[1:]) < 20} == set(errors)


def test_the_two_bases_of_errors_are_never_raised(repository: Path) -> None:
    """They have no entry: they only stand above the others."""
    made = [
        f"{path.name}:{node.lineno}"
        for path, tree in trees(repository / "minitrainer").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("MinitrainerError", "UsageError")
    ]
    assert not made


def test_each_warning_that_the_library_logs_carries_a_code(repository: Path) -> None:
    found = []
    for path, tree in trees(repository / "minitrainer").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "_logger.warning":
                text = ast.unparse(node.args[0])
                code = re.match(r"f?['\"]\[([A-Z]\d\d)\] ", text)
                found.append((f"{path.name}:{node.lineno}", code[1] if code else None))
    assert found
    assert not [(place, code) for place, code in found if code not in CODES]


@by_entry
def test_the_component_can_be_imported(entry: Entry) -> None:
    parts = entry.component.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        functools.reduce(getattr, parts[length:], found)
        assert length < len(parts), "a class or function, and not a module"
        return
    pytest.fail("not even its first part can be imported")


@by_entry
def test_the_proofs_exist(entry: Entry, repository: Path) -> None:
    for node_id in (entry.test, *([entry.plain] if entry.plain else [])):
        file, _, name = node_id.partition("::")
        assert name in names_of_tests(repository / file), node_id


@by_entry
def test_plain_torch_falls_in_or_the_entry_says_why_not(entry: Entry) -> None:
    """An error class may have no counterpart, and a warning is about the library itself."""
    about_torch = int(entry.code[1:]) >= 20 and f"[{entry.code}]" not in entry.symptom
    assert entry.plain or entry.unproven or not about_torch


@by_entry
def test_its_words_are_sentences_and_its_patterns_find_its_own_symptom(entry: Entry) -> None:
    for text in (entry.symptom, entry.cause, entry.remedy):
        assert text
        assert text == " ".join(text.split())
    assert not entry.title.endswith(".")
    for pattern in entry.patterns:
        re.compile(pattern)
    if entry.patterns:
        assert any(re.search(p, entry.symptom, re.IGNORECASE) for p in entry.patterns)
        assert entry in match(entry.symptom)


def test_each_row_of_the_guides_is_covered_or_has_a_reason() -> None:
    covered = {row for entry in ENTRIES for row in entry.rows}
    assert len(ROWS) == 17 + 38 + 8
    assert covered <= set(ROWS)
    assert not covered & set(ROWS_WITHOUT_ENTRY)
    assert covered | set(ROWS_WITHOUT_ENTRY) == set(ROWS)
    assert all(len(reason) > 20 for reason in ROWS_WITHOUT_ENTRY.values())


def test_the_document_is_in_step(repository: Path) -> None:
    """If not: `python -m minitrainer.pitfalls > docs/pitfalls.md`."""
    assert (repository / "docs/pitfalls.md").read_text() == document()


def test_codes_named_elsewhere_exist(repository: Path) -> None:
    """In brackets or with `explain`, in the documentation and in messages of the library."""
    texts = [*(repository / "docs").glob("*.md"), repository / "README.md"]
    texts += (repository / "minitrainer").rglob("*.py")
    named = {
        (path.name, code)
        for path in texts
        for code in re.findall(r"(?:\[|explain )([LDSPCRTF]\d\d)\b", path.read_text())
    }
    assert not [(name, code) for name, code in named if code not in CODES and code[1:] != "00"]


def test_finding() -> None:
    entry = find("s02")
    assert entry is not None
    assert entry.code == "S02"
    assert find("S99") is None
    assert nearest("S99")[0].code == "S29"
    pasted = (
        "Traceback ...\nRuntimeError: Expected to have finished\n  reduction in the prior iteration"
    )
    assert [found.code for found in match(pasted)] == ["S02"]
    # A code in brackets wins over words.
    assert [found.code for found in match(f"[C04] disk full\n{pasted}")] == ["C04"]
    assert match("banana") == []
    assert len(nearest("validation is noisy")) == 3
