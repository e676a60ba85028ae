"""The examination of a machine: a table of facts, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minitrainer.doctor import codes
from minitrainer.doctor.facts import Facts
from minitrainer.doctor.finding import Finding, Severity
from minitrainer.doctor.variables import judge
from minitrainer.errors import IncompleteEnvironmentError, PortError
from minitrainer.launch.environment import Environment, wished_port

_PLACE = "environment"
_GIB = 2**30


def table(facts: Facts) -> list[tuple[str, str]]:
    """Return the facts as rows of a label and a value."""
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    rows = [("versions", ", ".join(versions))]
    rows += [
        (f"gpu {place}", f"{g.name}  {g.uuid}  {_gib(g.memory)}, {_gib(g.memory_used)} used")
        for place, g in enumerate(facts.devices)
    ]
    if not facts.devices:
        rows.append(("gpus", str(facts.num_gpus) if facts.num_gpus else "none, ranks use the CPU"))
    quota = "no limit" if facts.quota is None else f"{facts.quota:g} at a time"
    soft, hard = facts.open_files
    shared = facts.shared_memory
    room = "none" if shared is None else f"{_gib(shared.total)}, {_gib(shared.free)} free"
    return [
        *rows,
        ("backend", facts.backend),
        ("cores", f"{facts.cores} of {facts.machine_cores}, cgroup: {quota}"),
        ("OMP_NUM_THREADS", facts.environ.get("OMP_NUM_THREADS") or "not set"),
        ("/dev/shm", room),
        ("open files", f"{_count(soft)}, up to {_count(hard)} on request"),
        ("launcher", _launcher(facts)),
        ("port", _port(facts)),
        ("run directory", f"{facts.run_dir}, {_gib(facts.run_dir_space.free)} free"),
    ]


def examine(facts: Facts) -> list[Finding]:
    """Return what is wrong with a machine, the worst first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    order: tuple[Severity, ...] = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def launcher_variables(facts: Facts) -> Iterator[Finding]:
    """Half of a launcher's variables, or such that contradict each other."""
    try:
        environment = Environment.detect(facts.environ)
    except IncompleteEnvironmentError as error:
        what = f"{error.what} {error.why}"
        yield Finding(codes.INCOMPLETE_ENVIRONMENT, "error", _PLACE, what, error.fix)
        return
    tasks = facts.environ.get("SLURM_NTASKS", "")
    if environment.launcher == "none" and tasks.isdecimal() and int(tasks) > 1:
        yield Finding(
            codes.INCOMPLETE_ENVIRONMENT,
            "note",
            _PLACE,
            f"SLURM has granted {tasks} tasks, but this process was not started by srun: it is one "
            "process on its own.",
            "Start by `srun python -m minitrainer ...` to have all of them.",
        )


def port(facts: Facts) -> Iterator[Finding]:
    """MASTER_PORT is no port, or another program has it."""
    try:
        wished = wished_port(facts.environ)
    except PortError as error:
        yield Finding(codes.PORT_IN_USE, "error", _PLACE, f"{error.what} {error.why}", error.fix)
        return
    if facts.port_holder and not facts.environ.get("RANK"):  # under a launcher it is in use
        yield Finding(
            codes.PORT_IN_USE,
            "error",
            _PLACE,
            f"MASTER_PORT is {wished}, which is in use: {facts.port_holder}.",
            "Unset it to have a free port chosen.",
        )


def gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that torch does not see, or that others use."""
    if facts.devices and not facts.num_gpus:
        yield Finding(
            codes.BACKEND_WITHOUT_DEVICE,
            "error",
            _PLACE,
            f"The driver tells of {len(facts.devices)} GPUs, but torch sees none.",
            "Install a torch built for a CUDA version that this driver has.",
        )
    if facts.environ.get("RANK"):
        return  # then the other ranks are the ones who use them
    for place, gpu in enumerate(facts.devices):
        if gpu.memory_used > max(_GIB, gpu.memory // 20):
            yield Finding(
                codes.SHARED_DEVICE,
                "warning",
                _PLACE,
                f"GPU {place} ({gpu.uuid}) has {_gib(gpu.memory_used)} of {_gib(gpu.memory)} in "
                "use already.",
                "Look with nvidia-smi whose it is, or choose others by CUDA_VISIBLE_DEVICES.",
            )


def threads(facts: Facts) -> Iterator[Finding]:
    """More threads than cores, or fewer cores than they seem."""
    wish = facts.environ.get("OMP_NUM_THREADS", "")
    if wish and (not wish.isdecimal() or int(wish) < 1):
        what = f"OMP_NUM_THREADS is {wish!r}, which is no number of threads."
        yield Finding(codes.THREADS, "warning", _PLACE, what, "Set a number, or unset it.")
    elif wish and int(wish) > facts.cores:
        yield Finding(
            codes.THREADS,
            "warning",
            _PLACE,
            f"OMP_NUM_THREADS is {wish}, but this process may use {facts.cores} cores: each rank "
            "starts that many threads, and they wait for each other.",
            "Unset it: ranks share the cores by themselves.",
        )
    if facts.quota is not None and facts.quota < facts.cores and not wish:
        yield Finding(
            codes.THREADS,
            "warning",
            _PLACE,
            f"{facts.cores} cores are to be seen, but the container gets the time of "
            f"{facts.quota:g}: with a thread on each, all of them are stopped again and again.",
            f"Set OMP_NUM_THREADS to {max(1, int(facts.quota))} divided by the number of ranks.",
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Too little room for the batches of DataLoader workers."""
    shared = facts.shared_memory
    if shared is None or shared.free < _GIB:
        room = "none" if shared is None else f"{_gib(shared.free)} of {_gib(shared.total)} free"
        yield Finding(
            codes.WORKERS_WITHOUT_ROOM,
            "warning",
            _PLACE,
            f"/dev/shm has {room}; DataLoader workers hand batches over in it and die of a bus "
            "error when it is full.",
            "Start the container with --shm-size=8g or --ipc=host, or set num_workers=0.",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    """Too few open files for DataLoader workers."""
    soft, hard = facts.open_files
    if 0 <= soft < 1024:
        yield Finding(
            codes.WORKERS_WITHOUT_ROOM,
            "warning",
            _PLACE,
            f"A process may open {soft} files; each tensor that a DataLoader worker hands over is "
            "one.",
            f"Run ulimit -n {_count(hard)} first.",
        )


def variables(facts: Facts) -> Iterator[Finding]:
    """Variables that are deprecated, misspelt, harmful, or do nothing here."""
    for variable in judge(facts.environ, facts.interfaces):
        yield Finding(codes.VARIABLE, variable.severity, _PLACE, variable.what, variable.fix)


def run_directory(facts: Facts) -> Iterator[Finding]:
    """No place for checkpoints."""
    if facts.run_dir_problem:
        yield Finding(
            codes.RUN_DIRECTORY,
            "error",
            _PLACE,
            f"{facts.run_dir} cannot be made: {facts.run_dir_problem}.",
            "Choose another folder with run_dir.",
        )
    elif facts.run_dir_space.free < _GIB:
        yield Finding(
            codes.RUN_DIRECTORY,
            "warning",
            _PLACE,
            f"{facts.run_dir} has {_gib(facts.run_dir_space.free)} free.",
            "Make room, or choose another folder with run_dir.",
        )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    launcher_variables,
    port,
    gpus,
    threads,
    shared_memory,
    open_files,
    variables,
    run_directory,
)


def _launcher(facts: Facts) -> str:
    try:
        environment = Environment.detect(facts.environ)
    except IncompleteEnvironmentError:
        return "its variables are not complete"
    if environment.launcher == "none":
        job = facts.environ.get("SLURM_JOB_ID")
        return f"none, in SLURM job {job}" if job else "none"
    return f"{environment.launcher}, rank {environment.rank} of {environment.world_size}"


def _port(facts: Facts) -> str:
    if facts.environ.get("RANK") and facts.environ.get("MASTER_PORT"):
        return f"{facts.environ['MASTER_PORT']} (MASTER_PORT), the launcher's"
    try:
        wish = wished_port(facts.environ)
    except PortError:
        return f"{facts.environ['MASTER_PORT']} (MASTER_PORT), which is none"
    if not wish:
        return "a free one is chosen"
    return f"{wish} (MASTER_PORT), {'in use' if facts.port_holder else 'free'}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
