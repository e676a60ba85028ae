"""The words after `python -m minitrainer`, understood: command, recipe, overrides, options.

Imports no torch, so that --help and a misspelt command line answer at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
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
}
_CHECKPOINT = "runs/NAME/checkpoints/last.ckpt"
_EXAMPLES = {
    "fit": (
        "fit recipe.yaml",
        "fit recipe.yaml trainer.max_epochs=3 module.lr=1e-4",
        "fit recipe.yaml trainer.devices=2",
        f"fit recipe.yaml --resume {_CHECKPOINT}",
    ),
    "validate": (f"validate recipe.yaml --ckpt {_CHECKPOINT}",),
    "test": (f"test recipe.yaml --ckpt {_CHECKPOINT}",),
    "predict": (f"predict recipe.yaml --ckpt {_CHECKPOINT} --output y.pt",),
}

@dataclass(frozen=True)
class Command:
    """A command line, understood."""

    name: str
    recipe: str
    overrides: Sequence[str]
    checkpoint: Path | None
    output: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise CommandError(f"{message[:1].upper()}{message[1:]}.", fix=f"Try {self.prog} --help.")


def parse(arguments: Sequence[str]) -> Command | None:
    """Return the command; None when the question (help, version) is answered already."""
    words = list(arguments)
    if any(word.startswith(("--local-rank", "--local_rank")) for word in words):
        # torch.distributed.launch adds it; LOCAL_RANK in the environment says the same (B115).
        from minitrainer.launch.environment import strip_local_rank

        words = strip_local_rank(words)
    try:
        if words and words[0] in _COMMANDS:
            return _parse_command(words[0], words[1:])
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
    checkpoint, output = options.checkpoint, getattr(options, "output", None)
    return Command(
        name=name,
        recipe=recipe,
        overrides=rest[:at] + rest[at + 1 :],
        checkpoint=None if checkpoint is None else Path(checkpoint).absolute(),
        output=None if output is None else _writable(Path(output).absolute()),
    )


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
    commands = "\n".join(f"  {name:<10} {what}" for name, what in _COMMANDS.items())
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
    option, what = (
        ("--resume", "go on from this checkpoint") if name == "fit" else ("--ckpt", "weights")
    )
    parser.add_argument(option, metavar="PATH", dest="checkpoint", help=what)
    if name == "predict":
        parser.add_argument("--output", metavar="FILE", help="save the predictions here")
    return parser


def _no_such_command(rest: Sequence[str]) -> CommandError:
    from minitrainer.recipe.nearest import did_you_mean

    known = ", ".join(_COMMANDS)
    if not rest:
        return CommandError("No command was given.", fix=f"Write one of {known}, or --help.")
    word = rest[0]
    if Path(word).suffix in (".yaml", ".yml"):
        return CommandError(
            f"{word} is not a command.", fix=f"Write {_PROGRAM} fit {word} to train it."
        )
    near = did_you_mean(word, _COMMANDS) or f"; there are {known}."
    return CommandError(f"{word} is not a command{near}")


def _no_such_option(name: str, word: str) -> CommandError:
    option = word.partition("=")[0]
    options = {"fit": "--resume PATH", "predict": "--ckpt PATH and --output FILE"}
    key = option.lstrip("-").replace("-", "_")
    return CommandError(
        f"{name} has no option {option}.",
        f"It has {options.get(name, '--ckpt PATH')}; settings are written as key=value.",
        f"Perhaps trainer.{key}=VALUE is meant.",
    )


