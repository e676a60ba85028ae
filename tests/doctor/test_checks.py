"""Each check of `doctor --script` on a few lines: what it sees, and what it must leave alone."""

from __future__ import annotations

import textwrap

import pytest

from minitrainer.doctor import codes
from minitrainer.doctor.script import examine

HEAD = """\
import argparse, os, torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from project import Net, data
"""
START = """\
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
"""
END = "dist.destroy_process_group()\n"


def findings(body: str, start: str = START, end: str = END) -> list[tuple[str, str]]:
    """Return code and line text of what is found in a script around these lines."""
    text = "\n".join([HEAD + start + textwrap.dedent(body), end])
    lines = text.splitlines()
    found = examine("x.py", text)
    return [(f.code, lines[int(f.place.split(":")[1]) - 1].strip()) for f in found]


def codes_in(body: str, start: str = START, end: str = END) -> set[str]:
    return {code for code, _ in findings(body, start, end)}


# Launch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument",
    [
        'parser.add_argument("--local_rank", type=int, default=0)',
        'parser.add_argument("--local-rank", default=0)',
        'parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)',
    ],
)
def test_a_local_rank_argument(argument: str) -> None:
    """Row A9: under torchrun nothing fills it in."""
    lines = f"""\
parser = argparse.ArgumentParser()
{argument}
torch.cuda.set_device(parser.parse_args().local_rank)
dist.init_process_group("nccl")
"""
    assert findings(lines, start="") == [(codes.LOCAL_RANK_ARGUMENT, argument)]
    also_read = lines + 'local_rank = int(os.environ["LOCAL_RANK"])\n'
    assert not findings(also_read, start="")
    assert not findings(lines.replace("--local", "--node"), start="")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ('dist.init_process_group("nccl")\ntorch.cuda.set_device(0)\n', True),
        ("def setup():\n    dist.init_process_group()\nsetup()\ntorch.cuda.set_device(0)\n", True),
        ('torch.cuda.set_device(0)\ndist.init_process_group("nccl")\n', False),
        ('dist.init_process_group("gloo")\ntorch.cuda.set_device(0)\n', False),
        ("dist.init_process_group(device_id=d)\ntorch.cuda.set_device(0)\n", False),
        ("if a:\n    dist.init_process_group()\nelse:\n    torch.cuda.set_device(0)\n", False),
    ],
)
def test_init_before_set_device(lines: str, found: bool) -> None:
    """Row B5."""
    assert codes_in(lines, start="") == ({codes.EVERY_RANK_ON_GPU_0} if found else set())


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("", True),
        (END, False),
        ("if dist.is_initialized():\n    dist.destroy_process_group()\n", False),
        ("from project import cleanup\ncleanup()\n", False),
    ],
)
def test_no_destroy(end: str, found: bool) -> None:
    assert codes_in("", end=end) == ({codes.GROUP_LEFT_OPEN} if found else set())


def test_data_parallel() -> None:
    """Row B1."""
    assert codes_in("model = torch.nn.DataParallel(Net())\n") == {codes.DATA_PARALLEL}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('os.environ["NCCL_BLOCKING_WAIT"] = "1"', True),
        ('os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"', True),
        ('os.environ.setdefault("NCCL_ASYNC_ERROR_HANDLING", "1")', True),
        ('os.environ.update(NCCL_NSOCKS_PERTHREAD="4")', True),
        ('os.environ.update({"NCCL_SOCKET_NTHREADS": "2"})', True),
        ('os.putenv("NCCL_BLOCKING_WAIT", "1")', True),
        ('os.environ["NCCL_DEBUG"] = "INFO"', False),
        ('print(os.environ.get("NCCL_BLOCKING_WAIT"))', False),
        ('print("export NCCL_BLOCKING_WAIT=1")', False),
        ('settings["NCCL_BLOCKING_WAIT"] = "1"', False),
        ("# python -m torch.distributed.launch, NCCL_BLOCKING_WAIT=1", False),
    ],
)
def test_variables_that_a_script_sets(line: str, found: bool) -> None:
    """Rows B22 and B30."""
    assert findings(line + "\n") == ([(codes.VARIABLE, line)] if found else [])


# Data --------------------------------------------------------------------------------------------

LOADER = """\
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
"""


