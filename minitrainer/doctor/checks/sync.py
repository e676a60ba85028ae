"""Sync: what all ranks must do together, and what goes past DDP."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from minitrainer.doctor import codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.ranks import only_ranks
from minitrainer.doctor.reading.running import Visit
from minitrainer.doctor.reading.script import Script, is_constant
from minitrainer.doctor.reading.values import DDP, argument

_CONVERT = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier"),
    *("broadcast", "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("gather", "gather_object", "scatter", "scatter_object_list", "all_to_all"),
    *("all_to_all_single", "monitored_barrier"),
}
_PLACE_OF_GROUP = {
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    **dict.fromkeys(("reduce", "reduce_scatter", "gather", "gather_object", "scatter"), 3),
}
# Names that imported helpers for a reduction over the ranks go by.
_KNOWN_NAMES = {
    *("reduce_tensor", "reduce_mean", "reduce_value", "reduce_dict", "reduce_loss"),
    *("all_reduce_mean", "concat_all_gather", "gather_tensor", "gather_tensors"),
    *("distributed_concat", "synchronize_between_processes"),
}
_FORWARD = {"forward", "training_step"}


def lonely_collective(script: Script) -> Iterator[Finding]:
    """A collective that only some ranks come to waits for the others for ever."""
    met: dict[str, set[str]] = {}
    found = []
    for visit, call in script.calls:
        name = _collective(script, call)
        if name is None or _in_a_subgroup(call, name):
            continue
        ranks = only_ranks(script, visit)
        met.setdefault(name, set()).add(str(ranks))
        if ranks is not None:
            found.append((visit, call, name, ranks))
    for _, call, name, ranks in found:
        if len(met[name] - {"None"}) == 1:  # with both kinds, each may wait for the other
            come, wait = ("comes", "it waits") if ranks == "rank 0" else ("come", "they wait")
            yield script.finding(
                codes.LONELY_COLLECTIVE,
                "error",
                call,
                f"{name} needs every rank, but only {ranks} {come} here: {wait} for the rest until "
                "the timeout.",
                "Call it on all ranks, and leave under the condition only what one rank does.",
            )


def past_the_wrapper(script: Script) -> Iterator[Finding]:
    """A forward that does not go through DDP: its gradients stay on their rank."""
    for visit, call in script.calls:
        if not _trains(script, visit):
            continue
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in _FORWARD:
            function = function.value
        if not (isinstance(function, ast.Attribute) and function.attr == "module"):
            continue
        if script.made_by(function.value, visit.frame, DDP):
            yield script.finding(
                codes.PAST_THE_WRAPPER,
                "error",
                call,
                f"{ast.unparse(call.func)}(...) goes past DDP: the gradients of this forward are "
                "not reduced, and the ranks' weights drift apart.",
                f"Call {ast.unparse(function.value)}(...) itself.",
            )
    yield from _unused_wrapper(script)


def _unused_wrapper(script: Script) -> Iterator[Finding]:
    """Yield the training forwards of a model whose DDP wrapper nobody calls."""
    wrapped = script.calls_of(DDP)
    for visit, call in script.calls:
        if script.called(call) != DDP and script.made_by(call.func, visit.frame, DDP):
            return
    inner = {
        origin.node
        for visit, call in wrapped
        if (model := argument(call, 0, "module")) is not None
        for origin in script.values.origins(model, visit.frame)
        if isinstance(origin.node, ast.Call)
    }
    for visit, call in script.calls:
        if not isinstance(call.func, ast.Name | ast.Attribute) or not _trains(script, visit):
            continue
        if any(o.node in inner for o in script.values.origins(call.func, visit.frame)):
            yield script.finding(
                codes.PAST_THE_WRAPPER,
                "error",
                call,
                f"{ast.unparse(call.func)}(...) is the model without its DDP wrapper, which line "
                f"{wrapped[0][1].lineno} makes and nothing calls: no gradients are reduced.",
                "Call what DistributedDataParallel(...) returns.",
            )


def late_sync_batch_norm(script: Script) -> Iterator[Finding]:
    """`convert_sync_batchnorm` after the model was wrapped."""
    for visit, call in script.calls_of(_CONVERT):
        if call.args and script.made_by(call.args[0], visit.frame, DDP):
            yield script.finding(
                codes.LATE_SYNC_BATCH_NORM,
                "warning",
                call,
                "The model is wrapped in DDP already, which looks for SyncBatchNorm layers only "
                "when it wraps.",
                "Convert first, then wrap, then make the optimizer.",
            )


def _collective(script: Script, call: ast.Call) -> str | None:
    name = script.called(call)
    last = name.rpartition(".")[2]
    if name == f"torch.distributed.{last}" and last in _COLLECTIVES:
        return last
    return last if name and not name.startswith("torch.") and last in _KNOWN_NAMES else None


def _in_a_subgroup(call: ast.Call, name: str) -> bool:
    group = argument(call, _PLACE_OF_GROUP.get(name, 2), "group")
    return group is not None and not is_constant(group, None)


def _trains(script: Script, visit: Visit) -> bool:
    """Return whether a backward follows in the same loop."""
    if visit.loop not in script.training_loops or script.without_gradients(visit):
        return False
    return any(
        backward.loop is visit.loop and script.before(visit, backward)
        for backward, _ in script.backwards
    )
