"""Launch: which rank this is, on which GPU, and how the process group begins and ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from minitrainer.doctor import codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.running import Visit
from minitrainer.doctor.reading.script import INIT, Script
from minitrainer.doctor.reading.values import argument
from minitrainer.doctor.variables import VARIABLES

_SET_DEVICE = ("torch.cuda.set_device", "torch.accelerator.set_device_index")
_GATHERING = re.compile(r"clean|destroy|shut_?down|tear_?down|finali[sz]e", re.I)
_COLLECTIVES_AT_START = ("torch.distributed.barrier", "torch.distributed.broadcast")


def local_rank_argument(script: Script) -> Iterator[Finding]:
    """A `--local_rank` argument: torchrun passes none, so every rank gets the default."""
    if "LOCAL_RANK" in script.words:
        return  # read from the environment as well
    for _, call, _ in script.methods("add_argument", "option"):
        names = {arg.value for arg in call.args if isinstance(arg, ast.Constant)}
        given = sorted(str(name) for name in names & {"--local_rank", "--local-rank"})
        default = argument(call, 99, "default")
        if not given or not _is_number(default):
            continue
        assert default is not None
        value = ast.unparse(default)
        gpu = ", and all of them compute on GPU 0" if value == "0" else ""
        yield script.finding(
            codes.LOCAL_RANK_ARGUMENT,
            "error",
            call,
            f"{given[-1]} is {value} on every rank: torchrun passes no such argument{gpu}.",
            'Read int(os.environ["LOCAL_RANK"]) instead of it.',
        )


def init_before_set_device(script: Script) -> Iterator[Finding]:
    """The process group is there before the rank has chosen its GPU."""
    for init, call in script.calls_of(INIT):
        backend = argument(call, 0, "backend")
        on_cpu = isinstance(backend, ast.Constant) and backend.value in ("gloo", "mpi")
        if on_cpu or argument(call, 8, "device_id") is not None:
            continue
        choices = [v for v, _ in script.calls_of(*_SET_DEVICE) if not v.excludes(init)]
        earlier = [v for v in choices if script.before(v, init)]
        later = [v for v in choices if v.reached and not script.before(v, init)]
        if earlier or not later or not init.reached:
            continue
        between = [
            v
            for v, c in script.calls_of(*_COLLECTIVES_AT_START)
            if script.before(init, v) and script.before(v, later[0])
        ]
        used = f", and line {_line(between[0])} already communicates from GPU 0" if between else ""
        yield script.finding(
            codes.EVERY_RANK_ON_GPU_0,
            "error" if between else "warning",
            call,
            f"init_process_group comes before set_device in line {_line(later[0])}{used}: what "
            "touches CUDA in between takes memory of GPU 0 on every rank.",
            "Call torch.cuda.set_device(local_rank) first.",
        )
        return


def no_destroy(script: Script) -> Iterator[Finding]:
    """The process group is left open at the end."""
    if "destroy_process_group" in script.words:
        return
    imported = [
        call
        for _, call in script.calls
        if _GATHERING.search(ast.unparse(call.func)) and not script.called(call).startswith("torch")
    ]
    if imported:
        return  # something the script imports may do it
    for visit, call in script.calls_of(INIT):
        if not visit.reached:
            continue  # a library's function, whose caller may destroy it
        yield script.finding(
            codes.GROUP_LEFT_OPEN,
            "warning",
            call,
            "The process group that begins here is never destroyed: ranks can end with signal 6, "
            "or hang, instead of their own exit code.",
            "Call dist.destroy_process_group() in a finally.",
        )
        return


def data_parallel(script: Script) -> Iterator[Finding]:
    """`nn.DataParallel`: one process for all GPUs."""
    for _, call in script.calls_of("torch.nn.DataParallel"):
        yield script.finding(
            codes.DATA_PARALLEL,
            "warning",
            call,
            "nn.DataParallel copies the model to every GPU in each step, from one process, and "
            "gathers all outputs on one GPU.",
            "Use DistributedDataParallel, one process per GPU.",
        )


def environment_variables(script: Script) -> Iterator[Finding]:
    """Variables of NCCL that are deprecated, harmful, or do nothing here."""
    for node, name in _set_variables(script):
        variable = VARIABLES.get(name)
        if variable is not None:
            yield script.finding(
                codes.VARIABLE, variable.severity, node, variable.what, variable.fix
            )


def _set_variables(script: Script) -> Iterator[tuple[ast.AST, str]]:
    """Yield the environment variables that the script sets."""
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(script, target.value):
                    yield from _names(node, [target.slice])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if script.called(node) == "os.putenv" or (
                node.func.attr == "setdefault" and _is_environ(script, node.func.value)
            ):
                yield from _names(node, node.args[:1])
            elif node.func.attr == "update" and _is_environ(script, node.func.value):
                yield from ((node, keyword.arg) for keyword in node.keywords if keyword.arg)
                for mapping in node.args:
                    if isinstance(mapping, ast.Dict):
                        yield from _names(node, mapping.keys)


def _names(node: ast.AST, keys: Sequence[ast.expr | None]) -> Iterator[tuple[ast.AST, str]]:
    for key in keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield node, key.value


def _is_environ(script: Script, node: ast.expr) -> bool:
    return script.source.dotted(node) == "os.environ"


def _is_number(node: ast.expr | None) -> bool:
    try:
        return node is not None and isinstance(ast.literal_eval(node), int)
    except ValueError:
        return False


def _line(visit: Visit) -> int:
    return getattr(visit.node, "lineno", 0)
