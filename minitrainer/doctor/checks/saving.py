"""Checkpoints: who writes them, what is in them, and where they are loaded to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from minitrainer.doctor import codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.ranks import may_be_one_rank
from minitrainer.doctor.reading.running import Visit
from minitrainer.doctor.reading.script import Script
from minitrainer.doctor.reading.values import DDP, argument

_SAVE, _LOAD = "torch.save", "torch.load"


def saving_on_every_rank(script: Script) -> Iterator[Finding]:
    """All ranks write the same file at once."""
    if not script.is_distributed:
        return
    for visit, call in script.calls_of(_SAVE):
        if not visit.reached or may_be_one_rank(script, visit):
            continue
        file = argument(call, 1, "f")
        if file is None or _differs_by_rank(script, file, visit):
            continue
        yield script.finding(
            codes.SAVING_ON_EVERY_RANK,
            "error",
            call,
            f"Every rank writes {ast.unparse(file)}: they overwrite one another while writing.",
            "Save under `if rank == 0:`.",
        )


def module_prefix(script: Script) -> Iterator[Finding]:
    """The state dict of the wrapper has `module.` before every key."""
    if any("module." in word for word in script.words if len(word) < 20):
        return  # the script knows of the prefix
    dicts = script.methods("state_dict")
    unwrapped = [
        visit
        for visit, _, receiver in dicts
        if isinstance(receiver, ast.Attribute) and receiver.attr == "module"
    ]
    for visit, call, receiver in dicts:
        if not script.made_by(receiver, visit.frame, DDP) or not _is_saved(script, call):
            continue
        if any(visit.excludes(other) for other in unwrapped):
            continue
        name = ast.unparse(receiver)
        yield script.finding(
            codes.MODULE_PREFIX,
            "warning",
            call,
            f"{name} is a DDP wrapper: each key of what is saved begins with `module.` and does "
            "not load into the model itself.",
            f"Save {name}.module.state_dict().",
        )


def load_without_map_location(script: Script) -> Iterator[Finding]:
    """What was saved on GPU 0 is loaded to GPU 0, by every rank."""
    if not script.is_distributed or not script.words & {"cuda", "nccl"}:
        return
    loads = script.calls_of(_LOAD)
    placed = [visit for visit, call in loads if argument(call, 1, "map_location") is not None]
    for visit, call in loads:
        if any(visit is other or visit.excludes(other) for other in placed):
            continue
        if _loads_state(script, call):
            yield script.finding(
                codes.NO_MAP_LOCATION,
                "warning",
                call,
                "torch.load without map_location puts tensors where they were saved: every rank "
                "loads to GPU 0.",
                'Give map_location="cpu" and let load_state_dict copy.',
            )


def _differs_by_rank(script: Script, file: ast.expr, visit: Visit) -> bool:
    """Return whether the file's name has the rank in it, or it is no file at all."""
    texts = [ast.unparse(file)]
    for part in ast.walk(file):
        if isinstance(part, ast.Name):
            origins = script.values.origins(part, visit.frame)
            texts += [ast.unparse(origin.node) for origin in origins]
    return any("rank" in text.lower() or "BytesIO" in text for text in texts)


def _is_saved(script: Script, call: ast.Call) -> bool:
    """Return whether a value goes into torch.save, at once or by a name of the same function."""
    names = _names_given_to(script, call)
    for _, save in script.calls_of(_SAVE):
        for argument_ in (*save.args, *(keyword.value for keyword in save.keywords)):
            for node in ast.walk(argument_):
                same = script.source.scopes[node] is script.source.scopes[call]
                if node is call or (isinstance(node, ast.Name) and node.id in names and same):
                    return True
    return False


def _loads_state(script: Script, call: ast.Call) -> bool:
    """Return whether what is loaded goes into load_state_dict."""
    names = _names_given_to(script, call)
    for node in ast.walk(script.source.scopes[call]):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "load_state_dict":
            parts = [part for argument_ in node.args for part in ast.walk(argument_)]
            if any(p is call or (isinstance(p, ast.Name) and p.id in names) for p in parts):
                return True
    return False


def _names_given_to(script: Script, call: ast.Call) -> set[str]:
    """Return the names that the statement around a call assigns to."""
    statement = script.source.statement(call)
    if not isinstance(statement, ast.Assign):
        return set()
    targets = [target for t in statement.targets for target in ast.walk(t)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
