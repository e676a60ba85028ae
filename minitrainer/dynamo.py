"""torch._dynamo is imported when something is compiled, and not before.

The compiler's front end costs more than a second to import. DDP's constructor and every first call
of an optimizer's `step`, `zero_grad`, `add_param_group` and `state_dict` import it (torch 2.14),
to keep out of what is being compiled, though nothing is. Inside `deferred()` a module of our own
answers these few questions the way the real one does in a process that compiles nothing. Whatever
else is asked of it, `torch.compile` first of all, brings in the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import torch

_NAME = "torch._dynamo"


@contextmanager
def deferred() -> Iterator[None]:
    """Put off the import of torch._dynamo while inside; without effect once it is imported."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = _StandIn()
    stand_in.enter()
    try:
        yield
    finally:
        stand_in.leave()


class _StandIn(ModuleType):
    """Answers for torch._dynamo; gives way to it at the first question it cannot answer."""

    def __init__(self) -> None:
        super().__init__(_NAME, "Stands in for torch._dynamo until something is compiled.")
        self._asked: list[Any] = []
        self._finder = _SubmoduleFinder(self)
        self.graph_break = _nothing
        self.utils = _Part(self, "utils", get_optimize_ddp_mode=_default_ddp_mode)
        self.trace_rules = _Part(self, "trace_rules", clear_lru_cache=_nothing)

    def enter(self) -> None:
        sys.modules[_NAME] = self
        setattr(torch, "_dynamo", self)  # noqa: B010 - a name that torch makes when it is asked for
        sys.meta_path.insert(0, self._finder)

    def leave(self) -> None:
        """Take everything back, unless the real module has taken the place already."""
        if sys.modules.get(_NAME) is not self:
            return
        sys.meta_path.remove(self._finder)
        del sys.modules[_NAME]
        delattr(torch, "_dynamo")
        for function in self._asked:
            vars(function).pop("__dynamo_disable", None)
        self._asked.clear()

    def real(self) -> ModuleType:
        """Give way to the real module."""
        self.leave()
        return import_module(_NAME)

    def disable(
        self, function: Callable[..., Any], recursive: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """Return the function itself where torch asks at its first call, and keeps the answer.

        That is what it asks with `wrapping=False` for, and keeps in an attribute of the function,
        from where `leave` takes it. Others decorate, for good: that is for the real one.
        """
        if options != {"wrapping": False} or sys.modules.get(_NAME) is not self:
            return cast("Callable[..., Any]", self.real().disable(function, recursive, **options))
        self._asked.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)


class _Part(ModuleType):
    """A submodule of which one function is known; for any other it is the real one."""

    def __init__(self, whole: _StandIn, name: str, **functions: Callable[[], object]) -> None:
        super().__init__(f"{_NAME}.{name}")
        vars(self).update(functions)
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._whole.real(), self._name), name)


class _SubmoduleFinder(MetaPathFinder):
    """Brings in the real package before one of its submodules is imported by name."""

    def __init__(self, whole: _StandIn) -> None:
        self._whole = whole

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}."):
            return None
        self._whole.real()
        # The package has most often imported it on its way, and once is enough.
        return ModuleSpec(fullname, _Imported()) if fullname in sys.modules else None


class _Imported(Loader):
    """Loads what is loaded."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def _nothing() -> None:
    pass


def _default_ddp_mode() -> str:
    """Return what the real one returns with `optimize_ddp` as it is until somebody changes it."""
    return "ddp_optimizer"