@pytest.mark.parametrize(
    ("at_start", "in_loop", "at_end", "found"),
    [
        ("", "", "", "sampler = DistributedSampler(data)"),
        ("sampler.set_epoch(epoch)", "", "", None),
        ("loader.sampler.set_epoch(epoch)", "", "", None),
        ("", "", "sampler.set_epoch(epoch)", "sampler.set_epoch(epoch)"),
        ("", "sampler.set_epoch(epoch)", "", "sampler.set_epoch(epoch)"),
        ("", "", "sampler.set_epoch(epoch + 1)", None),
    ],
)
def test_set_epoch(at_start: str, in_loop: str, at_end: str, found: str | None) -> None:
    """Row B14."""
    lines = f"""{LOADER}
for epoch in range(9):
    {at_start}
    for step, (x, y) in enumerate(loader):
        {in_loop}
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    {at_end}
"""
    expected = [] if found is None else [(codes.SAME_ORDER_EVERY_EPOCH, found)]
    assert findings(lines) == expected


def test_an_order_that_need_not_change() -> None:
    """One epoch, no shuffling, no training."""
    loop = "for x, y in loader:\n    F.mse_loss(model(x), y).backward()\n"
    assert not findings(LOADER + loop)
    epochs = "for epoch in range(9):\n" + textwrap.indent(loop, "    ")
    assert findings(LOADER + epochs)
    assert not findings(LOADER.replace("(data)", "(data, shuffle=False)") + epochs)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("shuffle=True, sampler=DistributedSampler(data)", True),
        ("shuffle=True", False),
        ("shuffle=True, sampler=None", False),
        ("shuffle=False, sampler=DistributedSampler(data)", False),
        ("shuffle=chosen is None, sampler=chosen", False),
    ],
)
def test_shuffle_and_a_sampler(arguments: str, found: bool) -> None:
    line = f"loader = DataLoader(data, 8, {arguments})"
    assert findings(line + "\n") == ([(codes.SHUFFLE_AND_SAMPLER, line)] if found else [])


@pytest.mark.parametrize(
    ("sampler", "context", "extra", "found"),
    [
        ("DistributedSampler(data, shuffle=False)", "torch.no_grad()", "", True),
        ("DistributedSampler(data)", "torch.inference_mode()", "", True),
        ("DistributedSampler(data, drop_last=True)", "torch.no_grad()", "", False),
        ("DistributedSampler(data)", "torch.no_grad()", "all = hits[:len(data)]", False),
        ("Interleaved(data)", "torch.no_grad()", "", False),
    ],
)
def test_padded_validation(sampler: str, context: str, extra: str, found: bool) -> None:
    lines = f"""
loader = DataLoader(data, sampler={sampler})
with {context}:
    for x, y in loader:
        print(model(x))
{extra}
"""
    assert codes_in(lines) == ({codes.PADDED_VALIDATION} if found else set())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("assert len(data) % world_size == 0", True),
        ("assert len(data) % dist.get_world_size() == 0, 'uneven'", True),
        ("if len(data) % world_size: raise ValueError", True),
        ("assert batch_size % world_size == 0", False),
        ("assert len(data) % 8 == 0", False),
        ("rest = len(data) % world_size", False),
    ],
)
def test_a_length_that_must_be_divisible(line: str, found: bool) -> None:
    """Row B32."""
    assert findings(line + "\n") == ([(codes.DIVISIBLE_LENGTH, line)] if found else [])


# The step ----------------------------------------------------------------------------------------


def stepping(body: str) -> set[str]:
    """Return the codes found in a training loop with this body."""
    start = """
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
criterion = torch.nn.CrossEntropyLoss()
total, history = 0, []
for step, (x, y) in enumerate(data):
"""
    return codes_in(start + textwrap.indent(textwrap.dedent(body), "    "))


