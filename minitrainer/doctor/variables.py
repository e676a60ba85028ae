"""Environment variables that guides recommend and that are deprecated, harmful or without effect.

One table for what a script sets and for what is set on this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from minitrainer.doctor.finding import Severity


@dataclass(frozen=True, slots=True)
class Variable:
    """What is wrong with setting a variable."""

    severity: Severity
    what: str
    fix: str


def _renamed(old: str) -> Variable:
    return Variable(
        "warning",
        f"{old} is a deprecated name; torch reads TORCH_{old}.",
        f"Set TORCH_{old}, or better nothing.",
    )


def _for_sockets_only(name: str) -> Variable:
    return Variable(
        "note",
        f"{name} is for NCCL's socket transport, between machines without InfiniBand; on one "
        "machine it does nothing.",
        "Leave it out unless NCCL_DEBUG=INFO shows that sockets are used.",
    )


_TIMEOUT = (
    "Leave it out, and set the timeout itself: init_process_group(timeout=...) in a script, "
    "DDPStrategy(timeout=...) in minitrainer."
)

VARIABLES = {
    "NCCL_BLOCKING_WAIT": Variable(
        "warning",
        "NCCL_BLOCKING_WAIT is a deprecated name of TORCH_NCCL_BLOCKING_WAIT, which sets no "
        "timeout but turns off the watchdog that reports a hang.",
        _TIMEOUT,
    ),
    "TORCH_NCCL_BLOCKING_WAIT": Variable(
        "warning",
        "TORCH_NCCL_BLOCKING_WAIT sets no timeout but turns off the watchdog that reports a hang.",
        _TIMEOUT,
    ),
    "NCCL_ASYNC_ERROR_HANDLING": Variable(
        "warning",
        "NCCL_ASYNC_ERROR_HANDLING is a deprecated name of TORCH_NCCL_ASYNC_ERROR_HANDLING, which "
        "sets no timeout and is on by default.",
        _TIMEOUT,
    ),
    "NCCL_DESYNC_DEBUG": _renamed("NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": _renamed("NCCL_ENABLE_TIMING"),
    "NCCL_NSOCKS_PERTHREAD": _for_sockets_only("NCCL_NSOCKS_PERTHREAD"),
    "NCCL_SOCKET_NTHREADS": _for_sockets_only("NCCL_SOCKET_NTHREADS"),
}

_KNOWN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_SHM_DISABLE", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_PROTO"),
}


def judge(environ: Mapping[str, str], interfaces: Collection[str]) -> list[Variable]:
    """Return what is wrong with the variables that are set.

    Args:
        environ: The environment.
        interfaces: The names of the network interfaces of this machine.
    """
    wrong = [variable for name, variable in VARIABLES.items() if name in environ]
    wrong += [
        Variable("warning", f"{name} is read by nobody.", f"Set {right} instead.")
        for name in sorted(environ)
        if (right := _meant(name)) is not None and right not in environ
    ]
    return wrong + _no_such_interface(environ, interfaces)


def _meant(name: str) -> str | None:
    """Return the variable that a misspelt name stands for: WORLDSIZE, OMP_NUM_THREAD."""
    if name in _KNOWN or name in VARIABLES:
        return None
    folded = name.replace("_", "").removesuffix("S")
    near = [known for known in _KNOWN if known.replace("_", "").removesuffix("S") == folded]
    if name == "MASTER_ADDRESS":
        near = ["MASTER_ADDR"]
    return near[0] if near else None


def _no_such_interface(environ: Mapping[str, str], there: Collection[str]) -> list[Variable]:
    wrong = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(name, "")
        if not value or not there or value.startswith("^"):  # ^ excludes instead
            continue
        # To NCCL a name is the beginning of one, unless it has a = in front.
        exact = name.startswith("GLOO") or value.startswith("=")
        wanted = [word.strip() for word in value.removeprefix("=").split(",")]
        found = [i for i in there for w in wanted if i == w or (not exact and i.startswith(w))]
        if not found:
            what = f"{name} is {value}, but the network interfaces here are {', '.join(there)}."
            wrong.append(Variable("error", what, "Name one of them, or unset it."))
    return wrong
