"""Who am I: what torchrun, SLURM or our own launcher tells a process of its place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from minitrainer.errors import IncompleteEnvironmentError, PortError

Launcher = Literal["none", "local", "torchrun", "slurm", "environment"]

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NEEDED = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
_SLURM_NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")
_START_ALL = (
    "Start all ranks by torchrun or srun, or unset these variables and set `devices` to have "
    "local ranks started."
)


@dataclass(frozen=True)
class Environment:
    """The place of this process among all processes of the run.

    `world_size` counts processes on all nodes, `local_world_size` those on this one. `launcher` is
    "environment" when the variables are set but nobody known has signed for them.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: Launcher = "none"
    master_addr: str = ""
    master_port: int = 0

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read the variables of torchrun, of our own launcher, or of a SLURM step.

        Without any of RANK, WORLD_SIZE and LOCAL_RANK, and outside a SLURM step of several tasks,
        this is a process on its own; MASTER_ADDR and MASTER_PORT alone do not change that.
        LOCAL_WORLD_SIZE and GROUP_RANK may be missing; then all ranks are taken to be on this
        node, unless RANK and LOCAL_RANK differ.

        Raises:
            IncompleteEnvironmentError: Some of the variables are missing, are not numbers, or
                contradict each other.
        """
        missing = [name for name in _NEEDED if not environ.get(name)]
        if not missing:
            return cls._checked(environ, _known_launcher(environ))
        if _in_slurm_step(environ):
            return cls._checked(_slurm_variables(environ), "slurm")
        present = [name for name in _PLACE if environ.get(name)]
        if not present:
            return cls()
        raise IncompleteEnvironmentError(
            f"{_listed(present)} set, but {_listed(missing)} not.",
            "Only a full set of them tells a process its rank and where to meet the others.",
            _START_ALL,
        )

    @classmethod
    def _checked(cls, variables: Mapping[str, str], launcher: Launcher) -> Environment:
        rank, local_rank = (_number(variables, name) for name in ("RANK", "LOCAL_RANK"))
        world_size = _number(variables, "WORLD_SIZE", least=1)
        local_size = world_size if rank == local_rank else local_rank + 1
        if variables.get("LOCAL_WORLD_SIZE"):
            local_size = _number(variables, "LOCAL_WORLD_SIZE", least=1)
        node_rank = (rank - local_rank) // local_size
        if variables.get("GROUP_RANK"):
            node_rank = _number(variables, "GROUP_RANK")
        _below("RANK", rank, "WORLD_SIZE", world_size)
        _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
        _below("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", world_size, equal=True)
        _below("LOCAL_RANK", local_rank, "RANK", rank, equal=True)
        return cls(
            rank,
            local_rank,
            node_rank,
            world_size,
            local_size,
            launcher,
            variables["MASTER_ADDR"],
            _port(variables),
        )

    @contextmanager
    def export(self, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
        """Set the variables that a process group reads, and put them back as they were.

        torchrun and our own launcher have set them already; SLURM has not.
        """
        mine = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        added = {
            name: str(value)
            for name, value in mine.items()
            if self.launcher == "slurm" and name not in environ
        }
        environ.update(added)
        try:
            yield
        finally:
            for name in added:
                environ.pop(name, None)


def wished_port(environ: Mapping[str, str]) -> int:
    """Return the port that the user has set for ranks started here, 0 for any free one.

    In a process that is a rank itself, MASTER_PORT belongs to the run it is part of.

    Raises:
        PortError: MASTER_PORT is not the number of a port.
    """
    if not environ.get("MASTER_PORT") or "RANK" in environ:
        return 0
    try:
        return _port(environ)
    except IncompleteEnvironmentError as error:
        raise PortError(error.what, error.why, "Unset it to have a free port chosen.") from None


def strip_local_rank(argv: Sequence[str]) -> list[str]:
    """Return the arguments without `--local-rank`, which old launchers append.

    LOCAL_RANK is what counts. Both spellings are dropped, and both forms, `--local-rank=1` and
    `--local-rank 1`.
    """
    kept: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if name not in ("--local-rank", "--local_rank"):
            kept.append(argument)
        elif not equals and rest and rest[0].lstrip("-").isdecimal():
            rest.pop(0)
    return kept


def _known_launcher(environ: Mapping[str, str]) -> Launcher:
    if environ.get("MINITRAINER_LAUNCHER") == "local":
        return "local"
    return "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "environment"


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    # A shell that was started by `srun --pty` is a step too, but what is typed there is meant for
    # one process; so is what runs in a batch script outside srun, which has no step.
    tasks = environ.get("SLURM_NTASKS", "")
    return (
        tasks.isdecimal()
        and int(tasks) > 1
        and "SLURM_STEP_ID" in environ
        and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    )


def _slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Translate SLURM's variables to torchrun's; what the user has set already must agree."""
    missing = [name for name in _SLURM_NEEDED if not environ.get(name)]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        missing.append("SLURM_JOB_NODELIST")
    if missing or not nodes:
        raise IncompleteEnvironmentError(
            f"This is a SLURM step of {environ['SLURM_NTASKS']} tasks, but {_listed(missing)} not "
            "set.",
            "They tell a process its rank and where to meet the others.",
            "Start all ranks by srun without --export=NONE.",
        )
    node = environ.get("SLURM_NODEID") or "0"
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": _tasks_on_node(environ, node),
        "GROUP_RANK": node,
    }
    for name in _PLACE:
        if environ.get(name) and environ[name] != variables[name]:
            raise IncompleteEnvironmentError(
                f"{name} is {environ[name]}, but SLURM says {variables[name]}.",
                "A process has one rank only.",
                f"Unset {name}.",
            )
    variables["MASTER_ADDR"] = environ.get("MASTER_ADDR") or first_host(nodes)
    variables["MASTER_PORT"] = environ.get("MASTER_PORT") or _slurm_port(environ)
    return variables


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list, `n001` of `n[001-003,7],m2`."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _tasks_on_node(environ: Mapping[str, str], node: str) -> str:
    """Return the entry of this node in a list like `2(x3),1`."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts and node.isdecimal():
        each: list[str] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
            each += [count] * int(times or 1)
        if int(node) < len(each):
            return each[int(node)]
    return environ.get("SLURM_NTASKS_PER_NODE", "")


def _slurm_port(environ: Mapping[str, str]) -> str:
    # The same on all nodes without asking, another one for each job and step, and below the ports
    # that the kernel gives to outgoing connections.
    job, step = _number(environ, "SLURM_JOB_ID"), environ["SLURM_STEP_ID"]
    return str(10000 + (job + (int(step) if step.isdecimal() else 0)) % 20000)


def _number(variables: Mapping[str, str], name: str, least: int = 0) -> int:
    text = variables[name]
    if not text.isdecimal() or int(text) < least:
        raise IncompleteEnvironmentError(
            f"{name} is {text!r}.", f"It must be a number, {least} or more.", _START_ALL
        )
    return int(text)


def _port(variables: Mapping[str, str]) -> int:
    port = _number(variables, "MASTER_PORT", least=1)
    _below("MASTER_PORT", port, "the number of ports", 65536)
    return port


def _below(name: str, value: int, limit_name: str, limit: int, *, equal: bool = False) -> None:
    if value > limit or (value == limit and not equal):
        relation = "at most" if equal else "below"
        raise IncompleteEnvironmentError(
            f"{name} is {value} and {limit_name} is {limit}.",
            f"{name} must be {relation} {limit_name}.",
            _START_ALL,
        )


def _listed(names: Sequence[str]) -> str:
    together = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{together} {'are' if len(names) > 1 else 'is'}"
