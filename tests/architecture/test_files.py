"""What holds for the files of the project as such."""

from __future__ import annotations

import re
from pathlib import Path

from minitrainer.version import __version__

MAX_LINES = 450


def test_no_file_is_too_long_to_read(repository: Path) -> None:
    lengths = {
        path.relative_to(repository).as_posix(): len(path.read_text().splitlines())
        for path in (repository / "minitrainer").rglob("*.py")
    }
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_no_file_is_named_for_nothing(repository: Path) -> None:
    names = {path.stem for path in (repository / "minitrainer").rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "common", "misc", "manager"}


def test_the_changelog_names_the_version(repository: Path) -> None:
    headings = re.findall(r"^## (\S+)", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__


def test_links_of_the_documents_lead_somewhere(repository: Path) -> None:
    documents = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    documents += [repository / "recipes/README.md", repository / "benchmarks/README.md"]
    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_files_that_the_readme_names_exist(repository: Path) -> None:
    named = re.findall(
        r"`((?:minitrainer|recipes|benchmarks|docs|tests)/[\w./]+)`",
        (repository / "README.md").read_text(),
    )
    assert len(named) > 5
    assert not [name for name in named if not (repository / name).exists()]
