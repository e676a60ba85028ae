"""Look up a `_target_`: import it, and refuse what a recipe has no business to call."""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from minitrainer.recipe.annotations import missing_methods
from minitrainer.recipe.nearest import did_you_mean

_ALLOWED = (
    "a recipe may build what is defined beside it or comes from minitrainer or torchvision, "
    "and torch modules, datasets, samplers, loaders, optimizers and schedulers"
)
_MAX_SHOWN = 300


class TargetError(Exception):
    """A `_target_` cannot be used; the message says why, as the rest of a sentence."""


def make_importable(folder: Path) -> None:
    """Put a recipe's folder first on the import path, and keep it there.

    Worker processes and unpickling need it for as long as the run lasts. A module of the same
    name that came from the folder of an earlier recipe in this process is forgotten.
    """
    text = str(folder)
    sys.path[:] = [text, *(entry for entry in sys.path if entry != text)]
    importlib.invalidate_caches()
    others = _recipe_folders - {folder}
    for name, top in list(sys.modules.items()):
        if "." in name or not _beside(folder, name) or _is_from(top, folder):
            continue
        if _is_local(top, others):
            for part in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[part]
    _recipe_folders.add(folder)


_recipe_folders: set[Path] = set()


def find_target(name: str, folder: Path) -> Callable[..., Any]:
    """Return the class or function that a `_target_` names.

    Args:
        name: A dotted name, `digits.DigitsNet`.
        folder: The recipe's folder, importable already.

    Raises:
        TargetError: There is none, importing it fails, or it is not of a harmless kind.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise TargetError(f"{name!r} is not a dotted name like digits.DigitsNet")
    if len(parts) == 1:
        if _beside(folder, name):
            raise TargetError(f"{name} is a file; name a class in it: {name}.CLASS")
        stems = sorted(file.stem for file in folder.glob("*.py"))
        near = f"{stems[0]}.{name}" if len(stems) == 1 else f"FILE.{name}"
        raise TargetError(f"{name} does not say in which file it is; write {near}")
    found = _import(parts[0], folder)
    for at, part in enumerate(parts[1:], start=1):
        found = _attribute(found, part, ".".join(parts[:at]), folder)
    if inspect.ismodule(found):
        raise TargetError(f"{name} is a module; name a class in it: {name}.CLASS")
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not _is_harmless(found, folder):
        raise TargetError(f"{name} is refused: {_ALLOWED}")
    return found


def location(error: BaseException, folder: Path) -> str:
    """Return `file:line` of where an exception arose, in the user's own code if it can be."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short(error.filename, folder)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own_file(frame.filename, {folder})]
    frame = (own or frames)[-1]
    return f"{_short(frame.filename, folder)}:{frame.lineno}"


def one_line(error: BaseException) -> str:
    """Return the kind of an exception and its message on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    message = " ".join(text.split())[:_MAX_SHOWN]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _import(name: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            names = {file.stem for file in folder.iterdir() if _beside(folder, file.stem)}
            near = did_you_mean(name, {*names, "minitrainer", "torch", "torchvision"})
            raise TargetError(f"there is no module {name}{near or f' in {folder}'}") from None
        raise _failed(name, error, folder) from error
    except (Exception, SystemExit) as error:  # whatever the user's file raises while it runs
        raise _failed(name, error, folder) from error


def _failed(name: str, error: BaseException, folder: Path) -> TargetError:
    return TargetError(f"importing {name} failed: {one_line(error)} ({location(error, folder)})")


def _attribute(owner: Any, part: str, path: str, folder: Path) -> Any:
    if hasattr(owner, part):
        return getattr(owner, part)
    if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
        name = f"{owner.__name__}.{part}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise _failed(name, error, folder) from error
        except (Exception, SystemExit) as error:  # whatever the user's file raises
            raise _failed(name, error, folder) from error
    top = path.partition(".")[0]
    if _beside(folder, top) and not _is_local(sys.modules[top], {folder}):
        raise TargetError(
            f"{path} has no {part}: it is not {top}.py beside the recipe, but the module "
            f"{top} of Python or of a package; give the file another name"
        )
    public = [name for name in dir(owner) if not name.startswith("_")]
    raise TargetError(f"{path} has no {part}{did_you_mean(part, public)}")


def _is_harmless(found: Any, folder: Path) -> bool:
    """Return whether calling it from a recipe is fine: `os.system` and the like are not."""
    module = str(getattr(found, "__module__", ""))
    if _is_local(sys.modules.get(module), {folder}):
        return True
    package = module.partition(".")[0]
    if inspect.isfunction(found):
        return module.startswith(("torchvision.models", "torchvision.transforms"))
    return package in ("minitrainer", "torchvision") or _is_building_block(found)


def _is_building_block(found: type) -> bool:
    import torch
    from torch.utils.data import DataLoader, Dataset, Sampler

    from minitrainer import protocols
    from minitrainer.callback import Callback
    from minitrainer.datamodule import DataModule

    blocks = (
        torch.nn.Module,
        Dataset,
        Sampler,
        DataLoader,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        Callback,
        DataModule,
    )
    seams = (
        protocols.Strategy,
        protocols.Precision,
        protocols.Accumulator,
        protocols.CheckpointIO,
        protocols.Logger,
    )
    return issubclass(found, blocks) or any(not missing_methods(found, seam) for seam in seams)


def _beside(folder: Path, name: str) -> bool:
    """Return whether a module of that name lies in the folder."""
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _is_local(module: ModuleType | None, folders: set[Path]) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and _is_own_file(file, folders)


def _is_from(module: ModuleType, folder: Path) -> bool:
    """Return whether this top-level module is the one beside the recipe."""
    file = Path(module.__file__ or "")
    return folder in (file.parent, file.parent.parent if file.stem == "__init__" else None)


def _is_own_file(file: str, folders: set[Path]) -> bool:
    """Return whether a file lies in one of the folders and is not an installed package there."""
    path = Path(file).resolve()
    if any(path.is_relative_to(installed) for installed in _INSTALLED):
        return False
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return any(path.is_relative_to(folder.resolve()) for folder in folders)


_INSTALLED = [
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
]


def _short(file: str, folder: Path) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file
