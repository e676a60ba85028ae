"""`python -m minitrainer explain`."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from minitrainer.cli import main
from minitrainer.pitfalls import ENTRIES, Entry

Capture = pytest.CaptureFixture[str]


def test_alone_it_lists_all(capsys: Capture) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{entry.code}  {entry.title}" for entry in ENTRIES]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.code for entry in ENTRIES])
def test_a_code_prints_its_entry(entry: Entry, capsys: Capture) -> None:
    assert main(["explain", entry.code.lower()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{entry.code}  {entry.title}\n")
    for part in ("What you see.", "Why.", "What minitrainer does.", "component", "proof"):
        assert part in out


def test_a_message_finds_its_entries(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "RuntimeError: Expected to have finished reduction"
    assert main(["explain", message]) == 0
    assert capsys.readouterr().out.startswith("S02  ")
    # Without quotes too, and several lines from standard input.
    assert main(["explain", *message.split()]) == 0
    assert capsys.readouterr().out.startswith("S02  ")
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("Traceback:\n  Watchdog caught collective\n operation timeout")
    )
    assert main(["explain", "-"]) == 0
    assert capsys.readouterr().out.startswith("2 entries: S23, S29\n")
    assert main(["explain", "bash: --nproc_per_node=4: command not found"]) == 0
    assert capsys.readouterr().out.startswith("L26  ")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("S99", "the message 'S99'. The nearest are: S29 "),
        ("banana split everywhere", "The nearest are: "),
    ],
)
def test_nothing_found_names_the_nearest(asked: str, said: str, capsys: Capture) -> None:
    assert main(["explain", asked]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minitrainer: error: [R03] No entry has the code or the message ")
    assert said in err
    assert err.count("\n") == 1


def test_it_does_not_wait_for_torch() -> None:
    script = (
        "import sys, minitrainer.cli as cli\n"
        "assert cli.main(['explain', 'S02']) == 0\n"
        "heavy = {'torch', 'numpy', 'omegaconf', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
