"""The command line: the only place that prints results and picks exit codes.

0 done; 1 training failed, layouts part, or the doctor found an error; 2 usage or recipe; 130 after
SIGINT; 143 after SIGTERM.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch takes a second to import: everything that needs it is imported when it is needed, so that
# --help and a misspelt command line answer at once.
from minitrainer.command_line import Command, Examination, Question, parse
from minitrainer.errors import (
    CommandError,
    IncompleteEnvironmentError,
    MinitrainerError,
    RankFailedError,
    UsageError,
)

if TYPE_CHECKING:
    from minitrainer.doctor import Finding
    from minitrainer.recipe.build import Built

_PATIENCE = 2.0
"""Seconds that a rank waits before it says what another one is likely to say better."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        arguments: The words after `python -m minitrainer`; those of this process by default.
    """
    _write_line_by_line()
    code = _guarded(sys.argv[1:] if arguments is None else arguments)
    _flush()
    return code


def _guarded(arguments: Sequence[str]) -> int:
    """Run one command; whatever it raises becomes a message and an exit code."""
    built: Built | None = None
    start = Path.cwd()  # the user's code may leave it
    code = 0
    try:
        command = parse(arguments)
        if isinstance(command, Question):
            _explain(command.text)
        elif isinstance(command, Examination):
            code = _examine(command)
        elif command is not None and command.name == "parity":
            code = _compare_layouts(command)
        elif command is not None:
            built = _build(command)
            _run(command, built, start)
    except UsageError as error:
        _complain_of_usage(error, running=built is not None)
        return error.exit_code
    except MinitrainerError as error:
        _complain_of_failure(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        # minitrainer.launch.Interrupted is a KeyboardInterrupt that knows its signal.
        received = getattr(error, "signal", signal.SIGINT)
        if _rank() == 0:
            _say(f"stopped by {received.name}{_how_to_go_on(built, start)}")
        return 128 + int(received)
    except Exception as error:  # noqa: BLE001 the user's code may raise anything
        _complain_of_users_code(error)
        return 1
    return code


# Running a command -------------------------------------------------------------------------------


def _build(command: Command) -> Built:
    from minitrainer.recipe.load import load_recipe

    recipe = load_recipe(command.recipe, command.overrides)
    # Only now, with a recipe that can be read, is torch worth its second.
    from minitrainer.recipe.build import build

    return build(recipe)


def _run(command: Command, built: Built, start: Path) -> None:
    trainer, module, data = built.trainer, built.module, built.datamodule
    checkpoint = command.checkpoint
    if command.name == "fit":
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        lines = [_metrics_line(trainer.callback_metrics), *_run_lines(built, start)]
    elif command.name == "predict":
        outputs = trainer.predict(module, datamodule=data, ckpt_path=checkpoint)
        lines = [_weights_line(checkpoint, start), f"batches   {len(outputs)}"]
        lines += [f"each      {_describe(outputs[0])}"] if outputs else []
        if command.output is not None and _rank() == 0:
            from minitrainer.storage import write_file

            write_file(outputs, command.output)
            lines.append(f"saved     {_short(command.output, start)}")
    else:
        run_stage = trainer.validate if command.name == "validate" else trainer.test
        metrics = run_stage(module, datamodule=data, ckpt_path=checkpoint)
        lines = [_metrics_line(metrics), _weights_line(checkpoint, start)]
    if _rank() == 0:
        _print(lines)


def _compare_layouts(command: Command) -> int:
    from minitrainer.launch import Environment
    from minitrainer.recipe.load import load_recipe

    recipe = load_recipe(command.recipe, command.overrides)
    if Environment.detect().launcher != "none":
        raise CommandError(
            "parity was started by a launcher.",
            "It starts its own ranks.",
            "Run it in one process: python -m minitrainer parity recipe.yaml --ranks 2.",
        )
    from minitrainer.parity import compare_layouts

    report = compare_layouts(recipe, num_ranks=command.ranks, steps=command.steps)
    _print(report.lines())
    return int(report.parted)


def _examine(asked: Examination) -> int:
    # Each only for its own question: reading a script needs no torch.
    if asked.script is not None:
        from minitrainer.doctor.script import examine_file

        findings = examine_file(asked.script)
        _print_examined([], findings)
    else:
        findings = _examine_recipe(asked) if asked.recipe is not None else _examine_machine("runs")
    if _rank() == 0:
        _print([_counts(findings)])
    return int(any(finding.severity == "error" for finding in findings))


def _examine_machine(run_dir: str) -> list[Finding]:
    from minitrainer.doctor.environment import examine, table
    from minitrainer.doctor.facts import collect

    facts = collect(Path(run_dir), os.environ)
    findings = examine(facts)
    _print_examined(table(facts), findings)
    return findings


def _examine_recipe(asked: Examination) -> list[Finding]:
    from minitrainer.recipe.load import load_recipe

    assert asked.recipe is not None
    recipe = load_recipe(asked.recipe, asked.overrides)
    # Only now, with a recipe that can be read, is torch worth its second.
    from minitrainer.recipe.check import check_recipe

    settings = check_recipe(recipe).trainer
    # Each part is printed at once: it may tell why the next one fails.
    findings = _examine_machine(str(settings.get("run_dir") or "runs"))
    from minitrainer.doctor.recipe import examine

    for answer in examine(recipe, asked.ranks):
        _print_examined(answer.rows, answer.findings)
        findings += answer.findings
    return findings


def _explain(asked: str) -> None:
    """Print the catalogue's answer.

    Raises:
        CommandError: There is no such code, or no entry for the message.
    """
    # Only for this command: all the texts of the catalogue.
    from minitrainer import pitfalls
    from minitrainer.pitfalls.document import plain_text

    if not asked:
        _print([f"{entry.code}  {entry.title}" for entry in pitfalls.ENTRIES])
        return
    text = sys.stdin.read() if asked == "-" else asked
    entry = pitfalls.find(text.strip())
    found = [entry] if entry else pitfalls.match(text)
    if not found:
        near = "; ".join(f"{entry.code} {entry.title}" for entry in pitfalls.nearest(text.strip()))
        raise CommandError(
            f"No entry has the code or the message {_clipped(text)}.",
            f"The nearest are: {near}." if near else "",
            "python -m minitrainer explain lists all.",
        )
    texts = [plain_text(entry) for entry in found]
    if len(found) > 1:
        texts.insert(0, f"{len(found)} entries: {', '.join(entry.code for entry in found)}")
    _print(["\n\n\n".join(texts)])


# What the user gets to read ----------------------------------------------------------------------


def _print_examined(rows: Sequence[tuple[str, str]], findings: Sequence[Finding]) -> None:
    if _rank() == 0:
        lines = [f"{f.place}: [{f.code}] {f.severity}: {f.what} {f.fix}" for f in findings]
        _print([*(f"{label:<16}{value}" for label, value in rows), *lines])


def _counts(findings: Sequence[Finding]) -> str:
    counts = [
        f"{number} {severity}{'s' if number > 1 else ''}"
        for severity in ("error", "warning", "note")
        if (number := sum(finding.severity == severity for finding in findings))
    ]
    return ", ".join(counts) or "nothing found"


def _run_lines(built: Built, start: Path) -> list[str]:
    from minitrainer.callbacks import ModelCheckpoint

    lines = []
    if built.trainer.run_dir is not None:
        lines.append(f"run       {_short(built.trainer.run_dir, start)}")
    for callback in built.trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            for name, path in (
                ("best", callback.best_model_path),
                ("last", callback.last_model_path),
            ):
                lines += [f"{name:<10}{_short(path, start)}"] if path else []
    return lines


def _metrics_line(metrics: Mapping[str, float]) -> str:
    shown = [
        f"{name} {value:.4g}"
        for name, value in sorted(metrics.items())
        # `loss_epoch` is `loss` by another name when both are there.
        if not (name.endswith("_epoch") and metrics.get(name.removesuffix("_epoch")) == value)
    ]
    return f"metrics   {'  '.join(shown) or 'none were logged'}"


def _weights_line(checkpoint: Path | str | None, start: Path) -> str:
    weights = _short(checkpoint, start) if checkpoint else "as built, no --ckpt was given"
    return f"weights   {weights}"


def _clipped(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


def _describe(output: Any) -> str:
    """Return the shape of one batch of predictions in words."""
    if isinstance(output, Mapping):
        return f"{{{', '.join(f'{key}: {_describe(value)}' for key, value in output.items())}}}"
    if isinstance(output, list | tuple):
        return f"({', '.join(_describe(value) for value in output)})"
    shape = getattr(output, "shape", None)
    if shape is None:
        return type(output).__name__
    return f"{type(output).__name__} {tuple(shape)} {output.dtype}".replace("torch.", "")


def _how_to_go_on(built: Built | None, start: Path) -> str:
    lines = _run_lines(built, start) if built is not None else []
    last = [line.split(maxsplit=1)[1] for line in lines if line.startswith("last ")]
    return f"; go on with --resume {last[0]}" if last else ""


def _complain_of_usage(error: UsageError, *, running: bool) -> None:
    """Say what is wrong, one line per problem, on one rank if all have the same problem."""
    rank, node_rank = _place()
    if rank != 0 and node_rank == 0 and not running:
        return  # rank 0 reads the same recipe on the same machine
    if rank != 0:
        # Where rank 0 has the same problem, it ends the job before this one has to speak.
        time.sleep(_PATIENCE)
    for line in str(error).splitlines():
        _say(f"error: {line}")


def _complain_of_failure(error: MinitrainerError) -> None:
    """Show the traceback of the rank that failed, once, and say what happened on one line."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    line = str(error)
    if isinstance(failed, RankFailedError) and "\n" in failed.why:
        print(failed.why, file=sys.stderr)
        if failed is error:
            line = f"[{error.code}] {error.what} {error.fix}".rstrip()
    _say(f"error: {' '.join(line.split())} (minitrainer explain {error.code})")


