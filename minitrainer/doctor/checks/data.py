"""Data: who trains on which samples, in which order, and which samples are judged."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from minitrainer.doctor import codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.running import Loop, Visit
from minitrainer.doctor.reading.script import DATA_LOADER, Script, is_constant
from minitrainer.doctor.reading.values import argument


def missing_set_epoch(script: Script) -> Iterator[Finding]:
    """Without `set_epoch`, a DistributedSampler shuffles alike in every epoch."""
    if "set_epoch" in script.words:
        return
    for visit, _, sampler in _sampled_loops(script):
        if visit.loops and visit.node in script.training_loops and _shuffles(sampler):
            yield script.finding(
                codes.SAME_ORDER_EVERY_EPOCH,
                "error",
                sampler,
                "This sampler shuffles, but nothing calls its set_epoch: every epoch goes through "
                "the samples in the same order.",
                "Call sampler.set_epoch(epoch) at the start of each epoch.",
            )


def late_set_epoch(script: Script) -> Iterator[Finding]:
    """`set_epoch` acts on the next iterator only, not on one that is there already."""
    setting = [(visit, call) for visit, call, _ in script.methods("set_epoch")]
    for visit, loop, _ in _sampled_loops(script):
        epochs = visit.loop
        inside = [(v, c) for v, c in setting if v.loop is loop]
        around = [(v, c) for v, c in setting if epochs is not None and v.loop is epochs]
        early = [v for v, _ in around if script.before(v, visit)]
        late = inside or [(v, c) for v, c in around if _is_number_of(c, epochs)]
        if late and not early:
            yield script.finding(
                codes.SAME_ORDER_EVERY_EPOCH,
                "error",
                late[0][1],
                f"set_epoch comes after the loop in line {loop.lineno} has made its iterator: it "
                "acts one epoch late, and epochs 0 and 1 have the same order.",
                "Call it before the loop over the batches.",
            )


def shuffle_and_sampler(script: Script) -> Iterator[Finding]:
    """`DataLoader(shuffle=True, sampler=...)` raises."""
    for visit, call in script.calls_of(DATA_LOADER):
        sampler = argument(call, 3, "sampler")
        if sampler is None or not is_constant(argument(call, 2, "shuffle"), True):
            continue
        made = [origin.node for origin in script.values.origins(sampler, visit.frame)]
        if any(isinstance(node, ast.Call) for node in made):
            yield script.finding(
                codes.SHUFFLE_AND_SAMPLER,
                "error",
                call,
                "DataLoader gets both shuffle=True and a sampler, which raises ValueError.",
                "Leave shuffle out of the DataLoader and give it to the DistributedSampler.",
            )


def padded_validation(script: Script) -> Iterator[Finding]:
    """A DistributedSampler repeats samples, so that metrics count some of them twice."""
    if _cuts_to_length(script):
        return
    for visit, loop, sampler in _sampled_loops(script):
        validates = script.without_gradients(visit) and loop not in script.training_loops
        if validates and not is_constant(argument(sampler, 5, "drop_last"), True):
            yield script.finding(
                codes.PADDED_VALIDATION,
                "warning",
                sampler,
                f"The loop in line {loop.lineno} validates on a DistributedSampler, which repeats "
                "up to world_size - 1 samples to make the shares equal: they count twice.",
                "Give each rank Subset(data, range(rank, len(data), world_size)).",
            )


def divisible_length(script: Script) -> Iterator[Finding]:
    """The length of a dataset need not be divisible by the number of ranks."""
    for node in ast.walk(script.source.tree):
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if not (isinstance(node, ast.Assert) or raises):
            continue
        assert isinstance(node, ast.Assert | ast.If)
        if any(_is_remainder_of_length(script, part) for part in ast.walk(node.test)):
            yield script.finding(
                codes.DIVISIBLE_LENGTH,
                "warning",
                node,
                "The script refuses a dataset whose length is no multiple of the number of ranks, "
                "for which there is no need.",
                "Remove it: a DistributedSampler for training makes the shares equal by itself.",
            )


def _sampled_loops(script: Script) -> Iterator[tuple[Visit, Loop, ast.Call]]:
    """Yield the loops over loaders with a DistributedSampler, with that sampler."""
    for visit, loop in script.loops:
        if isinstance(loop, ast.While):
            continue
        for loader, frame in script.loaders(loop.iter, visit.frame):
            for sampler in script.distributed_samplers(loader, frame):
                yield visit, loop, sampler


def _shuffles(sampler: ast.Call) -> bool:
    shuffle = argument(sampler, 3, "shuffle")
    return shuffle is None or is_constant(shuffle, True)


def _is_number_of(call: ast.Call, loop: Loop | None) -> bool:
    """Return whether `set_epoch` gets the loop's own variable; `epoch + 1` may come at the end."""
    target = loop.target if isinstance(loop, ast.For) else None
    given = call.args[0] if call.args else None
    return isinstance(given, ast.Name) and isinstance(target, ast.Name) and given.id == target.id


def _cuts_to_length(script: Script) -> bool:
    """Return whether something is cut to `[:len(dataset)]`, the cure for padding."""
    return any(
        isinstance(node, ast.Slice)
        and node.upper is not None
        and any(isinstance(n, ast.Name) and n.id == "len" for n in ast.walk(node.upper))
        for node in ast.walk(script.source.tree)
    )


def _is_remainder_of_length(script: Script, node: ast.AST) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
        return False
    left, right = node.left, node.right
    length = isinstance(left, ast.Call) and ast.unparse(left.func) == "len"
    ranks = "world_size" in ast.unparse(right).lower() or (
        script.called(right) == "torch.distributed.get_world_size"
    )
    return length and ranks