FORWARD = "loss = criterion(model(x), y)\n"
WINDOW = "if (step + 1) % 4 == 0:\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("body", "missing_no_sync", "undivided"),
    [
        (FORWARD + "loss.backward()\n" + WINDOW, True, True),
        (FORWARD + "loss = loss / 4\nloss.backward()\n" + WINDOW, True, False),
        (FORWARD + "loss /= 4\nloss.backward()\n" + WINDOW, True, False),
        (FORWARD + "(loss / 4).backward()\n" + WINDOW, True, False),
        (FORWARD + "scaler.scale(loss * 0.25).backward()\n" + WINDOW, True, False),
        ("loss = model(x, y)\nloss.backward()\n" + WINDOW, True, False),
        ("F.cross_entropy(model(x), y).backward()\n" + WINDOW, True, True),
        ("F.mse_loss(model(x), y, reduction='sum').backward()\n" + WINDOW, True, False),
        (f"{FORWARD}loss.backward()\nlast = step % 4 == 3\nif last:\n    optimizer.step()", 1, 1),
        (f"{FORWARD}loss.backward()\nif step % 4:\n    continue\noptimizer.step()", True, True),
        ("with model.no_sync():\n    (criterion(model(x), y) / 4).backward()\n" + WINDOW, 0, 0),
        (FORWARD + "loss.backward()\noptimizer.step()\n", False, False),
        (f"{FORWARD}loss.backward()\noptimizer.step()\nif step % 9 == 0:\n    print(1)", 0, 0),
        (f"if step % 4 == 0:\n    {FORWARD}    loss.backward()\n    optimizer.step()\n", 0, 0),
        ("for a in x:\n    (criterion(model(a), y) / 4).backward()\noptimizer.step()", 1, 0),
        ("for a in x:\n    criterion(model(a), y).backward()\noptimizer.step()", 1, 1),
        ("for a in x:\n    criterion(model(a), y).backward()\n    optimizer.step()", 0, 0),
    ],
)
def test_accumulation(body: str, missing_no_sync: bool, undivided: bool) -> None:
    """Row B21: gradients reduced in each micro-batch, and not divided."""
    expected = {codes.NO_SYNC_MISSING} if missing_no_sync else set()
    expected |= {codes.UNDIVIDED_LOSS} if undivided else set()
    assert stepping(body) == expected


SCALED = FORWARD + "scaler.scale(loss).backward()\n"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (SCALED + "scaler.step(optimizer)\nscaler.update()\noptimizer.step()", True),
        (FORWARD + "loss.backward()\noptimizer.step()\noptimizer.step()", True),
        (FORWARD + "loss.backward()\noptimizer.step()\nif step > 3:\n    optimizer.step()", True),
        (FORWARD + "loss.backward()\nif a:\n    optimizer.step()\nelse:\n    optimizer.step()", 0),
        (
            FORWARD
            + "loss.backward()\nif a:\n    optimizer.step()\nif not a:\n    optimizer.step()",
            0,
        ),
        (FORWARD + "loss.backward()\noptimizer.step()\n" * 2, False),
        (FORWARD + "loss.backward()\noptimizer.step()\nschedule.step()", False),
        (FORWARD + "loss.backward()\nfor o in optimizers:\n    o.step()", False),
    ],
)
def test_two_steps_for_one_backward(body: str, found: bool) -> None:
    """Row B21: a training step that steps, and a loop that steps again."""
    assert stepping(body) == ({codes.DOUBLE_STEP} if found else set())


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
STEP = "scaler.step(optimizer)\nscaler.update()\n"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (SCALED + CLIP + STEP, True),
        (SCALED + CLIP + "scaler.unscale_(optimizer)\n" + STEP, True),
        (SCALED + "scaler.unscale_(optimizer)\n" + CLIP + STEP, False),
        (FORWARD + "loss.backward()\n" + CLIP + "optimizer.step()", False),
        (
            "if fp16:\n"
            + textwrap.indent(SCALED + "scaler.unscale_(optimizer)\n" + CLIP + STEP, "    ")
            + "else:\n"
            + textwrap.indent(FORWARD + "loss.backward()\n" + CLIP + "optimizer.step()", "    "),
            False,
        ),
    ],
)
def test_clipping_scaled_gradients(body: str, found: bool) -> None:
    """Row B18."""
    assert stepping(body) == ({codes.CLIP_BEFORE_UNSCALE} if found else set())


def test_a_scaler_that_is_not_updated() -> None:
    assert stepping(SCALED + "scaler.step(optimizer)\n") == {codes.SCALER_NOT_UPDATED}
    assert not stepping(SCALED + STEP)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("total += loss", True),
        ("total += loss * len(x)", True),
        ("total = total + loss", True),
        ("history.append(loss)", True),
        ("self.total += loss", True),
        ("total += loss.item()", False),
        ("total += loss.detach() * len(x)", False),
        ("history.append(float(loss))", False),
        ("total += len(x)", False),
        ("loss = loss.item(); total += loss", False),
        ("with torch.no_grad(): total += loss", False),
        ("total = 0; total += loss", False),
    ],
)
def test_a_total_that_keeps_the_graph(line: str, found: bool) -> None:
    """Row B31: why memory grows."""
    body = f"{FORWARD}loss.backward()\noptimizer.step()\n{line}\n"
    assert stepping(body) == ({codes.KEPT_GRAPH} if found else set())
    assert not stepping("loss = criterion(model(x), y)\nloss += model.penalty()\nloss.backward()\n")