def _complain_of_users_code(error: Exception) -> None:
    """Show Python's own traceback; among several ranks, only that of the one that failed first."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        traceback.print_exception(error)
        return
    from minitrainer.launch.report import failure

    report = failure(error, _rank())
    if report.consequence:
        # The one that failed first may still be waiting to speak; then it ends the job.
        time.sleep(2 * _PATIENCE)
        _say("error: the connection to another rank broke; that one tells why")
    else:
        _complain_of_failure(report.error())


def _say(text: str) -> None:
    rank = _rank()
    print(f"{f'[rank {rank}] ' if rank else ''}minitrainer: {text}", file=sys.stderr)


def _print(lines: Sequence[str]) -> None:
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any more; the work is done all the same
        _discard_output()


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    # Python flushes once more when it ends, and would complain then.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _short(path: str | Path, start: Path) -> str:
    """Return the path as seen from the user's working directory, if it lies below."""
    path = Path(path)
    return str(path.relative_to(start)) if path.is_relative_to(start) else str(path)


def _rank() -> int:
    return _place()[0]


def _place() -> tuple[int, int]:
    """Return the global rank and the node's rank, 0 where nobody has started several."""
    rank, node = os.environ.get("RANK", ""), os.environ.get("GROUP_RANK", "0")
    if rank.isdecimal():
        return int(rank), int(node) if node.isdecimal() else 0
    if "SLURM_STEP_ID" not in os.environ:
        return 0, 0
    from minitrainer.launch import Environment

    try:
        environment = Environment.detect()
    except IncompleteEnvironmentError:
        return 0, 0
    return environment.rank, environment.node_rank


def _write_line_by_line() -> None:
    """Let a log file show each line at once, in the right order between the two streams."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
