"""A script as the checks see it: what it calls, in running order, and where that comes from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from minitrainer.doctor.finding import Finding, Severity
from minitrainer.doctor.reading.running import Loop, Visit, visits_of
from minitrainer.doctor.reading.source import Source
from minitrainer.doctor.reading.values import DDP, Frame, Origin, Values, argument

DATA_LOADER = "torch.utils.data.DataLoader"
DISTRIBUTED_SAMPLER = "torch.utils.data.DistributedSampler"
INIT = "torch.distributed.init_process_group"
_NO_GRAD = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}


class Script:
    """One script, read.

    Args:
        name: What findings call it.
        text: What it says.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: The text holds null bytes.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.source = Source(text)
        self.values = Values(self.source)
        self.visits = visits_of(self.source, self.values)

    def finding(self, code: str, severity: Severity, node: ast.AST, what: str, fix: str) -> Finding:
        """Return a finding at the line of a node."""
        line = getattr(node, "lineno", 0)
        return Finding(code, severity, f"{self.name}:{line}", what, fix)

    # What it calls -------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[tuple[Visit, ast.Call]]:
        """All calls in running order."""
        return [(visit, visit.node) for visit in self.visits if isinstance(visit.node, ast.Call)]

    @cached_property
    def loops(self) -> list[tuple[Visit, Loop]]:
        """All loops in running order."""
        return [(visit, visit.node) for visit in self.visits if isinstance(visit.node, Loop)]

    @cached_property
    def _index(self) -> dict[Visit, int]:
        return {visit: index for index, visit in enumerate(self.visits)}

    def before(self, one: Visit, other: Visit) -> bool:
        """Return whether the script comes past `one` first."""
        return self._index[one] < self._index[other]

    def calls_of(self, *names: str) -> list[tuple[Visit, ast.Call]]:
        """Return the calls of imported names, given in full."""
        return [(visit, call) for visit, call in self.calls if self.called(call) in names]

    def methods(self, *names: str) -> list[tuple[Visit, ast.Call, ast.expr]]:
        """Return the calls `receiver.name(...)`, with their receivers."""
        return [
            (visit, call, call.func.value)
            for visit, call in self.calls
            if isinstance(call.func, ast.Attribute) and call.func.attr in names
        ]

    def called(self, call: ast.AST) -> str:
        """Return the full name of what is called; empty if it is not an imported name."""
        return (isinstance(call, ast.Call) and self.source.dotted(call.func)) or ""

    def made_by(self, expression: ast.AST, frame: Frame, *names: str) -> list[Origin]:
        """Return where the value was made by a call of one of these imported names."""
        return self.values.made_by(expression, frame, names)

    @cached_property
    def words(self) -> set[str]:
        """Every name, attribute and string of the script."""
        words: set[str] = set()
        for node in ast.walk(self.source.tree):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                    words.add(word)
                case ast.keyword(arg=str(word)):
                    words.add(word)
        return words

    # What kind of script it is -------------------------------------------------------------------

    @cached_property
    def is_distributed(self) -> bool:
        """Whether it starts a process group or wraps a model."""
        return bool(self.calls_of(INIT, DDP))

    @cached_property
    def backwards(self) -> list[tuple[Visit, ast.expr]]:
        """The calls of `backward`, with the loss they are called on, before any scaling."""
        return [(visit, _unscaled(loss)) for visit, _, loss in self.methods("backward")]

    @cached_property
    def training_loops(self) -> set[Loop]:
        """The loops that have a backward of their own."""
        return {visit.loop for visit, _ in self.backwards if visit.loop is not None}

    def without_gradients(self, visit: Visit) -> bool:
        """Return whether autograd is off there."""
        for context in visit.around.contexts:
            function = context.func if isinstance(context, ast.Call) else context
            if self.source.dotted(function) in _NO_GRAD:
                return True
            if self.called(context) == "torch.set_grad_enabled":
                return True
        return False

    def loaders(self, expression: ast.AST, frame: Frame) -> Iterator[tuple[ast.Call, Frame]]:
        """Yield the DataLoaders that an iterable goes through: `enumerate(tqdm(loader))`."""
        for origin in self.values.origins(expression, frame):
            if not isinstance(origin.node, ast.Call):
                continue
            if self.called(origin.node) == DATA_LOADER:
                yield origin.node, origin.frame
                continue
            for inner in origin.node.args:
                yield from self.loaders(inner, origin.frame)

    def distributed_samplers(self, loader: ast.Call, frame: Frame) -> list[ast.Call]:
        """Return the DistributedSamplers that a DataLoader may have been given."""
        sampler = argument(loader, 3, "sampler")
        if sampler is None:
            return []
        made = self.made_by(sampler, frame, DISTRIBUTED_SAMPLER)
        return [origin.node for origin in made if isinstance(origin.node, ast.Call)]


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Return whether an expression is this very constant."""
    return isinstance(node, ast.Constant) and node.value is value


def _unscaled(loss: ast.expr) -> ast.expr:
    """Return the loss of `scaler.scale(loss)`."""
    match loss:
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled, *_]):
            return scaled
    return loss
