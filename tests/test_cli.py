"""The command line: what it answers, what it prints, which exit code it picks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from minitrainer import __version__, cli
from minitrainer.cli import main
from minitrainer.command_line import Command
from minitrainer.errors import CheckpointWriteError, EmptyDataError, RankFailedError
from minitrainer.launch import Interrupted
from minitrainer.recipe.build import Built

TOY = """
import os
import torch, minitrainer as mt
from torch.utils.data import DataLoader, TensorDataset


class Toy(mt.Module):
    def __init__(self, lr: float = 0.1, bias: float = 0.0, boom: bool = False):
        super().__init__()
        self.lr, self.boom = lr, boom
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.boom:
            raise ValueError("boom")
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        return {"y": self.layer(batch[0]), "x": (batch[0], "text")}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ToyData(mt.DataModule):
    def __init__(self, size: int = 8):
        self.size = size

    def loader(self):
        data = TensorDataset(torch.ones(self.size, 4))
        return DataLoader(data, batch_size=2)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class NeedsWidth(Toy):
    def __init__(self, width: int):
        super().__init__()
"""
RECIPE = """
module: {_target_: toy.Toy}
data: {_target_: toy.ToyData}
trainer: {max_epochs: 1, enable_progress_bar: false}
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "broken.yaml").write_text("module: {_target_: toy.Toy\ntrainer: 3\n")
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("toy", None)


