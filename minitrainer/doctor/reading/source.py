"""The names of a script: what is imported, defined and assigned where."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | FunctionNode
Block = tuple[tuple[ast.AST, str], ...]
"""The branches and loop bodies around a node within its function, from the outside in."""

_SYNONYMS = {
    "torch.nn.parallel.distributed.": "torch.nn.parallel.",
    "torch.nn.parallel.data_parallel.": "torch.nn.parallel.",
    "torch.nn.parallel.DataParallel": "torch.nn.DataParallel",
    "torch.utils.data.distributed.": "torch.utils.data.",
    "torch.utils.data.dataloader.": "torch.utils.data.",
    "torch.distributed.distributed_c10d.": "torch.distributed.",
    "torch.nn.modules.batchnorm.": "torch.nn.",
    "torch.nn.utils.clip_grad.": "torch.nn.utils.",
    "torch.amp.autocast_mode.": "torch.amp.",
    "torch.amp.grad_scaler.": "torch.amp.",
    "torch.cuda.amp.autocast_mode.": "torch.cuda.amp.",
    "torch.cuda.amp.grad_scaler.": "torch.cuda.amp.",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """One place where a name gets a value.

    `value` is None where the value cannot be followed; `path` are the indices into it when a tuple
    is taken apart; `target` is the name itself.
    """

    value: ast.expr | None
    path: tuple[int, ...]
    target: ast.AST
    position: tuple[int, int]
    block: Block
    scope: Scope


_Bindings = dict[str, list[Binding]]


def _no_bindings() -> _Bindings:
    return defaultdict(list)


class Source:
    """The text of a script as a tree, with tables of its names.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: The text holds null bytes.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.imported = _imports(self.tree)
        self.classes = {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef)}
        self.functions: dict[Scope, dict[str, FunctionNode]] = defaultdict(dict)
        self.bindings: dict[Scope, _Bindings] = defaultdict(_no_bindings)
        self.attributes: dict[ast.ClassDef, _Bindings] = defaultdict(_no_bindings)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.blocks: dict[ast.AST, Block] = {}
        self._enter(self.tree, self.tree, ())
        for name, value in self._aliases():
            self.imported.setdefault(name, value)

    def dotted(self, node: ast.AST) -> str | None:
        """Return what an imported name stands for, `torch.distributed.barrier` for `dist.barrier`.

        None for everything that does not start from an import.
        """
        if isinstance(node, ast.Call):
            return None
        name = self._raw_dotted(node)
        if name is None:
            return None
        for long, short in _SYNONYMS.items():
            if name.startswith(long):
                name = short + name[len(long) :]
        return name

    def method(self, owner: ast.ClassDef, name: str) -> FunctionNode | None:
        """Return a method of a class of the script, or of its bases there."""
        for node in owner.body:
            if isinstance(node, FunctionNode) and node.name == name:
                return node
        for base in owner.bases:
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != owner.name:
                return self.method(self.classes[base.id], name)
        return None

    def owner(self, function: ast.AST) -> ast.ClassDef | None:
        """Return the class that a method belongs to."""
        parent = self.parents.get(function)
        return parent if isinstance(parent, ast.ClassDef) else None

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that an expression is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def reaching(self, bindings: Sequence[Binding], use: ast.AST | None) -> list[Binding]:
        """Return those bindings whose value can still be there at `use`.

        Args:
            bindings: All of one name in one function.
            use: A node of the same function; None for the end of it.
        """
        if use is not None:
            at, block = (use.lineno, use.col_offset), self.blocks[use]  # type: ignore[attr-defined]
            # What is assigned only further down comes round in a loop, if at all.
            bindings = [b for b in bindings if b.position <= at] or list(bindings)[-1:]
            bindings = [b for b in bindings if not _other_branch(b.block, block)]
        else:
            block = ()
        reaching: list[Binding] = []
        for binding in sorted(bindings, key=lambda b: b.position):
            if block[: len(binding.block)] == binding.block:
                reaching = []  # always done on the way here
            reaching.append(binding)
        return reaching

    def _raw_dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            head = self._raw_dotted(node.value)
            return None if head is None else f"{head}.{node.attr}"
        return None

    def _aliases(self) -> Iterable[tuple[str, str]]:
        """Yield `autocast = torch.cuda.amp.autocast` and the like."""
        for name, bindings in self.bindings[self.tree].items():
            if len(bindings) == 1 and isinstance(bindings[0].value, ast.Attribute):
                meaning = self._raw_dotted(bindings[0].value)
                if meaning is not None and meaning.startswith("torch."):
                    yield name, meaning

    # Filling the tables --------------------------------------------------------------------------

    def _enter(self, node: ast.AST, scope: Scope, block: Block) -> None:
        self.scopes[node], self.blocks[node] = scope, block
        if not isinstance(self.parents.get(node), ast.ClassDef):  # not a class's own names
            self._bind_targets_of(node, scope, block)
        inner_scope = scope
        if isinstance(node, FunctionNode):
            if self.owner(node) is None:
                self.functions[scope][node.name] = node
            inner_scope = node
            self._bind_parameters(node)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST):
                    continue
                self.parents[child] = node
                inside = isinstance(node, FunctionNode) and field == "body"
                child_block = () if inside else block + _branch(node, field)
                self._enter(child, inner_scope if inside else scope, child_block)

    def _bind_parameters(self, function: FunctionNode) -> None:
        arguments = function.args
        extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]:
            binding = Binding(None, (), arg, (arg.lineno, arg.col_offset), (), function)
            self.bindings[function][arg.arg].append(binding)

    def _bind_targets_of(self, node: ast.AST, scope: Scope, block: Block) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(Binding(value, (), target, _end(node), block, scope))
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._bind(Binding(value, (), target, _end(node), block, scope))
            case ast.NamedExpr(target=target, value=value):
                self._bind(Binding(value, (), target, _end(node), block, scope))
            case ast.For(target=target):
                inside = (*block, (node, "body"))
                self._bind(Binding(None, (), target, _end(target), inside, scope))
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._bind(Binding(value, (), target, _end(target), block, scope))

    def _bind(self, binding: Binding) -> None:
        target, scope = binding.target, binding.scope
        owner = self.owner(scope)
        if isinstance(target, ast.Tuple | ast.List):
            for index, element in enumerate(target.elts):
                path = (*binding.path, index)
                self._bind(replace(binding, target=element, path=path))
        elif isinstance(target, ast.Name):
            self.bindings[scope][target.id].append(binding)
        elif isinstance(target, ast.Attribute) and owner is not None and _is_self(target.value):
            self.attributes[owner][target.attr].append(binding)


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0, node.end_col_offset or 0)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _imports(tree: ast.AST) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names.setdefault(alias.asname or top, alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom):
            # The first import of a name counts: the second is the fallback of `except ImportError`.
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")
    return names


def _branch(node: ast.AST, field: str) -> Block:
    """Return what entering this field of a statement adds to the block."""
    if field not in ("body", "orelse", "handlers"):
        return ()
    if isinstance(node, ast.If) and not is_main_guard(node.test):
        return ((node, field),)
    if isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.match_case):
        return ((node, field),)
    return ((node, field),) if field == "handlers" else ()


def is_main_guard(test: ast.expr) -> bool:
    """Return whether this is the test of `if __name__ == "__main__"`."""
    return isinstance(test, ast.Compare) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test)
    )


def _other_branch(one: Block, other: Block) -> bool:
    """Return whether two blocks are different branches of one `if`."""
    fields = dict(one)
    return any(
        isinstance(node, ast.If) and fields.get(node, field) != field for node, field in other
    )
