"""`python -m minitrainer doctor`: what it prints and which exit code it picks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minitrainer.cli import main

Capture = pytest.CaptureFixture[str]
SCRIPTS = Path(__file__).parent / "scripts"

WARNED = "from torch.cuda.amp import autocast\nwith autocast(): pass\n"
BROKEN = (
    "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n"
    "torch.save(model.module.state_dict(), 'a.pt')\n"
)


def script(text: str | bytes) -> str:
    """Write a script into the folder of the test and return its name."""
    Path("train.py").write_bytes(text.encode() if isinstance(text, str) else text)
    return "train.py"


@pytest.mark.parametrize(
    ("text", "code", "lines"),
    [
        ("print('hello')\n", 0, [r"nothing found"]),
        (WARNED, 0, [r"train\.py:2: \[P23\] warning: .*\. Write .*\.", r"1 warning"]),
        (BROKEN, 1, [r"train\.py:3: \[C26\] error: .*\. Save under .*", r"1 error"]),
        (BROKEN + WARNED * 2, 1, [r".*error.*", r".*:5: .*warning.*", "1 error, 1 warning"]),
        ("raise SystemExit('it was run')\n", 0, [r"nothing found"]),
        (b"\xef\xbb\xbfprint(1)\n", 0, [r"nothing found"]),
        ("# -*- coding: latin-1 -*-\nx = '\xe4'\n".encode("latin-1"), 0, [r"nothing found"]),
    ],
)
def test_findings_of_a_script(text: str, code: int, lines: list[str], capsys: Capture) -> None:
    assert main(["doctor", "--script", script(text)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) == len(lines)
    for line, pattern in zip(out.splitlines(), lines, strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  lr: 0.1\n", "train.py is not Python: invalid syntax in line 1."),
        ("x = target.cuda(async=True)\n", "train.py is not Python: invalid syntax in line 1."),
        ("print 'old'\n", "train.py is not Python: Missing parentheses"),
        (b"\x00\x01", "train.py is not Python: source code string cannot contain null bytes"),
        (b"x = '\xe4'\n", "train.py is not Python: "),
        ("(" * 5000, "train.py is not Python: too many nested parentheses"),
        ("-" * 100_000 + "1", "train.py is "),
    ],
)
def test_what_is_no_script_is_one_line(text: str | bytes, expected: str, capsys: Capture) -> None:
    assert main(["doctor", "--script", script(text)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"minitrainer: error: [R03] {expected}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--script nowhere.py", "[R03] nowhere.py does not exist."),
        ("--script .", "[R03] . cannot be read: Is a directory."),
        ("--script", "[R03] Argument --script: expected one argument."),
        ("--scirpt x.py", "[R03] Unrecognized arguments: --scirpt x.py."),
    ],
)
def test_a_command_line_that_is_not_understood(words: str, expected: str, capsys: Capture) -> None:
    assert main(["doctor", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"minitrainer: error: {expected}")


def test_help_shows_examples(capsys: Capture) -> None:
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert "python -m minitrainer doctor --script train.py" in out.split("examples")[1]
    assert main(["--help"]) == 0
    assert re.search(r"^  doctor +\w", capsys.readouterr().out, re.MULTILINE)


def test_reading_a_script_does_not_wait_for_torch(repository: Path) -> None:
    file = SCRIPTS / "tuned.py.txt"
    code = (
        "import sys, minitrainer.cli as cli\n"
        f"assert cli.main(['doctor', '--script', {str(file)!r}]) == 1\n"
        "heavy = {'torch', 'numpy', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_this_machine(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of facts first, then what is wrong; the worst decides the exit code."""
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    code = main(["doctor"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("versions        python 3.")
    assert any(line.startswith("run directory   runs, ") for line in out)
    warnings = [line for line in out if line.startswith("environment: [S29] warning: NCCL_BLOCK")]
    assert len(warnings) == 1
    assert code == int(any(" error: " in line for line in out))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("environment: [L01] error: WORLD_SIZE is set")]