def lines_of_usage_error(capsys: Capture, *arguments: str) -> list[str]:
    """Return the lines on stderr of a command that must end as a usage error."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert all(line.startswith("minitrainer: error: [") for line in lines), err
    return [line.removeprefix("minitrainer: error: ") for line in lines]


# Answers without torch ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "fit", "validate", "test", "predict"])
def test_help_shows_an_example(command: str, capsys: Capture) -> None:
    assert main([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"python -m minitrainer {command or 'fit'} recipe.yaml" in out.split("example")[1]
    assert max(map(len, out.splitlines())) <= 100


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"minitrainer {__version__}\n"


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    """Importing torch takes a second; nobody waits for it to read a usage line."""
    script = (
        "import sys, minitrainer.cli as cli\n"
        "codes = [cli.main(words) for words in (['fit', '--help'], ['fti'], ['fit', 'no.yaml'],"
        " ['fit', 'broken.yaml'])]\n"
        "assert codes == [0, 2, 2, 2], codes\n"
        "heavy = {'torch', 'numpy', 'torchvision'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "[R03] No command was given. Write one of fit, validate, test, predict, "),
        ("fti recipe.yaml", "[R03] fti is not a command; did you mean fit?"),
        ("train recipe.yaml", "[R03] train is not a command; there are fit, validate, test, pred"),
        ("recipe.yaml", "[R03] recipe.yaml is not a command. Write python -m minitrainer fit re"),
        ("fit", "[R03] No recipe was given to fit. Write python -m minitrainer fit recipe.yaml."),
        ("fit trainer.devices=2", "[R03] No recipe was given to fit."),
        ("fit recipe.yaml --resume", "[R03] Argument --resume: expected one argument."),
        ("fit recipe.yaml --max-epochs 3", "[R03] fit has no option --max-epochs. It has --resume"),
        ("test recipe.yaml --resume x", "[R03] test has no option --resume. It has --ckpt PATH; "),
        ("fit recipe.yaml --res x", "[R03] fit has no option --res."),
        ("predict recipe.yaml --output .", "[R03] The output "),
        ("predict recipe.yaml --output toy.py/x", "[R03] The output "),
    ],
)
def test_command_lines_that_are_not_understood(
    arguments: str, expected: str, capsys: Capture
) -> None:
    (line,) = lines_of_usage_error(capsys, *arguments.split())
    assert line.startswith(expected)


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("fit recip.yaml", "recip.yaml: no such file; did you mean recipe.yaml?"),
        ("fit broken.yaml", "broken.yaml: invalid YAML in line 2, column "),
        ("fit empty.yaml", "empty.yaml: the recipe is empty"),
        ("fit recipe.yaml max_epochs 3", "max_epochs: not an override; write key=value"),
        ("fit recipe.yaml trainer.max_epoch=3", "max_epoch: unknown key; did you mean max_epochs?"),
        ("fit recipe.yaml module.lrr=3", "module.lrr: unknown key; did you mean lr?"),
        ("fit recipe.yaml trainer.max_epochs='2'", "wants int or null, got the str"),
        ("fit recipe.yaml trainer.seed=010", "trainer.seed: YAML reads 010 as 8;"),
        ("fit recipe.yaml module.lr=${vars.x}", "module.lr: ${vars.x} points to nothing."),
        ("fit recipe.yaml module._target_=toy.To", "toy has no To; did you mean Toy?"),
        ("fit recipe.yaml module._target_=toy.ToyData", "toy.ToyData is not a subclass of minit"),
        ("fit recipe.yaml module._target_=os.system", "os.system is refused: "),
        ("fit recipe.yaml module._target_=toy.NeedsWidth", "module.width: missing; toy.NeedsW"),
        ("fit recipe.yaml trainer.devices=0", "devices is 0."),
        ("fit recipe.yaml trainer.accelerator=cuda trainer.devices=99", "GPU"),
        ("fit recipe.yaml trainer.max_epochs=-1", "max_epochs=-1"),
        ("fit recipe.yaml trainer.val_check_interval=100", "val_check_interval=100 is longer"),
        ("fit recipe.yaml data.size=0", "no samples"),
        ("fit recipe.yaml --resume nothing.ckpt", "nothing.ckpt does not exist."),
        ("fit recipe.yaml --resume toy.py", "toy.py (1"),
        ("validate recipe.yaml --ckpt nothing.ckpt", "nothing.ckpt does not exist."),
        ("predict recipe.yaml --ckpt .", "is a folder."),
    ],
)
def test_bad_input_is_one_clear_line(arguments: str, expected: str, capsys: Capture) -> None:
    """Case B101 and the list of issue 2: exit code 2, one line per problem, no traceback."""
    lines = lines_of_usage_error(capsys, *arguments.split())
    assert expected in lines[0]
    assert len(lines) == (2 if arguments.endswith(" 3") else 1)
    assert not Path("runs").exists(), "nothing was started"


def test_all_problems_at_once(capsys: Capture) -> None:
    words = "trainer.max_epoch=3 module.lr=x data.size=1.0 modul.lr=3 trainer.seed=1:30"
    lines = lines_of_usage_error(capsys, "fit", "recipe.yaml", *words.split())
    assert [line.split()[1] for line in lines] == [
        *("modul:", "trainer.seed:", "module.lr:", "data.size:", "trainer.max_epoch:")
    ]


# Work --------------------------------------------------------------------------------------------


def test_fit_says_where_everything_is(capsys: Capture) -> None:
    """Options and overrides in any order, values with a minus, a stray --local_rank (B115)."""
    words = "--local_rank 0 fit trainer.max_epochs=2 recipe.yaml --local-rank=1 module.bias=-1e-3"
    assert main(words.split()) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"metrics   loss \S+  val_loss \S+", out[0])
    (run,) = Path("runs").iterdir()
    assert re.fullmatch(r"recipe-\d{8}-\d{6}", run.name)
    assert out[1] == f"run       {run}"
    assert out[-1] == f"last      {run}/checkpoints/last.ckpt"
    assert 3 <= len(out) <= 6
    assert "bias: -0.001" in (run / "recipe.yaml").read_text()


def test_resume_goes_on_in_the_same_directory(capsys: Capture) -> None:
    assert main(["fit", "recipe.yaml"]) == 0
    (run,) = Path("runs").iterdir()
    last = str(run / "checkpoints" / "last.ckpt")
    assert main(["fit", "--resume", last, "recipe.yaml", "trainer.max_epochs=3"]) == 0
    assert list(Path("runs").iterdir()) == [run]
    assert torch.load(last, weights_only=True)["counters"]["global_step"] == 12
    capsys.readouterr()
    for command, metric in (("validate", "val_loss"), ("test", "test_loss")):
        assert main([command, "recipe.yaml", "--ckpt", last]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0].startswith(f"metrics   {metric} ")
        assert out[1] == f"weights   {last}"


def test_predict(capsys: Capture) -> None:
    assert main(["predict", "recipe.yaml", "--output", "some/where.pt", "data.size=3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "weights   as built, no --ckpt was given",
        "batches   2",
        "each      {y: Tensor (2, 1) float32, x: (Tensor (2, 4) float32, str)}",
        "saved     some/where.pt",
    ]
    saved = torch.load("some/where.pt", weights_only=True)
    assert [batch["y"].shape for batch in saved] == [(2, 1), (1, 1)]


def test_two_ranks_print_one_result(capsys: Capture) -> None:
    assert main(["fit", "recipe.yaml", "trainer.devices=2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["metrics", "run", "best", "last"]
    assert len(list(Path("runs").iterdir())) == 1


def test_a_stop_names_the_checkpoint_to_go_on_from(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_the_end = cli._run

    def run(command: Command, built: Built, start: Path) -> NoReturn:
        run_to_the_end(command, built, start)
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(cli, "_run", run)
    for setting, hint in (
        ("trainer.enable_checkpointing=true", "; go on with --resume {}/checkpoints/last.ckpt"),
        ("trainer.enable_checkpointing=false", ""),
    ):
        assert main(["fit", "recipe.yaml", "trainer.run_dir=here", setting]) == 130
        out, err = capsys.readouterr()
        run_dir = out.split("run       ")[1].splitlines()[0]
        assert err == f"minitrainer: stopped by SIGINT{hint.format(run_dir)}\n"


# Exit codes --------------------------------------------------------------------------------------


def test_an_exception_of_the_users_is_pythons_own_traceback(capsys: Capture) -> None:
    assert main(["fit", "recipe.yaml", "module.boom=true"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Traceback (most recent call last):") == 1
    assert err.endswith("ValueError: boom\n")
    assert "minitrainer: error" not in err


def _raise(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(cli, "_run", run)


@pytest.mark.parametrize(
    ("make", "code", "expected"),
    [
        (lambda: EmptyDataError("None."), 2, "minitrainer: error: [D01] None.\n"),
        (
            lambda: CheckpointWriteError("Full."),
            1,
            "minitrainer: error: [C04] Full. (minitrainer explain C04)\n",
        ),
        (
            lambda: RankFailedError("Rank 1 raised E.", 'Traceback:\n  File "x"', "Fix."),
            1,
            'Traceback:\n  File "x"\nminitrainer: error: [L04] Rank 1 raised E. Fix. '
            "(minitrainer explain L04)\n",
        ),
        (
            lambda: RankFailedError("Rank 1 was killed.", "Memory."),
            1,
            "minitrainer: error: [L04] Rank 1 was killed. Memory. (minitrainer explain L04)\n",
        ),
        (lambda: Interrupted(signal.SIGTERM), 143, "minitrainer: stopped by SIGTERM\n"),
        (lambda: Interrupted(signal.SIGINT), 130, "minitrainer: stopped by SIGINT\n"),
        (KeyboardInterrupt, 130, "minitrainer: stopped by SIGINT\n"),
    ],
)
def test_exit_codes(
    make: Callable[[], BaseException],
    code: int,
    expected: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _raise(monkeypatch, make())
    assert main(["fit", "recipe.yaml"]) == code
    assert capsys.readouterr().err == expected


def test_a_failure_that_a_rank_had_shows_its_traceback(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = CheckpointWriteError("Full.")
    error.__cause__ = RankFailedError("Rank 0 raised.", "Traceback:\n  deep")
    _raise(monkeypatch, error)
    assert main(["fit", "recipe.yaml"]) == 1
    assert capsys.readouterr().err == (
        "Traceback:\n  deep\nminitrainer: error: [C04] Full. (minitrainer explain C04)\n"
    )


def test_one_rank_speaks_for_all(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mistake is not told once per rank, but a rank's own one is told."""
    monkeypatch.setenv("RANK", "1")
    assert main(["fti"]) == 2
    assert main(["fit", "recipe.yaml", "trainer.max_epoch=3"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli, "_PATIENCE", 0.0)
    monkeypatch.setenv("GROUP_RANK", "1")
    assert main(["fti"]) == 2
    assert capsys.readouterr().err.startswith("[rank 1] minitrainer: error: [R03] fti")
    monkeypatch.delenv("GROUP_RANK")
    _raise(monkeypatch, EmptyDataError("No data on this rank."))
    assert main(["fit", "recipe.yaml"]) == 2
    assert capsys.readouterr().err == ("[rank 1] minitrainer: error: [D01] No data on this rank.\n")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ValueError("boom"),
            "[rank 1] minitrainer: error: [L04] Rank 1 raised ValueError: boom. "
            "(minitrainer explain L04)",
        ),
        (
            RuntimeError("[/x/gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1"),
            "[rank 1] minitrainer: error: the connection to another rank broke; that one tells why",
        ),
    ],
)
def test_under_a_launcher_the_first_cause_is_told(
    error: Exception, expected: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B19: what only follows from another rank's end gets no traceback of its own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli, "_PATIENCE", 0.0)
    _raise(monkeypatch, error)
    assert main(["fit", "recipe.yaml"]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == expected
    assert err.count("Traceback") == (1 if isinstance(error, ValueError) else 0)


def test_nobody_reads_the_output_any_more(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`minitrainer ... | head`: the work is done, so no traceback and exit code 0."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert main(["validate", "recipe.yaml"]) == 0
        assert main(["--help"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_real_process() -> None:
    """Exit codes as the shell sees them."""
    command = [sys.executable, "-m", "minitrainer"]
    done = subprocess.run(
        [*command, "fit", "recipe.yaml", "trainer.seed=010"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "minitrainer: error: [R02] trainer.seed: YAML reads 010 as 8; "
        'write 10 for the number or "010" for a string.\n'
    )
