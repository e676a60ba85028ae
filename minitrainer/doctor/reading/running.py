"""The order in which a script would run: every call and assignment, local functions opened up."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from minitrainer.doctor.reading.source import FunctionNode, Source, is_main_guard
from minitrainer.doctor.reading.values import Frame, Instance, Values

_MAX_VISITS = 20_000
_MAX_FRAMES = 12
Loop = ast.For | ast.AsyncFor | ast.While
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.IsNot: ast.Is,
    ast.NotEq: ast.Eq,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A condition that holds, or does not, where the visit is."""

    test: ast.expr
    holds: bool
    frame: Frame

    @property
    def key(self) -> tuple[str, bool]:
        """The condition as text without its `not`, and whether that text holds."""
        test, holds = self.test, self.holds
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, holds = test.operand, not holds
        if isinstance(test, ast.Compare) and type(test.ops[0]) in _OPPOSITE:
            opposite = _OPPOSITE[type(test.ops[0])]()
            test, holds = ast.Compare(test.left, [opposite], test.comparators), not holds
        return ast.unparse(test), holds


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node stands in, through all functions on the way to it.

    `loops` and `arms` go from the outside in; `contexts` are the expressions of the `with`
    statements and the decorators of the functions.
    """

    loops: tuple[Loop, ...] = ()
    arms: tuple[Arm, ...] = ()
    contexts: tuple[ast.expr, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """A node at the moment when the script comes past it.

    `reached` is false in functions that nothing in the script is seen to call.
    """

    node: ast.AST
    frame: Frame
    around: Surroundings
    reached: bool

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around it, the innermost last."""
        return self.around.loops

    @property
    def loop(self) -> Loop | None:
        """The innermost loop around it."""
        return self.loops[-1] if self.loops else None

    def excludes(self, other: Visit) -> bool:
        """Return whether only one of the two can happen, by the conditions around them."""
        mine = dict(arm.key for arm in self.around.arms)
        theirs = dict(arm.key for arm in other.around.arms)
        return any(mine.get(test, holds) != holds for test, holds in theirs.items())


def visits_of(source: Source, values: Values) -> list[Visit]:
    """Return all calls, assignments, loops and assertions of a script in running order.

    First what the script itself does, then the functions that it is not seen to call.
    """
    runner = _Runner(source, values)
    runner.block(source.tree.body, values.module, Surroundings())
    runner.reached = False
    functions = [node for node in ast.walk(source.tree) if isinstance(node, FunctionNode)]
    mentioned = _mentioned(source.tree)
    # Those that others call are best seen from there.
    for function in sorted(functions, key=lambda function: function.name in mentioned):
        if function not in runner.entered:
            owner = source.owner(function)
            instance = None if owner is None else Instance(owner, None, values.module)
            runner.enter(Frame(function, None, {}, instance), Surroundings())
    return runner.visits


class _Runner:
    def __init__(self, source: Source, values: Values) -> None:
        self.source = source
        self.values = values
        self.visits: list[Visit] = []
        self.entered: set[ast.AST] = set()
        self.reached = True

    def enter(self, frame: Frame, around: Surroundings) -> None:
        """Go through the body of a function."""
        function = frame.function
        self.entered.add(function)
        if isinstance(function, FunctionNode):
            contexts = (*around.contexts, *function.decorator_list)
            self.block(function.body, frame, replace(around, contexts=contexts))

    def block(self, body: Sequence[ast.stmt], frame: Frame, around: Surroundings) -> None:
        """Go through statements; after `if x: return` the others run only without x."""
        for statement in body:
            self._statement(statement, frame, around)
            if isinstance(statement, ast.If):
                for branch, holds in ((statement.body, False), (statement.orelse, True)):
                    if _leaves(branch):
                        arm = Arm(statement.test, holds, frame)
                        around = replace(around, arms=(*around.arms, arm))

    def _statement(self, node: ast.stmt, frame: Frame, around: Surroundings) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.If():
                self._if(node, frame, around)
            case ast.For() | ast.AsyncFor() | ast.While():
                head = node.test if isinstance(node, ast.While) else node.iter
                self._expressions([head], frame, around)
                self._add(node, frame, around)
                inside = replace(around, loops=(*around.loops, node))
                self.block(node.body, frame, inside)
                self.block(node.orelse, frame, around)
            case ast.With() | ast.AsyncWith():
                entered = tuple(item.context_expr for item in node.items)
                self._expressions(entered, frame, around)
                inside = replace(around, contexts=(*around.contexts, *entered))
                self.block(node.body, frame, inside)
            case ast.Try():
                self.block(node.body, frame, around)
                for handler in node.handlers:
                    self.block(handler.body, frame, around)
                self.block(node.orelse, frame, around)
                self.block(node.finalbody, frame, around)
            case ast.Match():
                self._expressions([node.subject], frame, around)
                for case in node.cases:
                    self.block(case.body, frame, around)
            case _:
                self._expressions(ast.iter_child_nodes(node), frame, around)
                self._add(node, frame, around)

    def _if(self, node: ast.If, frame: Frame, around: Surroundings) -> None:
        self._expressions([node.test], frame, around)
        if is_main_guard(node.test):
            self.block(node.body, frame, around)
            return
        for body, holds in ((node.body, True), (node.orelse, False)):
            arm = Arm(node.test, holds, frame)
            self.block(body, frame, replace(around, arms=(*around.arms, arm)))

    def _expressions(self, nodes: Iterable[ast.AST], frame: Frame, around: Surroundings) -> None:
        """Go through expressions, the inner ones first, as they are evaluated."""
        for node in nodes:
            if isinstance(node, ast.IfExp):
                self._expressions([node.test], frame, around)
                for branch, holds in ((node.body, True), (node.orelse, False)):
                    arm = Arm(node.test, holds, frame)
                    inside = replace(around, arms=(*around.arms, arm))
                    self._expressions([branch], frame, inside)
            elif isinstance(node, ast.BoolOp):
                self._expressions(node.values[:1], frame, around)
                arm = Arm(node.values[0], isinstance(node.op, ast.And), frame)
                inside = replace(around, arms=(*around.arms, arm))
                self._expressions(node.values[1:], frame, inside)
            elif not isinstance(node, ast.Lambda):
                self._expressions(ast.iter_child_nodes(node), frame, around)
                if isinstance(node, ast.Call):
                    self._call(node, frame, around)

    def _call(self, node: ast.Call, frame: Frame, around: Surroundings) -> None:
        self._add(node, frame, around)
        if len(self.visits) > _MAX_VISITS:
            return
        inner = self.values.callee(node, frame)
        # `run(main)`: a function that is handed to a call is taken to be called there.
        frames = self.values.handed_over(node, frame) if inner is None else [inner]
        running = [f.function for f in frame.chain]
        for inner in frames:
            if inner.function not in running and len(running) < _MAX_FRAMES:
                self.enter(inner, around)

    def _add(self, node: ast.AST, frame: Frame, around: Surroundings) -> None:
        self.visits.append(Visit(node, frame, around, self.reached))


def _mentioned(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Return whether what follows is not run after this branch."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    leaving = ("sys.exit", "exit", "os._exit", "quit")
    return isinstance(call, ast.Call) and ast.unparse(call.func) in leaving
