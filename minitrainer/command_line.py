"""The words after `python -m minitrainer`, understood: command, recipe, overrides, options.

Imports no torch, so that --help and a misspelt command line answer at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from minitrainer.errors import CommandError
from minitrainer.version import __version__

_PROGRAM = "python -m minitrainer"
_COMMANDS = {
    "fit": "train the module of a recipe",
    "validate": "run the validation of a recipe once",
    "test": "run the test of a recipe once",
    "predict": "run the module over the prediction data of a recipe",
    "parity": "compare a recipe on one process, on many ranks and by accumulation",
}
_EXPLAIN = "explain"
_EXPLAIN_PURPOSE = "tell of a pitfall: its code, or a message to be pasted"
_DOCTOR = "doctor"
_DOCTOR_PURPOSE = "look for what is wrong with this machine, a recipe or a hand-written script"
_ALL_COMMANDS = (*_COMMANDS, _DOCTOR, _EXPLAIN)
_WORDS = ("auto", "last", "best")
_CHECKPOINT = "runs/NAME/checkpoints/last.ckpt"
_EXAMPLES = {
    "fit": (
        "fit recipe.yaml",
        "fit recipe.yaml trainer.max_epochs=3 module.lr=1e-4",
        "fit recipe.yaml trainer.devices=2",
        f"fit recipe.yaml --resume {_CHECKPOINT}",
        "fit recipe.yaml trainer.run_dir=runs/a --resume auto",
    ),
    "validate": (f"validate recipe.yaml --ckpt {_CHECKPOINT}",),
    "test": (f"test recipe.yaml --ckpt {_CHECKPOINT}",),
    "predict": (f"predict recipe.yaml --ckpt {_CHECKPOINT} --output y.pt",),
    "parity": ("parity recipe.yaml", "parity recipe.yaml module.norm=false --ranks 4 --steps 20"),
}


@dataclass(frozen=True)
class Command:
    """A command line, understood."""

    name: str
    recipe: str
    overrides: Sequence[str]
    checkpoint: Path | str | None
    output: Path | None
    ranks: int = 1
    steps: int = 0


@dataclass(frozen=True)
class Question:
    """What `explain` was asked: a code, a message, "-" for standard input, "" for the list."""

    text: str


@dataclass(frozen=True)
class Examination:
    """What `doctor` shall look at: a script, a recipe, or without either this machine alone."""

    script: Path | None = None
    recipe: str | None = None
    overrides: Sequence[str] = ()
    ranks: int | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise CommandError(f"{message[:1].upper()}{message[1:]}.", fix=f"Try {self.prog} --help.")


def parse(arguments: Sequence[str]) -> Command | Question | Examination | None:
    """Return what is asked for; None when argparse has answered (help, version)."""
    words = list(arguments)
    if any(word.startswith(("--local-rank", "--local_rank")) for word in words):
        # torch.distributed.launch adds it; LOCAL_RANK in the environment says the same (B115).
        from minitrainer.launch.environment import strip_local_rank

        words = strip_local_rank(words)
    try:
        if words and words[0] in _COMMANDS:
            return _parse_command(words[0], words[1:])
        if words and words[0] == _EXPLAIN:
            return _parse_question(words[1:])
        if words and words[0] == _DOCTOR:
            return _parse_examination(words[1:])
        _, rest = _main_parser().parse_known_args(words)
    except SystemExit:  # argparse has printed the help or the version
        return None
    raise _no_such_command(rest)


def _parse_command(name: str, words: Sequence[str]) -> Command:
    # The parser knows the options only: all other words, in whatever order, come back as they are.
    options, rest = _command_parser(name).parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            raise _no_such_option(name, word)
    # The first word is the recipe; `fit trainer.devices=2 recipe.yaml` is understood all the same.
    recipe = next((word for word in rest if "=" not in word or Path(word).is_file()), None)
    if recipe is None:
        raise CommandError(
            f"No recipe was given to {name}.", fix=f"Write {_PROGRAM} {name} recipe.yaml."
        )
    at = rest.index(recipe)
    checkpoint, output = getattr(options, "checkpoint", None), getattr(options, "output", None)
    return Command(
        name=name,
        recipe=recipe,
        overrides=rest[:at] + rest[at + 1 :],
        checkpoint=checkpoint if checkpoint in (None, *_WORDS) else Path(checkpoint).absolute(),
        output=None if output is None else _writable(Path(output).absolute()),
        ranks=getattr(options, "ranks", 1),
        steps=getattr(options, "steps", 0),
    )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"wants a whole number of at least {least}")
        return int(text)

    return number


def _parse_question(words: Sequence[str]) -> Question:
    parser = _Parser(
        prog=f"{_PROGRAM} {_EXPLAIN}",
        usage=f"{_PROGRAM} {_EXPLAIN} [CODE | MESSAGE | -]",
        description=f"{_EXPLAIN_PURPOSE[:1].upper()}{_EXPLAIN_PURPOSE[1:]}.\n\n"
        "  (nothing)   list all entries\n"
        "  CODE        print the entry, like S02\n"
        "  MESSAGE     find the entries that a message of torch, NCCL or minitrainer belongs to\n"
        "  -           read the message from standard input",
        epilog=f"examples:\n  {_PROGRAM} {_EXPLAIN} S02\n"
        f'  {_PROGRAM} {_EXPLAIN} "Expected to have finished reduction"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if words and words[0] in ("-h", "--help"):
        parser.parse_args(words[:1])
    # Whatever else: a message may well begin with dashes.
    return Question(" ".join(words))


def _parse_examination(words: Sequence[str]) -> Examination:
    parser = _Parser(
        prog=f"{_PROGRAM} {_DOCTOR}",
        usage=f"{_PROGRAM} {_DOCTOR} [RECIPE [KEY=VALUE ...] [--ranks N] | --script FILE]",
        description=f"{_DOCTOR_PURPOSE[:1].upper()}{_DOCTOR_PURPOSE[1:]}.\n\n"
        "  (nothing)   look at this machine\n"
        "  RECIPE      build it on its ranks and take a few steps, too; nothing is written\n"
        "  KEY=VALUE   set a value of the recipe, like trainer.devices=2\n\n"
        "The exit code is 1 if there is a finding of severity error, and 0 otherwise.",
        epilog=f"examples:\n  {_PROGRAM} {_DOCTOR}\n  {_PROGRAM} {_DOCTOR} recipe.yaml --ranks 2\n"
        f"  {_PROGRAM} {_DOCTOR} --script train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--script", metavar="FILE", type=Path, help="read this script; nothing of it is run"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=_at_least(1), help="local ranks on CPUs, for a recipe"
    )
    options, rest = parser.parse_known_args(words)
    recipe = next((w for w in rest if "=" not in w or Path(w).is_file()), None)
    lost = [word for word in rest if word.startswith("-")] or (rest if recipe is None else [])
    if lost:
        raise CommandError(
            f"Unrecognized arguments: {' '.join(rest)}.", fix=f"Try {parser.prog} --help."
        )
    if recipe is not None and options.script is not None:
        raise CommandError(
            "Both a recipe and a script were given.", fix="Have one examined after the other."
        )
    if recipe is None and options.ranks is not None:
        raise CommandError(
            "--ranks was given without a recipe.",
            "A machine and a script have no ranks to start.",
            f"Write {_PROGRAM} {_DOCTOR} recipe.yaml --ranks {options.ranks}.",
        )
    if recipe is None:
        return Examination(options.script)
    at = rest.index(recipe)
    return Examination(None, recipe, rest[:at] + rest[at + 1 :], options.ranks)


def _writable(file: Path) -> Path:
    """Return the file if it can be written; a long prediction must not be lost in the end."""
    folder = next(parent for parent in file.parents if parent.exists())
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CommandError(
            f"The output {file} cannot be written.",
            fix="Give the name of a file in a folder that you may write to.",
        )
    return file


def _main_parser() -> argparse.ArgumentParser:
    purposes = {**_COMMANDS, _DOCTOR: _DOCTOR_PURPOSE, _EXPLAIN: _EXPLAIN_PURPOSE}
    commands = "\n".join(f"  {name:<10} {what}" for name, what in purposes.items())
    parser = _Parser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} COMMAND RECIPE [KEY=VALUE ...] [OPTIONS]",
        description=f"One recipe, any number of ranks, the same result.\n\ncommands:\n{commands}",
        epilog=f"example:\n  {_PROGRAM} fit recipe.yaml trainer.devices=2\n\n"
        f"`{_PROGRAM} COMMAND --help` says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"minitrainer {__version__}")
    return parser


def _command_parser(name: str) -> argparse.ArgumentParser:
    examples = [f"  {_PROGRAM} {example}" for example in _EXAMPLES[name]]
    if name == "fit":
        examples.append("  torchrun --nproc-per-node=2 -m minitrainer fit recipe.yaml")
    parser = _Parser(
        prog=f"{_PROGRAM} {name}",
        usage=f"{_PROGRAM} {name} RECIPE [KEY=VALUE ...] [OPTIONS]",
        description=f"{_COMMANDS[name][:1].upper()}{_COMMANDS[name][1:]}.\n\n"
        "  RECIPE      a YAML file with module, data and trainer\n"
        "  KEY=VALUE   set a value of the recipe, like trainer.max_epochs=3",
        epilog="\n".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if name == "parity":
        parser.add_argument(
            "--ranks", metavar="N", type=_at_least(2), default=2, help="ranks (default 2)"
        )
        parser.add_argument(
            "--steps", metavar="N", type=_at_least(1), default=8, help="optimizer steps (default 8)"
        )
        return parser
    option, what = "--ckpt", "weights: a path, or `last` or `best` of the newest run"
    if name == "fit":
        option, what = (
            "--resume",
            (
                "go on from this checkpoint: a path; `last` or `best` of the run in "
                "trainer.run_dir, or of the newest one; `auto` for its newest whole one, or anew "
                "if there is none"
            ),
        )
    parser.add_argument(option, metavar="PATH", dest="checkpoint", help=what)
    if name == "predict":
        parser.add_argument("--output", metavar="FILE", help="save the predictions here")
    return parser


def _no_such_command(rest: Sequence[str]) -> CommandError:
    from minitrainer.recipe.nearest import did_you_mean

    known = ", ".join(_ALL_COMMANDS)
    if not rest:
        return CommandError("No command was given.", fix=f"Write one of {known}, or --help.")
    word = rest[0]
    if Path(word).suffix in (".yaml", ".yml"):
        return CommandError(
            f"{word} is not a command.", fix=f"Write {_PROGRAM} fit {word} to train it."
        )
    near = did_you_mean(word, _ALL_COMMANDS) or f"; there are {known}."
    return CommandError(f"{word} is not a command{near}")


def _no_such_option(name: str, word: str) -> CommandError:
    option = word.partition("=")[0]
    options = {
        "fit": "--resume PATH",
        "predict": "--ckpt PATH and --output FILE",
        "parity": "--ranks N and --steps N",
    }
    key = option.lstrip("-").replace("-", "_")
    return CommandError(
        f"{name} has no option {option}.",
        f"It has {options.get(name, '--ckpt PATH')}; settings are written as key=value.",
        f"Perhaps trainer.{key}=VALUE is meant.",
    )
