"""Batch norm whose statistics are those of the global batch, on CPU and CUDA alike.

Pitfall: each rank normalizes by the few rows of its own, so the result depends on the number of
ranks and the running statistics drift apart; `torch.nn.SyncBatchNorm` raises on the CPU, and hangs
as soon as one rank skips a batch or has none.
Fix: layers stay the objects they are and take another class for the run; their sums are added up
over the ranks, and a rank without a batch follows what the others send until they are through.

How ranks stay together: in a training step all that layers exchange travels in vectors of one
length, one per layer in forward and one in backward. The head of a vector says which layer it
belongs to, so a rank that has nothing to contribute sends zeros, reads the head of the sum and
knows what the others do; it needs no batch, and no knowledge of the model's control flow. A rank
whose backward is done sends zeros once; when nobody sends anything else, the step is over. Two
ranks at different layers are an error, and not a mixture of both layers' sums.

The vectors have a process group of their own, because a following rank reduces its gradients
after all of them, and the others in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from minitrainer import dist
from minitrainer.errors import BatchNormError, LayerOrderError
from minitrainer.module import Module

# How many ranks take part in a vector, the sum of the codes of their layers, and that of squares.
_HEAD = 3


@contextmanager
def synced_batch_norm(
    module: Module, device: torch.device, *, everywhere: bool, timeout: float
) -> Iterator[None]:
    """Make the batch norm layers of a module work on the global batch, as long as it lasts.

    Forward, gradients and running statistics are those of one process that has the micro-batches
    of all ranks as one batch, also where ranks have different numbers of rows, or none. Rows of a
    rank whose `training_step` returns None have been counted by then, as constants. A single row
    in all has variance 0; one process would raise. Outside of `training_step`, in eval mode and
    on one process the layers are plain ones, and nothing is exchanged.

    Parameters, buffers, hooks and keys stay as they are, and so does `isinstance`, except for
    `torch.nn.SyncBatchNorm`. A copy of a layer (of an average of the weights, say) is a plain one.
    Gradient checkpointing updates the running statistics twice, as it does with plain layers.

    Args:
        module: The user's module, the same on all ranks.
        device: Where its tensors will be.
        everywhere: Take all batch norm layers. If false, only those that are
            `torch.nn.SyncBatchNorm`, on whose users the pitfall is open.
        timeout: Seconds after which an exchange gives up.

    Raises:
        BatchNormError: A layer computes something of its own, or is not ready.
    """
    if dist.world_size() == 1:
        yield
        return
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm if everywhere else torch.nn.SyncBatchNorm)
    }
    for name, layer in layers.items():
        _check(name, layer)
    # If the models differ, the strategy will say so: no rank waits here for a group meanwhile.
    if not dist.any_rank(bool(layers)):
        yield
        return
    with dist.second_group(timeout=timeout) as group:
        exchange = StatisticsExchange(layers, device, group)
        kinds = [(layer, type(layer)) for layer in layers.values()]
        for layer, kind in kinds:
            layer.__class__ = _synced(kind, exchange)
        module._exchange = exchange
        try:
            yield
        finally:
            module._exchange = None
            for layer, kind in kinds:
                layer.__class__ = kind


class StatisticsExchange:
    """What the batch norm layers of one module exchange; satisfies `protocols.Exchange`.

    Args:
        layers: The layers by name, in the same order on all ranks.
        device: Where their tensors are.
        group: The process group that nothing else uses.
    """

    def __init__(
        self, layers: Mapping[str, _BatchNorm], device: torch.device, group: dist.Group
    ) -> None:
        self.is_open = False
        self._names = list(layers)
        self._layers = list(layers.values())
        self._codes = {id(layer): code for code, layer in enumerate(self._layers, start=1)}
        self._device = device
        self._group = group
        self._length = (
            _HEAD + 1 + 2 * max((layer.num_features for layer in self._layers), default=0)
        )
        self._heads: dict[int, torch.Tensor] = {}
        self._unchecked: list[tuple[int, torch.Tensor]] = []

    def open(self) -> None:
        """Let the layers exchange: a training step begins, and this rank has a batch."""
        self.is_open = True

    def close_after_backward(self) -> None:
        """Close when the backward that runs is done; called in it, before any reduction ends.

        Callbacks of the engine run in the order in which they were asked for, so this one comes
        before that of DDP, which waits for the gradients of the ranks that follow.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.close)

    def close(self) -> None:
        """Say to the other ranks that this one is through; nothing is exchanged from here on."""
        self.is_open = False
        self._exchanged(0, [])

    @torch.no_grad()
    def follow(self) -> None:
        """Contribute nothing until the others are through; keep running statistics equal.

        Raises:
            LayerOrderError: The others are at different layers.
        """
        self.is_open = False
        while True:
            vector = self._add_up(0)
            taking_part, codes, squares = vector[:_HEAD].tolist()
            if taking_part == 0:
                return
            code = codes / taking_part
            if squares != code * codes:
                raise _disorder("the other ranks were at different batch norm layers")
            if code > 0:
                layer = self._layers[int(code) - 1]
                _track(layer, _moments(vector[_HEAD:], layer.num_features))

    def check(self) -> None:
        """Read the heads of what was exchanged, where that did not happen at once (on CUDA).

        Raises:
            LayerOrderError: Ranks were at different layers.
        """
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        heads = torch.stack([head for _, head in unchecked]).tolist()
        for (code, _), (taking_part, codes, squares) in zip(unchecked, heads, strict=True):
            if codes != code * taking_part or squares != code * codes:
                raise _disorder(f"this rank was {self._place(code)} when another one was not")

    def add_up_moments(self, layer: _BatchNorm, parts: Sequence[torch.Tensor | float]) -> Moments:
        """Return mean, variance and count over all ranks, from [count, sums, sums of squares]."""
        vector = self._exchanged(self._codes[id(layer)], parts)
        return _moments(vector[_HEAD:], layer.num_features)

    def add_up_gradients(
        self, layer: _BatchNorm, parts: Sequence[torch.Tensor | float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two vectors of a backward, added up over all ranks."""
        vector = self._exchanged(-self._codes[id(layer)], parts)
        features = layer.num_features
        return vector[_HEAD : _HEAD + features], vector[_HEAD + features : _HEAD + 2 * features]

    def _exchanged(self, code: int, parts: Sequence[torch.Tensor | float]) -> torch.Tensor:
        vector = self._add_up(code, parts)
        self._unchecked.append((code, vector[:_HEAD].clone()))
        if self._device.type == "cpu":
            self.check()
        return vector

    def _add_up(self, code: int, parts: Sequence[torch.Tensor | float] = ()) -> torch.Tensor:
        """Add up one vector over the ranks: code + of a layer in forward, - in backward, or 0."""
        vector = torch.zeros(self._length, dtype=torch.float64, device=self._device)
        if code != 0:
            if code not in self._heads:
                self._heads[code] = vector.new_tensor([1, code, code * code])
            vector[:_HEAD] = self._heads[code]
        start = _HEAD
        for part in parts:
            size = part.numel() if isinstance(part, torch.Tensor) else 1
            vector[start : start + size] = part
            start += size
        dist.sum_over_ranks(vector, self._group)
        return vector

    def _place(self, code: int) -> str:
        if code == 0:
            return "through with its step"
        return f"in the {'forward' if code > 0 else 'backward'} of {self._names[abs(code) - 1]}"


class Moments(NamedTuple):
    """Of a global batch, per feature, in float64: mean, variance (biased), number of values."""

    mean: torch.Tensor
    variance: torch.Tensor
    number: torch.Tensor


class _Synced(_BatchNorm):
    """A batch norm layer for the time of a run."""

    _exchange: ClassVar[StatisticsExchange]
    _plain: ClassVar[type[_BatchNorm]]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and self._exchange.is_open):
            return super().forward(input)
        check_dimensions: Any = self._check_input_dim
        check_dimensions(input)
        normalized: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, self)
        return normalized

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the plain layer: a copy has no part in the exchange."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new, (self._plain,), *reduced[2:])


def _new(kind: type[_BatchNorm]) -> _BatchNorm:
    return kind.__new__(kind)


class _Normalize(torch.autograd.Function):
    """Batch norm by its definition (Ioffe and Szegedy 2015, algorithm 1), sums over all ranks.

    The backward is that of `torch.nn.BatchNorm`: with n the normalized values and m means over
    the global batch, dx = weight / deviation * (dy - m(dy) - n * m(dy * n)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: _Synced,
    ) -> torch.Tensor:
        wide = _widened(x)
        moments = layer._exchange.add_up_moments(layer, _own_sums(wide))
        _track(layer, moments)
        mean = _per_feature(moments.mean, wide)
        inverse = _per_feature((moments.variance + layer.eps).rsqrt(), wide)
        ctx.layer = layer
        ctx.save_for_backward(x, weight, mean, inverse, moments.number)
        normalized = (wide - mean).mul_(_scale(inverse, weight))
        if bias is not None:
            normalized += _per_feature(bias, wide)
        return normalized.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        layer: _Synced = ctx.layer
        dy = _widened(grads[0])
        normalized = (_widened(x) - mean) * inverse
        axes = _all_but_features(dy)
        own = [dy.sum(axes), (dy * normalized).sum(axes)]
        dx = None
        if ctx.needs_input_grad[0]:
            summed = layer._exchange.add_up_gradients(layer, own)
            mean_dy, mean_dy_n = (_per_feature(total / count, dy) for total in summed)
            dx = (dy - mean_dy).addcmul_(normalized, mean_dy_n, value=-1)
            dx = dx.mul_(_scale(inverse, weight)).to(x.dtype)
        # Not added up: DDP does that, as for all parameters.
        d_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = own[0].to(layer.bias.dtype) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None


def _own_sums(x: torch.Tensor) -> list[torch.Tensor | float]:
    """Return [number of values, their sum, the sum of their squares], per feature, in float64.

    Formed from a mean and a variance: a sum of squares in float32 would lose what they differ by.
    """
    count = x.numel() // x.shape[1]
    if count == 0:
        return []
    variance, mean = torch.var_mean(x, _all_but_features(x), correction=0)
    mean = mean.double()
    return [float(count), mean * count, (variance.double() + mean.square()) * count]


def _moments(sums: torch.Tensor, features: int) -> Moments:
    count = sums[0].clamp(min=1)
    mean, mean_square = sums[1 : 1 + 2 * features].split(features)
    mean, mean_square = mean / count, mean_square / count
    return Moments(mean, (mean_square - mean.square()).clamp(min=0), sums[0])


def _track(layer: _BatchNorm, moments: Moments) -> None:
    """Update the running statistics as torch does: unbiased variance, cumulative without momentum.

    Nothing here is read from the device.
    """
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    count = moments.number
    weight = count.clamp(max=1)  # no rows at all say nothing
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if layer.momentum is not None:
        weight = weight * layer.momentum
    elif layer.num_batches_tracked is not None:
        weight = weight / layer.num_batches_tracked
    unbiased = moments.variance * (count / (count - 1).clamp(min=1))
    for running, new in ((layer.running_mean, moments.mean), (layer.running_var, unbiased)):
        running.copy_(running.double().lerp(new, weight))


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Return the values in float32 at least: halves of autocast are too short for sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _all_but_features(x: torch.Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _per_feature(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shape one value per feature so that it meets axis 1."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _scale(inverse: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return inverse if weight is None else inverse * _per_feature(weight, inverse)


def _synced(kind: type[_BatchNorm], exchange: StatisticsExchange) -> type[_BatchNorm]:
    # DDP refuses everything that is a torch.nn.SyncBatchNorm on the CPU.
    bases = (_Synced,) if kind is torch.nn.SyncBatchNorm else (_Synced, kind)
    own = {"_exchange": exchange, "_plain": kind, "_check_input_dim": kind._check_input_dim}
    return type(f"Synced{kind.__name__}", bases, {"__module__": __name__, **own})


def _check(name: str, layer: _BatchNorm) -> None:
    kind = type(layer)
    title = f"Batch norm layer {name or '(the module itself)'} ({kind.__name__})"
    if isinstance(layer, LazyModuleMixin):
        raise BatchNormError(
            f"{title} does not know its size yet.",
            "Lazy layers take it from their first batch, which differs between ranks.",
            "Run one batch through the module before fit, or give num_features.",
        )
    if kind is torch.nn.SyncBatchNorm:
        if layer.process_group is not None:
            raise BatchNormError(
                f"{title} has a process group of its own.",
                "Its statistics are taken over all ranks of the run.",
                "Leave out process_group.",
            )
        return
    if kind.forward is not _BatchNorm.forward or "forward" in vars(layer):
        raise BatchNormError(
            f"{title} has a forward of its own.",
            "Only what torch's batch norm computes can be taken over all ranks.",
            "Use torch.nn.BatchNorm1d, 2d or 3d, or sync_batchnorm=False.",
        )


def _disorder(what: str) -> LayerOrderError:
    return LayerOrderError(
        f"On rank {dist.rank()}: {what}.",
        "Synced batch norm layers wait for their copies on all ranks.",
        "Run the same layers in the same order on all ranks, or use sync_batchnorm=False.",
    )