def test_the_cache_emptied_in_the_loop() -> None:
    """Row B31."""
    step = FORWARD + "loss.backward()\n"
    assert stepping(step + "torch.cuda.empty_cache()\n") == {codes.EMPTIED_CACHE}
    assert not codes_in("for epoch in range(9):\n    torch.cuda.empty_cache()\n")


@pytest.mark.parametrize(
    ("imported", "used", "found"),
    [
        ("from torch.cuda.amp import autocast", "with autocast(): pass", True),
        ("from torch.cuda.amp import GradScaler as S", "S()", True),
        ("from torch.cuda import amp", "amp.GradScaler()", True),
        ("import torch", "with torch.cuda.amp.autocast(): pass", True),
        ("import torch", "autocast = torch.cuda.amp.autocast\nautocast()", True),
        ("from torch.amp import autocast", "with autocast('cuda'): pass", False),
        ("import torch", "with torch.autocast('cuda'): pass", False),
    ],
)
def test_deprecated_amp(imported: str, used: str, found: bool) -> None:
    """Row B15."""
    assert codes_in(f"{imported}\n{used}\n") == ({codes.DEPRECATED_AMP} if found else set())


# Sync --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("if rank == 0:\n    dist.barrier()", "dist.barrier()"),
        ("if not rank:\n    dist.all_reduce(x)", "dist.all_reduce(x)"),
        ("if dist.get_rank() == 0:\n    dist.all_reduce(x)", "dist.all_reduce(x)"),
        ("if rank == 0 and step > 3:\n    dist.all_reduce(x)", "dist.all_reduce(x)"),
        ('if os.environ["RANK"] == "0":\n    dist.barrier()', "dist.barrier()"),
        ("main = rank == 0\nif main:\n    dist.barrier()", "dist.barrier()"),
        ("def main():\n    return rank == 0\nif main():\n    dist.barrier()", "dist.barrier()"),
        ("def mean(x):\n    dist.all_reduce(x)\nif rank == 0:\n    mean(1)", "dist.all_reduce(x)"),
        (
            "def save():\n    if rank > 0:\n        return\n    dist.barrier()\nsave()",
            "dist.barrier()",
        ),
        ("if rank != 0:\n    dist.broadcast(x, 0)", "dist.broadcast(x, 0)"),
        ("from u import reduce_dict\nif rank == 0:\n    reduce_dict(x)", "reduce_dict(x)"),
        ("if rank == 0:\n    print(1)\ndist.barrier()", None),
        ("if rank == 0:\n    dist.barrier()\nelse:\n    dist.barrier()", None),
        ("if rank != 0:\n    dist.barrier()\nif rank == 0:\n    dist.barrier()", None),
        ("if rank == 0:\n    dist.all_reduce(x, group=g)", None),
        ("if world_size > 1:\n    dist.all_reduce(x)", None),
        ("if rank == 0:\n    dist.send(x, 1)", None),
        ("if rank < 4:\n    dist.barrier()", None),
        ("if rank == 0 or step > 3:\n    dist.barrier()", None),
        ("if args.main_dir:\n    dist.barrier()", None),
    ],
)
def test_a_collective_that_some_ranks_come_to(lines: str, found: str | None) -> None:
    """Row C4."""
    expected = [] if found is None else [(codes.LONELY_COLLECTIVE, found)]
    assert findings(lines + "\n") == expected


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        ("model.module(x)", True),
        ("model.module.forward(x)", True),
        ("model.module.training_step(x)", True),
        ("net(x)", True),  # the wrapper is made, but never called
        ("model(x)", False),
        ("model(net.embed(x))", False),
    ],
)
def test_a_forward_past_the_wrapper(forward: str, found: bool) -> None:
    """Row C1."""
    lines = f"""
net = Net()
model = DDP(net)
for x in data:
    loss = {forward}.mean()
    loss.backward()
"""
    assert codes_in(lines) == ({codes.PAST_THE_WRAPPER} if found else set())


def test_an_evaluation_past_the_wrapper_is_right() -> None:
    lines = """
net = Net()
model = DDP(net)
for x in data:
    model(x).mean().backward()
    with torch.no_grad():
        print(model.module(x), net(x))
for x in data:
    print(model.module(x))
"""
    assert not findings(lines)


def test_batch_norm_converted_after_the_wrap() -> None:
    """Row A5."""
    convert = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
    late = f"model = Net()\nmodel = DDP(model)\nmodel = {convert}(model)\n"
    assert codes_in(late) == {codes.LATE_SYNC_BATCH_NORM}
    assert not codes_in(f"model = Net()\nmodel = {convert}(model)\nmodel = DDP(model)\n")


# Checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("torch.save(x, 'a.pt')", True),
        ("def save():\n    torch.save(x, 'a.pt')\nsave()", True),
        ("def save():\n    torch.save(x, 'a.pt')\nif rank == 0:\n    save()", False),
        ("def save():\n    if rank:\n        return\n    torch.save(x, 'a.pt')\nsave()", False),
        ("if rank == 0 and step % 3 == 0:\n    torch.save(x, 'a.pt')", False),
        ("if is_main_process():\n    torch.save(x, 'a.pt')", False),
        ("if args.gpu == 0:\n    torch.save(x, 'a.pt')", False),
        ("torch.save(x, f'rank{rank}.pt')", False),
        ("path = f'{rank}.pt'\ntorch.save(x, path)", False),
        ("import io\nbuffer = io.BytesIO()\ntorch.save(x, buffer)", False),
        ("@rank_zero_only\ndef save():\n    torch.save(x, 'a.pt')\nsave()", False),
        ("def save():\n    torch.save(x, 'a.pt')", False),  # who knows where it is called
    ],
)
def test_saving_on_every_rank(lines: str, found: bool) -> None:
    """Row B24."""
    assert codes_in(lines + "\n") == ({codes.SAVING_ON_EVERY_RANK} if found else set())
    assert not codes_in(lines + "\n", start="", end="")  # a script without ranks


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("torch.save(model.state_dict(), 'a.pt')", True),
        ("state = {'model': model.state_dict()}\ntorch.save(state, 'a.pt')", True),
        ("torch.save({'model': model.module.state_dict()}, 'a.pt')", False),
        ("torch.save(net.state_dict(), 'a.pt')", False),
        ("print(model.state_dict().keys())\ntorch.save(net.state_dict(), 'a.pt')", False),
        ("raw = model.module\ntorch.save(raw.state_dict(), 'a.pt')", False),
        (
            "if many:\n    torch.save(model.module.state_dict(), 'a.pt')\n"
            "else:\n    torch.save(model.state_dict(), 'a.pt')",
            False,
        ),
        (
            "s = {k.removeprefix('module.'): v for k, v in model.state_dict().items()}\n"
            "torch.save(s, 'a.pt')",
            False,
        ),
    ],
)
def test_the_prefix_of_the_wrapper(lines: str, found: bool) -> None:
    """Row B24."""
    body = "net = Net()\nmodel = DDP(net)\nif rank == 0:\n" + textwrap.indent(lines, "    ") + "\n"
    assert codes_in(body) == ({codes.MODULE_PREFIX} if found else set())


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("net.load_state_dict(torch.load('a.pt'))", True),
        ("saved = torch.load('a.pt')\nnet.load_state_dict(saved['model'])", True),
        ("net.load_state_dict(torch.load('a.pt', map_location='cpu'))", False),
        ("net.load_state_dict(torch.load('a.pt', device))", False),
        ("images = torch.load('images.pt')", False),
        (
            "if one:\n    saved = torch.load('a.pt')\n"
            "else:\n    saved = torch.load('a.pt', map_location='cpu')\n"
            "net.load_state_dict(saved)",
            False,
        ),
    ],
)
def test_loading_without_a_place(lines: str, found: bool) -> None:
    """Row B34."""
    body = "net = Net().cuda()\n" + lines + "\n"
    assert codes_in(body) == ({codes.NO_MAP_LOCATION} if found else set())


# Whatever comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pass",
        "def f(): return f()\nf()",
        "x = x\ny = [y for y in y]\nf(*x, **y)",
        "def f(a): return g(a)\ndef g(a): return f(a)\nmodel = f(g)\nmodel.step(model.step())",
        "class A(A):\n    def __init__(self): self.a = self.a\nA().a.b()",
        "a, (b, *c) = d = a\nif (n := a): n.backward()",
        "import torch\ntorch.save()\ntorch.load(*a)\ntorch.nn.parallel.DistributedDataParallel()",
        "from . import x\nfrom .y import *\nasync def f():\n    async with x as z: await z",
        "match a:\n    case [b, *c] if b: c.backward()\n    case _: raise a from b",
        "lambda: (yield)\nf = lambda x: x.step()\nprint(f'{f(1)!r:>{2}}')",
        "while a:\n    a = a.to(a).to(a)\n    a.backward(a)\nelse:\n    a.step()",
    ],
)
def test_odd_scripts_are_read_to_the_end(text: str) -> None:
    assert examine("x.py", text) == []
