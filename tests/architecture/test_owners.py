"""Each dangerous torch API has one owner file, so its rules are written in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# The longest prefix counts. No owner: nobody may use it.
OWNERS = {
    "torch.save": {"storage.py"},
    "torch.load": {"storage.py"},
    "torch._dynamo": {"dynamo.py"},
    "torch.distributed": {"dist.py"},
    "torch.distributed.algorithms": {"plugins/ddp.py"},
    "torch.distributed.elastic": {"launch/local.py"},
    "torch.distributed.launcher": {"launch/local.py"},
    "torch.multiprocessing": {"launch/local.py"},
    "torch.nn.parallel": {"plugins/ddp.py"},
    "torch.nn.DataParallel": set(),
    "torch.autocast": {"plugins/amp.py"},
    "torch.amp": {"plugins/amp.py"},
    "torch.cuda.amp": set(),
    "builtins.print": {"cli.py"},
}
METHODS = {
    "no_sync": {"plugins/ddp.py"},
    "register_comm_hook": {"plugins/ddp.py"},
    "unscale_": {"plugins/amp.py"},
}


def breaches(source: str, file: str) -> Iterator[str]:
    """Yield the uses of owned APIs in a file that does not own them.

    Args:
        source: The text of the file.
        file: Its path within the package.
    """
    tree = ast.parse(source)
    names = _imported_names(tree) | {"print": "builtins.print"}
    for node in ast.walk(tree):
        for used in _uses(node, names):
            owners = _owners(used)
            if owners is not None and file not in owners:
                yield f"{file}:{getattr(node, 'lineno', 0)} uses {used} (owner: {owners or 'none'})"
        if isinstance(node, ast.Attribute) and file not in METHODS.get(node.attr, {file}):
            yield f"{file}:{node.lineno} calls .{node.attr} (owner: {METHODS[node.attr]})"


def test_each_api_is_used_by_its_owner_only(repository: Path) -> None:
    package = repository / "minitrainer"
    found = [
        breach
        for path in sorted(package.rglob("*.py"))
        for breach in breaches(path.read_text(), path.relative_to(package).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.save({}, 'f')",
        "import torch as t\nt.load('f')",
        "from torch import save",
        "import torch.distributed as td\ntd.barrier()",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ntorch.distributed.all_reduce(x)",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from torch import nn\nnn.DataParallel(m)",
        "def f():\n    from torch.distributed.elastic.multiprocessing import errors",
        "with model.no_sync():\n    pass",
        "import torch\nwith torch.autocast('cpu'):\n    pass",
        "from torch.cuda.amp import GradScaler",
        "print('hello')",
    ],
)
def test_the_check_sees_a_breach(source: str) -> None:
    assert list(breaches(source, "trainer.py"))


def test_the_check_lets_owners_and_others_be() -> None:
    assert not list(breaches("import torch\ntorch.save({}, 'f')", "storage.py"))
    assert not list(breaches("from minitrainer import dist\ndist.barrier()", "trainer.py"))
    assert not list(breaches("def f(self):\n    self.precision.autocast()", "trainer.py"))


def test_files_of_tensors_are_read_without_running_code(repository: Path) -> None:
    source = (repository / "minitrainer/storage.py").read_text()
    loads = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads
    for load in loads:
        safe = [ast.unparse(word) for word in load.keywords if word.arg == "weights_only"]
        assert safe == ["weights_only=True"]


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for, dotted."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is not None:
                    names[alias.asname] = alias.name
                else:
                    top = alias.name.partition(".")[0]
                    names[top] = top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _uses(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        if node.id in names:
            yield names[node.id]
    elif isinstance(node, ast.Attribute):
        dotted = _dotted(node, names)
        if dotted is not None:
            yield dotted


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value, names)
        return None if head is None else f"{head}.{node.attr}"
    return None


def _owners(used: str) -> set[str] | None:
    parts = used.split(".")
    for length in range(len(parts), 0, -1):
        owners = OWNERS.get(".".join(parts[:length]))
        if owners is not None:
            return owners
    return None
