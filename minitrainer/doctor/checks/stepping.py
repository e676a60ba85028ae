"""The step: windows of accumulation, gradient scaling, clipping, and what is kept of the loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from minitrainer.doctor import codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.running import Arm, Visit
from minitrainer.doctor.reading.script import Script, is_constant
from minitrainer.doctor.reading.values import DDP, Frame, argument

SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.GradScaler")
_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
_LOSS_NAME = re.compile(r"(self\.)?(criterion|criteria|loss_(fn|func|function)|crit)")
_MEAN_LOSS = re.compile(r"torch\.nn\.(functional\.\w*(_loss|cross_entropy\w*)|\w+Loss)")


def missing_no_sync(script: Script) -> Iterator[Finding]:
    """Gradients are reduced over the ranks in each micro-batch, and only the last one is needed."""
    wrapped = script.calls_of(DDP)
    if not wrapped or script.words & {"no_sync", "require_backward_grad_sync"}:
        return
    for visit, _, step in _accumulating(script):
        yield script.finding(
            codes.NO_SYNC_MISSING,
            "warning",
            visit.node,
            f"The optimizer steps once in several backwards (line {_line(step)}), but DDP reduces "
            "the gradients over all ranks in every one of them.",
            "Put forward and backward of all but the window's last into model.no_sync().",
        )


def undivided_loss(script: Script) -> Iterator[Finding]:
    """Accumulated gradients are a sum, as large as the window is long."""
    if script.words & {"div_", "mul_", "reduction"}:
        return
    for visit, loss, step in _accumulating(script):
        if _is_mean_loss(script, loss, visit.frame):
            yield script.finding(
                codes.UNDIVIDED_LOSS,
                "error",
                visit.node,
                "The loss of each micro-batch is a mean and is not divided by their number: the "
                f"gradients that line {_line(step)} steps with are that many times too large.",
                "Divide the loss by the number of micro-batches before backward.",
            )


def double_step(script: Script) -> Iterator[Finding]:
    """Two optimizer steps after one backward."""
    steps = list(_optimizer_steps(script))
    for first, optimizer in steps:
        for second, same in steps:
            if (
                script.before(first, second)
                and first.node is not second.node
                and first.loops
                and first.loops == second.loops
                and optimizer == same
                and not first.excludes(second)
                and _one_always(first, second)
                and not any(
                    script.before(first, visit) and script.before(visit, second)
                    for visit, _ in script.backwards
                )
            ):
                yield script.finding(
                    codes.DOUBLE_STEP,
                    "error",
                    second.node,
                    "The optimizer steps here again after the step in line "
                    f"{_line(first)}, with no backward in between.",
                    "Step once, at the end of the window, through the scaler if there is one.",
                )
                return


def clip_before_unscale(script: Script) -> Iterator[Finding]:
    """Gradients are clipped while they are still multiplied by the scale."""
    for clip, call in script.calls_of(*_CLIP):
        steps = [v for v, _, _ in _scaler_calls(script, "step") if _follows(script, clip, v)]
        unscaled = [v for v, _, _ in script.methods("unscale_") if v.loop is clip.loop]
        if not steps or any(script.before(v, clip) for v in unscaled):
            continue
        late = f"; unscale_ comes only in line {_line(unscaled[0])}" if unscaled else ""
        yield script.finding(
            codes.CLIP_BEFORE_UNSCALE,
            "error",
            call,
            "The gradients are clipped while the factor of GradScaler (65536 at first) is still in "
            f"them{late}.",
            "Call scaler.unscale_(optimizer) before clipping.",
        )


def missing_update(script: Script) -> Iterator[Finding]:
    """`scaler.step` without `scaler.update`."""
    named = ["scaler" in ast.unparse(who).lower() for _, _, who in script.methods("update")]
    if any(named) or any(_scaler_calls(script, "update")):
        return
    for _, call, _ in _scaler_calls(script, "step"):
        yield script.finding(
            codes.SCALER_NOT_UPDATED,
            "error",
            call,
            "scaler.step is called, but scaler.update never is: the second step raises.",
            "Call scaler.update() after scaler.step(optimizer).",
        )


def kept_graph(script: Script) -> Iterator[Finding]:
    """A sum or a list of losses keeps the graph of every step alive."""
    for visit in script.visits:
        value, target = _added(visit.node)
        if value is None or visit.loop not in script.training_loops:
            continue
        if script.without_gradients(visit) or _made_in(visit, target):
            continue
        losses = [loss for backward, loss in script.backwards if backward.loop is visit.loop]
        made = {
            origin.node
            for backward, loss in script.backwards
            if backward.loop is visit.loop
            for origin in script.values.origins(loss, backward.frame)
        }
        kept = [
            name.id
            for name in _bare_names(value)
            if any(origin.node in made for origin in script.values.origins(name, visit.frame))
        ]
        if kept and target not in map(ast.unparse, losses):
            yield script.finding(
                codes.KEPT_GRAPH,
                "warning",
                visit.node,
                f"{target} keeps {', '.join(kept)} with its autograd history, of every "
                "batch: memory grows until the epoch ends.",
                "Add loss.detach(), or loss.item() where it is printed.",
            )


# What a step is --------------------------------------------------------------------------------


def _optimizer_steps(script: Script) -> Iterator[tuple[Visit, ast.AST]]:
    """Yield the optimizer steps, plain ones and those through a scaler, with their optimizer."""
    scaled = {call for _, call, _ in _scaler_calls(script, "step")}
    for visit, call, receiver in script.methods("step"):
        optimizer = call.args[0] if call in scaled and call.args else receiver
        for origin in script.values.origins(optimizer, visit.frame)[:1]:
            name = script.called(origin.node)
            plain = name.startswith("torch.optim.") and "lr_scheduler" not in name
            unknown = not isinstance(origin.node, ast.Call) and "opt" in ast.unparse(optimizer)
            if plain or unknown or call in scaled:
                yield visit, origin.node


def _scaler_calls(script: Script, method: str) -> Iterator[tuple[Visit, ast.Call, ast.expr]]:
    for visit, call, receiver in script.methods(method):
        made = script.made_by(receiver, visit.frame, *SCALERS)
        nodes = [origin.node for origin in made if isinstance(origin.node, ast.Call)]
        if nodes and not all(is_constant(argument(n, 9, "enabled"), False) for n in nodes):
            yield visit, call, receiver


def _accumulating(script: Script) -> Iterator[tuple[Visit, ast.expr, Visit]]:
    """Yield backwards that an optimizer does not follow each time, with the step that does."""
    steps = [visit for visit, _ in _optimizer_steps(script)]
    for visit, loss in script.backwards:
        if visit.loop is None:
            continue
        sometimes = [
            step
            for step in steps
            if step.loop is visit.loop
            and any(_counts(script, arm) for arm in step.around.arms)
            and not any(_counts(script, arm) for arm in visit.around.arms)
        ]
        after_loop = [
            step
            for step in steps
            if len(visit.loops) > 1
            and step.loops == visit.loops[:-1]
            and script.before(visit, step)
            and not any(s.loop is visit.loop for s in steps)
        ]
        if sometimes or after_loop:
            yield visit, loss, (sometimes or after_loop)[0]


def _counts(script: Script, arm: Arm) -> bool:
    """Return whether a condition is like `(i + 1) % accumulate == 0`."""
    tests = [arm.test]
    for node in ast.walk(arm.test):
        if isinstance(node, ast.Name):
            origins = script.values.origins(node, arm.frame)
            tests += [o.node for o in origins if isinstance(o.node, ast.expr)]
    return any(
        (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))
        for test in tests
        for node in ast.walk(test)
    )


def _one_always(first: Visit, second: Visit) -> bool:
    """Return whether one of two is done whenever the other is, by the conditions around them."""
    mine = [arm.key for arm in first.around.arms]
    theirs = [arm.key for arm in second.around.arms]
    shorter = min(len(mine), len(theirs))
    return mine[:shorter] == theirs[:shorter]


def _follows(script: Script, clip: Visit, step: Visit) -> bool:
    return step.loop is clip.loop and script.before(clip, step) and not clip.excludes(step)


# What a loss is --------------------------------------------------------------------------------


def _is_mean_loss(script: Script, loss: ast.expr, frame: Frame, depth: int = 0) -> bool:
    """Return whether it is surely a mean over the micro-batch, divided by nothing."""
    if isinstance(loss, ast.Name) and depth < 5 and not _changed(frame.function, loss.id):
        values = [binding.value for binding in script.values.bindings(loss.id, frame)]
        return bool(values) and all(
            v is not None and _is_mean_loss(script, v, frame, depth + 1) for v in values
        )
    if not isinstance(loss, ast.Call) or script.values.callee(loss, frame) is not None:
        return False
    if _MEAN_LOSS.fullmatch(script.called(loss)):
        return True
    makers = [script.called(o.node) for o in script.values.origins(loss.func, frame)]
    named = _LOSS_NAME.fullmatch(ast.unparse(loss.func)) is not None
    return all(_MEAN_LOSS.fullmatch(maker) or (named and not maker) for maker in makers)


def _changed(function: ast.AST, name: str) -> bool:
    """Return whether `loss /= n` or the like stands in the function."""
    return any(
        isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == name
        for node in ast.walk(function)
    )


def _added(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Return what is added and to what, of `total += x`, `total = total + x`, `all.append(x)`."""
    match node:
        case ast.AugAssign(
            target=ast.Name() | ast.Attribute() as target, op=ast.Add(), value=value
        ):
            return value, ast.unparse(target)
        case ast.Assign(
            targets=[ast.Name() | ast.Attribute() as target],
            value=ast.BinOp(op=ast.Add(), left=left, right=value),
        ) if ast.unparse(left) == ast.unparse(target):
            return value, ast.unparse(target)
        case ast.Call(func=ast.Attribute(attr="append", value=target), args=[value]):
            return value, ast.unparse(target)
    return None, ""


def _made_in(visit: Visit, target: str) -> bool:
    """Return whether the total begins anew in each turn of the loop."""
    assert visit.loop is not None
    return any(
        isinstance(node, ast.Assign)
        and node is not visit.node
        and any(target == ast.unparse(t) for t in node.targets)
        for node in ast.walk(visit.loop)
    )


def _bare_names(value: ast.expr) -> list[ast.Name]:
    """Return the names that a sum or product is made of, without those that are detached."""
    match value:
        case ast.Name():
            return [value]
        case ast.BinOp(left=left, right=right):
            return _bare_names(left) + _bare_names(right)
    return []


def _line(visit: Visit) -> int:
    return getattr(visit.node, "lineno", 0)
