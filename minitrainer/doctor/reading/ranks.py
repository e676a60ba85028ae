"""Which ranks come past a place in a script, as far as its conditions tell."""

from __future__ import annotations

import ast
import re
from typing import Literal

from minitrainer.doctor.reading.running import Visit
from minitrainer.doctor.reading.script import Script
from minitrainer.doctor.reading.source import FunctionNode
from minitrainer.doctor.reading.values import Frame

Ranks = Literal["rank 0", "the other ranks"]

_RANK_NAME = re.compile(r"(global|local|world|dist|ddp|ddp_local|my|process|proc)?_?rank", re.I)
_FIRST_RANK = re.compile(
    r"(is|am|am_i)_(the_)?(main|master|primary|chief|rank_?0|rank_?zero)(_\w+)?"
    r"|(main|master|primary|chief)_(process|proc|rank)|rank_?(0|zero)",
    re.I,
)
_NOT_DISTRIBUTED = re.compile(r"is_initialized|is_available|distributed|ddp|world_size", re.I)
_MAY_BE_ABOUT_RANKS = re.compile(
    r"rank|main|master|primary|chief|leader|zero|node|proc|worker|gpu|device|coord|writ", re.I
)
_OTHER: dict[Ranks, Ranks] = {"rank 0": "the other ranks", "the other ranks": "rank 0"}


def only_ranks(script: Script, visit: Visit) -> Ranks | None:
    """Return which ranks alone can come past; None for all, or when it cannot be told."""
    found = {_ranks_if(script, arm.test, arm.holds, arm.frame) for arm in visit.around.arms}
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def may_be_one_rank(script: Script, visit: Visit) -> bool:
    """Return whether any condition on the way, or a decorator, may pick one rank."""
    if only_ranks(script, visit) is not None:
        return True
    conditions = [arm.test for arm in visit.around.arms]
    decorators = [
        decorator
        for frame in visit.frame.chain
        if isinstance(frame.function, FunctionNode)
        for decorator in frame.function.decorator_list
    ]
    return any(_MAY_BE_ABOUT_RANKS.search(ast.unparse(n)) for n in [*conditions, *decorators])


def _ranks_if(script: Script, test: ast.expr, holds: bool, frame: Frame) -> Ranks | None:
    """Return the ranks for which `test` comes out as `holds`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            if _is_rank(script, operand, frame):
                return "rank 0" if holds else "the other ranks"
            return _ranks_if(script, operand, not holds, frame)
        case ast.BoolOp(op=op, values=values):
            found = [
                _ranks_if(script, value, holds, frame)
                for value in values
                if not _NOT_DISTRIBUTED.search(ast.unparse(value))
                or _ranks_if(script, value, holds, frame)
            ]
            # Of "a and b" both hold; when it does not hold, either of them may fail.
            sure = isinstance(op, ast.And) is holds
            kinds = set(found) - {None} if sure else set(found)
            return kinds.pop() if len(kinds) == 1 else None
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if not _is_rank(script, left, frame):
                left, right = right, left
            ranks = _ranks_compared(op, right) if _is_rank(script, left, frame) else None
            return ranks if ranks is None or holds else _OTHER[ranks]
    if _is_rank(script, test, frame):
        return "the other ranks" if holds else "rank 0"
    return _ranks_of_value(script, test, holds, frame)


def _ranks_compared(op: ast.cmpop, right: ast.expr) -> Ranks | None:
    """Return the ranks of `rank == 0` and its kind; `right` is what the rank is compared with."""
    among = {ast.unparse(element) for element in getattr(right, "elts", [])}
    # -1 stands for "not distributed" in many scripts.
    if isinstance(op, ast.In | ast.NotIn) and "0" in among and among <= {"0", "-1"}:
        return "rank 0" if isinstance(op, ast.In) else "the other ranks"
    if isinstance(right, ast.Constant) and right.value in (0, "0"):
        if isinstance(op, ast.Eq | ast.Is):
            return "rank 0"
        if isinstance(op, ast.NotEq | ast.IsNot | ast.Gt):
            return "the other ranks"
    return None


def _ranks_of_value(script: Script, test: ast.expr, holds: bool, frame: Frame) -> Ranks | None:
    """Follow `is_main` or `is_main()` to the comparison it was made from."""
    origins = [
        origin
        for origin in script.values.origins(test, frame)
        if not isinstance(origin.node, ast.Constant)
    ]
    found: set[Ranks | None] = set()
    for origin in origins:
        node = origin.node
        if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            found.add(_ranks_if(script, node, holds, origin.frame))
        else:
            named = isinstance(test, ast.Call | ast.Name | ast.Attribute) and _FIRST_RANK.fullmatch(
                _last_name(test)
            )
            first: Ranks = "rank 0" if holds else "the other ranks"
            found.add(first if named else None)
    return found.pop() if len(found) == 1 else None


def _is_rank(script: Script, node: ast.expr, frame: Frame) -> bool:
    """Return whether an expression is the number of this rank."""
    if isinstance(node, ast.Name | ast.Attribute) and _RANK_NAME.fullmatch(_last_name(node)):
        return True
    return any(_reads_rank(script, origin.node) for origin in script.values.origins(node, frame))


def _reads_rank(script: Script, node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "int":
        return bool(node.args) and _reads_rank(script, node.args[0])
    if script.called(node) == "torch.distributed.get_rank":
        return True
    words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    reads = isinstance(node, ast.Subscript | ast.Call) and (
        script.called(node) in ("os.environ.get", "os.getenv")
        or (isinstance(node, ast.Subscript) and script.source.dotted(node.value) == "os.environ")
    )
    return reads and bool(words & {"RANK", "LOCAL_RANK"})


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
