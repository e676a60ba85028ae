"""DistributedDataParallel around the training step itself.

Pitfall: calling past the wrapper leaves gradients unsynchronised in silence, models that differ
between ranks hang, `no_sync` in the wrong place reduces too often or never, and buffers drift.
Fix: DDP wraps a module whose forward *is* the training step, so nobody can call past it; models
are compared before wrapping; sync is an argument; buffers are made equal where it matters.
"""

from __future__ import annotations

import re
from typing import Any, Literal, cast, get_args

import torch
from torch.nn.parallel import DistributedDataParallel

from minitrainer import dist
from minitrainer.errors import ModelMismatchError, SettingError, UnusedParametersError
from minitrainer.module import Module
from minitrainer.protocols import Exchange
from minitrainer.step import Ask, MicroBatch, StepOutput, WindowTotals, weigh, zero_loss

BuffersPolicy = Literal["rank0", "mean"]

_MOST_MESSAGES = 64


class StepModule(torch.nn.Module):
    """What DDP wraps: `forward` is one training step, and a message rides in its gradients.

    The ranks must agree at every window border on the window's weight and on stopping.
    A collective of its own would cost as much as the step of a small model; a few numbers in the
    gradient bucket cost nothing measurable. So there is one more parameter, outside of the user's
    module and of every optimizer, whose gradient is set to the numbers.
    """

    def __init__(self, module: Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.ride = torch.nn.Parameter(torch.zeros(len(WindowTotals._fields), device=device))
        self._messages: dict[tuple[float, ...], torch.Tensor] = {}
        # The same two once more, past the registers of nn.Module, where each look-up is a search.
        self._user: Module
        self._passenger: torch.nn.Parameter
        vars(self).update(_user=module, _passenger=self.ride)

    def forward(self, micro_batch: MicroBatch, ask: Ask) -> StepOutput:
        """Run the user's `training_step`; a rank without a loss takes part with a zero one."""
        user = self._user
        output, exchange = StepOutput(None, 0.0, None), user._exchange
        if not micro_batch.dry:
            if exchange is not None:
                exchange.open()
            output = weigh(
                user.training_step(micro_batch.batch, micro_batch.batch_idx), micro_batch
            )
        loss = output.loss
        if loss is None:
            loss = zero_loss(user.parameters())
            if exchange is not None:
                exchange.follow()
                exchange = None  # nothing of it is left for the backward
        message = self._message((output.weight, float(micro_batch.samples), *ask))
        loss = _Ride.apply(loss, self._passenger, message, exchange)
        return StepOutput(loss, output.weight, output.outputs)

    def _message(self, numbers: tuple[float, ...]) -> torch.Tensor:
        # The same few messages come again and again; making a tensor takes 8 us each time.
        message = self._messages.get(numbers)
        if message is None:
            if len(self._messages) >= _MOST_MESSAGES:
                self._messages.clear()
            message = self._messages[numbers] = self.ride.new_tensor(numbers)
        return message


class _Ride(torch.autograd.Function):
    """Pass the loss through, and give the ride parameter the message as its gradient.

    The message does not depend on the gradient of the loss, so no loss scale touches it. Its
    backward is the first to run, so here is told what must happen before the reduction ends.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        ride: torch.Tensor,
        message: torch.Tensor,
        exchange: Exchange | None,
    ) -> torch.Tensor:
        ctx.message = message
        ctx.exchange = exchange
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.exchange is not None:
            ctx.exchange.close_after_backward()
        # A copy: autograd may keep what it gets as the gradient, and add to it in place.
        return grads[0], ctx.message.clone(), None, None


class DDPStrategy:
    """Data parallelism: each rank holds the whole model and a part of each global batch.

    Args:
        timeout: Seconds after which a collective gives up.
        find_unused_parameters: Allow parameters that get no gradient in a step; costs a walk
            through the graph in every step.
        bucket_cap_mb: Size of a gradient bucket in MiB; None is torch's default.
        buffers: What becomes of buffers before validation and saving: "rank0" gives all ranks
            those of rank 0; "mean" gives them the mean of floating-point buffers over the ranks
            (running statistics of batch norm, say), and rank 0's of the others.

    Raises:
        SettingError: A number that is not above 0, or an unknown policy.
    """

    def __init__(
        self,
        *,
        timeout: float = 1800.0,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        buffers: BuffersPolicy = "rank0",
    ) -> None:
        for name, value in (("timeout", timeout), ("bucket_cap_mb", bucket_cap_mb)):
            if value is not None and not value > 0:
                raise SettingError(f"DDPStrategy got {name}={value}.", fix="It must be above 0.")
        if buffers not in get_args(BuffersPolicy):
            raise SettingError(
                f"DDPStrategy got buffers={buffers!r}.",
                fix=f"Use one of {', '.join(get_args(BuffersPolicy))}.",
            )
        self.timeout = timeout
        self._buffers = buffers
        self._find_unused = find_unused_parameters
        self._bucket_cap_mb = bucket_cap_mb

    def setup(self, module: torch.nn.Module, device: torch.device) -> None:
        """Compare the ranks' models, make them equal to rank 0's and wrap.

        Raises:
            ModelMismatchError: Names, shapes or types differ between ranks.
        """
        self._module = cast(Module, module.to(device))
        self._step = StepModule(self._module, device)
        self._world_size = dist.world_size()
        self._checked = False
        self._hosts: dist.Group | None = None
        if self._world_size > 1 and self._agrees_on_hosts(device):
            self._hosts = dist.open_host_group(timeout=self.timeout)
        check_same_model(self._module)
        self._wrapped: torch.nn.Module = self._step
        if self._world_size > 1 and not self._module.automatic_optimization:
            # No reducer: the steps reduce (`manual.py`). It would have made the ranks equal.
            tensors = [*self._module.parameters(), *self._module.buffers()]
            dist.broadcast_tensors([tensor.detach() for tensor in tensors])
        elif self._world_size > 1:
            # `forward_sync_buffers=False`: buffers are made equal here, before validation and
            # before saving, and not at the cost of a broadcast in every step.
            self._wrapped = DistributedDataParallel(
                self._step,
                device_ids=[device.index] if device.type == "cuda" else None,
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=self._find_unused,
                bucket_cap_mb=self._bucket_cap_mb,
            )

    def training_step(self, micro_batch: MicroBatch, ask: Ask) -> StepOutput:
        """Run the training step through DDP; its backward reduces gradients where `sync` is set.

        Raises:
            UnusedParametersError: Parameters got no gradient in the step before.
        """
        # Whether to reduce is read by DDP in the forward; backward needs no context of its own.
        if not micro_batch.sync and self._world_size > 1:
            with cast(DistributedDataParallel, self._wrapped).no_sync():
                return cast(StepOutput, self._wrapped(micro_batch, ask))
        try:
            return cast(StepOutput, self._wrapped(micro_batch, ask))
        except RuntimeError as error:
            unused = self._named_in(error)
            if not unused:
                raise
            raise _unused_error(unused) from error

    def agree(self, local: WindowTotals) -> WindowTotals:
        """Return the totals over the ranks: those that came with the gradients, on a CPU.

        On CUDA, reading them would wait for the device in every step. There the hosts, which are
        ahead of their devices, add up the same numbers over gloo meanwhile.

        Raises:
            UnusedParametersError: In the first window, a parameter got no gradient.
        """
        if self._world_size == 1:
            self._step.ride.grad = None
            return local
        if not self._checked:
            self._check_gradients()
        if self._module._exchange is not None:
            self._module._exchange.check()
        if self._hosts is not None:
            totals = torch.tensor(local, dtype=torch.float64)
            dist.sum_over_ranks(totals, self._hosts)
            self._step.ride.grad = None
            return WindowTotals(*totals.tolist())
        assert self._step.ride.grad is not None
        # DDP has averaged; float32 holds whole numbers up to 16,777,216 without loss.
        means = self._step.ride.grad.tolist()
        self._step.ride.grad = None
        return WindowTotals(*[_nearest(mean * self._world_size) for mean in means])

    def sync_buffers(self) -> None:
        """Overwrite the buffers by rank 0's, or by means: the ones a checkpoint holds."""
        buffers = list(self._module.buffers())
        if self._buffers == "mean":
            dist.average_tensors([buffer for buffer in buffers if buffer.is_floating_point()])
            buffers = [buffer for buffer in buffers if not buffer.is_floating_point()]
        dist.broadcast_tensors(buffers)

    def teardown(self) -> None:
        """Let go of the wrapper and its buckets; the module stays usable."""
        for parameter in self._module.parameters():
            # Gradients are views into DDP's buckets and would keep them alive.
            parameter.grad = None
        if self._hosts is not None:
            dist.close_group(self._hosts)
        del self._wrapped, self._step, self._module

    def _agrees_on_hosts(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def _check_gradients(self) -> None:
        self._checked = True
        if self._find_unused:
            return
        without = [
            name
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if without:
            raise _unused_error(without)

    def _named_in(self, error: RuntimeError) -> list[str]:
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if found is None:
            return []
        names = [name for name, p in self._step.named_parameters() if p.requires_grad]
        return [names[int(index)].removeprefix("module.") for index in found[1].split()]


def check_same_model(module: torch.nn.Module) -> None:
    """Compare names, shapes, types and `requires_grad` of all tensors over the ranks.

    Raises:
        ModelMismatchError: They differ; the first tensor that does is named.
    """
    mine = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
    for rank, theirs in enumerate(dist.gather_objects(mine)):
        if theirs == mine:
            continue
        for here, there in zip([*mine, None], [*theirs, None], strict=False):
            if here != there:
                raise ModelMismatchError(
                    f"Rank {dist.rank()} has {_describe(here)} where rank {rank} has "
                    f"{_describe(there)}.",
                    "DDP needs the same model on all ranks.",
                    "Do not let the model depend on the rank or on unseeded randomness.",
                )


def _describe(entry: list[Any] | None) -> str:
    if entry is None:
        return "no further tensor"
    name, shape, dtype, requires_grad = entry
    return f"{name} {tuple(shape)} {dtype}{'' if requires_grad else ' (no gradient)'}"


def _unused_error(names: list[str]) -> UnusedParametersError:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return UnusedParametersError(
        f"{len(names)} parameters got no gradient: {shown}.",
        "DDP waits for the gradient of every parameter.",
        "Freeze them (requires_grad_(False)), use them in the loss, or give the strategy "
        "find_unused_parameters=True.",
    )


def _nearest(total: float) -> float:
    """Return the whole number that averaging over ranks may have rounded off, if there is one."""
    whole = round(total)
    return float(whole) if abs(total - whole) <= 1e-6 * max(1.0, abs(total)) else total
