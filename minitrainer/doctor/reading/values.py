"""Where a value comes from: followed through assignments, calls, returns and attributes."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from minitrainer.doctor.reading.source import Binding, FunctionNode, Scope, Source

DDP = "torch.nn.parallel.DistributedDataParallel"
_MAX_DEPTH = 24

# What these give back is the object they are called on, or the first argument.
_SAME_OBJECT = {"to", "cuda", "cpu", "train", "eval", "float", "half", "double", "bfloat16"}
_SAME_ARGUMENT = {"torch.compile", "torch.nn.SyncBatchNorm.convert_sync_batchnorm"}
_SPAWN = {"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"}
_PROCESS = {"torch.multiprocessing.Process", "multiprocessing.Process"}


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of a class of the script; `call` made it, in `frame`."""

    owner: ast.ClassDef
    call: ast.Call | None
    frame: Frame


@dataclass(frozen=True, eq=False)
class Frame:
    """A function in the course of one call, or the script itself."""

    function: Scope
    caller: Frame | None = None
    arguments: Mapping[str, ast.expr] = field(default_factory=dict)
    instance: Instance | None = None

    @property
    def chain(self) -> Iterator[Frame]:
        """This frame, its caller, and so on."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.caller


@dataclass(frozen=True, slots=True)
class Origin:
    """The expression that made a value, and the frame it stands in."""

    node: ast.AST
    frame: Frame


class Values:
    """Follows the names of a script."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.module = Frame(source.tree)

    def origins(self, expression: ast.AST, frame: Frame, depth: int = 0) -> list[Origin]:
        """Return the expressions that the value can have been made by.

        What cannot be followed is its own origin: an imported name, a parameter, a loop variable.
        """
        found: list[Origin] = []
        match expression:
            case _ if depth > _MAX_DEPTH:
                pass
            case ast.Name():
                found = self._of_name(expression, frame, depth)
            case ast.Attribute():
                found = self._of_attribute(expression, frame, depth)
            case ast.Call():
                found = self._of_call(expression, frame, depth)
            case ast.IfExp(body=body, orelse=orelse):
                branches = _unwrapped([body, orelse])
                found = [o for b in branches for o in self.origins(b, frame, depth + 1)]
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                found = self.origins(value, frame, depth + 1)
        return found or [Origin(expression, frame)]

    def made_by(self, expression: ast.AST, frame: Frame, names: Collection[str]) -> list[Origin]:
        """Return the origins that are calls of one of these imported names."""
        return [
            origin
            for origin in self.origins(expression, frame)
            if isinstance(origin.node, ast.Call) and self.source.dotted(origin.node.func) in names
        ]

    def callee(self, call: ast.Call, frame: Frame) -> Frame | None:
        """Return the frame of the script's own function that this call runs, if it runs one."""
        name = self.source.dotted(call.func)
        if name in _SPAWN or name in _PROCESS:
            return self._spawned(call, frame, skip=name in _SPAWN)
        if isinstance(call.func, ast.Name):
            function = self._function(call.func.id, frame)
            if function is not None:
                return _frame_of_call(call, function, frame)
            owner = self.source.classes.get(call.func.id)
            init = None if owner is None else self.source.method(owner, "__init__")
            if owner is None or init is None:
                return None
            return _frame_of_call(call, init, frame, Instance(owner, call, frame))
        if isinstance(call.func, ast.Attribute):
            instance = self.instance(call.func.value, frame)
            method = instance and self.source.method(instance.owner, call.func.attr)
            return _frame_of_call(call, method, frame, instance) if method else None
        return None

    def handed_over(self, call: ast.Call, frame: Frame) -> list[Frame]:
        """Return frames of the script's functions that a call gets as arguments."""
        functions = [self._function(a.id, frame) for a in call.args if isinstance(a, ast.Name)]
        return [Frame(function, frame) for function in functions if function is not None]

    def instance(self, expression: ast.AST, frame: Frame, depth: int = 0) -> Instance | None:
        """Return the object of one of the script's classes that this expression is."""
        if isinstance(expression, ast.Name) and expression.id == "self":
            return frame.instance
        for origin in self.origins(expression, frame, depth):
            if isinstance(origin.node, ast.Call) and isinstance(origin.node.func, ast.Name):
                owner = self.source.classes.get(origin.node.func.id)
                if owner is not None:
                    return Instance(owner, origin.node, origin.frame)
        return None

    def bindings(self, name: str, frame: Frame) -> Sequence[Binding]:
        """Return all assignments to a name in the function of the frame."""
        return self.source.bindings[frame.function].get(name, ())

    # The kinds of expression ---------------------------------------------------------------------

    def _of_name(self, name: ast.Name, frame: Frame, depth: int) -> list[Origin]:
        home = self._home(name.id, frame)
        if home is None:
            return [Origin(name, frame)]
        use = name if self.source.scopes.get(name) is home.function else None
        bindings = self.source.reaching(self.bindings(name.id, home), use)
        return [o for b in _unwrapped_bindings(bindings) for o in self._of_binding(b, home, depth)]

    def _of_binding(self, binding: Binding, frame: Frame, depth: int) -> list[Origin]:
        if isinstance(binding.target, ast.arg):
            return self._of_parameter(binding.target, frame, depth)
        if binding.value is None:
            return [Origin(binding.target, frame)]
        if not binding.path:
            return self.origins(binding.value, frame, depth + 1)
        found: list[Origin] = []
        for whole in self.origins(binding.value, frame, depth + 1):
            element = _element(whole.node, binding.path)
            if element is None:
                return [Origin(binding.target, frame)]
            found += self.origins(element, whole.frame, depth + 1)
        return found

    def _of_parameter(self, parameter: ast.arg, frame: Frame, depth: int) -> list[Origin]:
        given = frame.arguments.get(parameter.arg)
        if frame.caller is None:
            return [Origin(parameter, frame)]
        if given is not None:
            return self.origins(given, frame.caller, depth + 1)
        default = _default(frame.function, parameter.arg)
        if default is None:
            return [Origin(parameter, frame)]
        return self.origins(default, self.module, depth + 1)

    def _of_attribute(self, node: ast.Attribute, frame: Frame, depth: int) -> list[Origin]:
        if node.attr == "module":
            wrapped = self.wrapped(node.value, frame, depth + 1)
            if wrapped:
                return wrapped
        if self.source.dotted(node) is not None:
            return [Origin(node, frame)]
        instance = self.instance(node.value, frame, depth + 1)
        if instance is None:
            return [Origin(node, frame)]
        found: list[Origin] = []
        bindings = self.source.attributes[instance.owner].get(node.attr, [])
        for method in dict.fromkeys(binding.scope for binding in bindings):
            here = [b for b in bindings if b.scope is method]
            use = node if self.source.scopes.get(node) is method else None
            if use is not None and not [b for b in here if b.position <= _start(node)]:
                continue
            inner = self._method_frame(instance, method)
            for binding in _unwrapped_bindings(self.source.reaching(here, use)):
                found += self._of_binding(binding, inner, depth)
            if use is not None:
                break
        return found or [Origin(node, frame)]

    def wrapped(self, expression: ast.AST, frame: Frame, depth: int = 0) -> list[Origin]:
        """Return what is inside, when this expression is a DDP wrapper."""
        return [
            inner
            for origin in self.origins(expression, frame, depth)
            if isinstance(origin.node, ast.Call)
            and self.source.dotted(origin.node.func) == DDP
            and (model := argument(origin.node, 0, "module")) is not None
            for inner in self.origins(model, origin.frame, depth + 1)
        ]

    def _of_call(self, call: ast.Call, frame: Frame, depth: int) -> list[Origin]:
        """Return where the result of a call comes from; nothing if it is the call itself."""
        name, function = self.source.dotted(call.func), call.func
        if name in _SAME_ARGUMENT and call.args:
            return self.origins(call.args[0], frame, depth + 1)
        if name is None and isinstance(function, ast.Attribute) and function.attr in _SAME_OBJECT:
            return self.origins(function.value, frame, depth + 1)
        makes = isinstance(function, ast.Name) and function.id in self.source.classes
        deep = isinstance(function, ast.Attribute) and depth > _MAX_DEPTH // 2
        inner = None if name is not None or makes or deep else self.callee(call, frame)
        if inner is None or any(inner.function is f.function for f in frame.chain):
            return []
        returned = [
            node.value
            for node in ast.walk(inner.function)
            if isinstance(node, ast.Return)
            and node.value is not None
            and self.source.scopes[node] is inner.function
        ]
        return [o for e in _unwrapped(returned) for o in self.origins(e, inner, depth + 1)]

    # Functions and frames ------------------------------------------------------------------------

    def _home(self, name: str, frame: Frame) -> Frame | None:
        """Return the frame whose function binds the name."""
        if self.source.bindings[frame.function].get(name):
            return frame
        outer = self._outer(frame)
        return None if outer is None else self._home(name, outer)

    def _outer(self, frame: Frame) -> Frame | None:
        """Return the frame of the function that this one is defined in."""
        if frame.function is self.source.tree:
            return None
        scope = self.source.scopes[frame.function]
        found = (outer for outer in frame.chain if outer.function is scope)
        return next(found, self.module)

    def _function(self, name: str, frame: Frame) -> FunctionNode | None:
        here: Frame | None = frame
        while here is not None:
            if name in self.source.functions[here.function]:
                return self.source.functions[here.function][name]
            here = self._outer(here)
        return None

    def _spawned(self, call: ast.Call, frame: Frame, *, skip: bool) -> Frame | None:
        """Return the frame of a function started in a process of its own."""
        target = argument(call, 0, "fn") if skip else argument(call, 1, "target")
        function = self._function(target.id, frame) if isinstance(target, ast.Name) else None
        if function is None:
            return None
        given = argument(call, 1, "args") if skip else argument(call, 3, "args")
        elements = given.elts if isinstance(given, ast.Tuple | ast.List) else []
        names = [arg.arg for arg in function.args.args][1 if skip else 0 :]
        return Frame(function, frame, dict(zip(names, elements, strict=False)))

    def _method_frame(self, instance: Instance, method: Scope) -> Frame:
        if isinstance(method, FunctionNode) and method.name == "__init__" and instance.call:
            return _frame_of_call(instance.call, method, instance.frame, instance)
        return Frame(method, None, {}, instance)


def argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    """Return the argument of a call by keyword or by place."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    before = call.args[: index + 1]
    if len(before) <= index or any(isinstance(arg, ast.Starred) for arg in before):
        return None
    return before[index]


def _frame_of_call(
    call: ast.Call, function: FunctionNode, caller: Frame, instance: Instance | None = None
) -> Frame:
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if instance is not None:
        names = names[1:]
    given: dict[str, ast.expr] = {}
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        given[name] = value
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return Frame(function, caller, given, instance)


def _default(function: Scope, name: str) -> ast.expr | None:
    if not isinstance(function, FunctionNode):
        return None
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = arguments.defaults
    with_default = positional[len(positional) - len(defaults) :]
    pairs = [*zip(with_default, defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d]
    return next((value for arg, value in pairs if arg.arg == name), None)


def _element(node: ast.AST, path: Sequence[int]) -> ast.expr | None:
    for index in path:
        if not isinstance(node, ast.Tuple | ast.List) or index >= len(node.elts):
            return None
        node = node.elts[index]
    return node if isinstance(node, ast.expr) and not isinstance(node, ast.Starred) else None


def _takes_off(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "module"


def _unwrapped(branches: Sequence[ast.expr]) -> Sequence[ast.expr]:
    """Return `model.module` alone of `model.module if wrapped else model`."""
    return [branch for branch in branches if _takes_off(branch)] or branches


def _unwrapped_bindings(bindings: Sequence[Binding]) -> Sequence[Binding]:
    return [b for b in bindings if _takes_off(b.value)] or bindings


def _start(node: ast.expr) -> tuple[int, int]:
    return (node.lineno, node.col_offset)
