"""Gradients of one optimizer at a time, averaged over the ranks.

How ranks stay together: all they exchange begins with a piece of one length, whatever a rank is
about to do. Its head says, summed over the ranks, how many step which optimizer and how many are
through with their `training_step`. A rank that is dry, or whose `training_step` steps nothing,
sends zeros, reads the head and takes the same step with the same gradients; when all ranks are
through, the window ends. The window's totals and the wishes to stop and to save travel in the head.
Two ranks that step different optimizers, or different numbers of times, get an error.

Where all ranks have stepped they know the totals, and do not meet once more only to say that they
are through: the next steps or, before any other collective, a meeting made up for show whether one
has stepped more often.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minitrainer import dist
from minitrainer.errors import StepsMismatchError

# Elements of gradients that travel with the head: up to that size an optimizer needs one
# collective, a larger one a second for the rest. More would make the piece dearer that a rank sends
# to say only that it is through.
_TOGETHER = 4096


class Said(NamedTuple):
    """The head of what a rank sends, and after the exchange its sum over the ranks.

    `weight` is the number of samples behind the gradients that come with it; `through` is 1 for a
    rank whose `training_step` is over (or that is dry), `done` if it has stepped something by
    then; `odd` is 1 in every second window.
    """

    weight: float
    samples: float
    stop: float
    save: float
    through: float
    done: float
    odd: float


class GradientExchange:
    """Means over the ranks of the gradients of one optimizer at a time.

    What travels is one vector: [head, how many ranks step optimizer 0, 1, ..., how many have a
    gradient for each parameter, the gradients], float64 if a parameter is, else float32.

    Args:
        optimizers: The optimizers, the same on all ranks.
        device: Where their parameters are.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        dtypes = {parameter.dtype for o in optimizers for parameter in parameters_of(o)}
        self._zeros = torch.zeros(
            (), device=device, dtype=torch.float64 if torch.float64 in dtypes else torch.float32
        )
        self._head = len(Said._fields) + len(optimizers)
        longest = max(_length(parameters_of(optimizer)) for optimizer in optimizers)
        self._first = self._head + min(longest, _TOGETHER)

    @torch.no_grad()
    def meet(self, said: Said, index: int | None) -> tuple[Said, int | None]:
        """Meet all ranks; then the gradients of the optimizer that they step are the mean ones.

        Args:
            said: The head.
            index: The optimizer that this rank steps, None if it is through.

        Returns:
            The sum of the heads, and the optimizer that ranks step; None if all are through.

        Raises:
            StepsMismatchError: The ranks are not at the same step.
        """
        head = [*said, *(float(index == other) for other in range(len(self._optimizers)))]
        vector = self._packed(head, index, said.weight)
        dist.sum_over_ranks(vector[: self._first])
        sums = vector[: self._head].tolist()
        total, counts = Said(*sums[: len(said)]), sums[len(said) :]
        stepped = _agreed(total, counts)
        if stepped is not None:
            parameters = parameters_of(self._optimizers[stepped])
            end = self._head + _length(parameters)
            if end > self._first:
                vector = self._padded(vector, end)
                dist.sum_over_ranks(vector[self._first :])
            vector = vector[self._head : end]
            self._unpack(vector, parameters, total.weight, follows=index is None)
        return total, stepped

    def _packed(self, head: list[float], index: int | None, weight: float) -> torch.Tensor:
        if index is None:
            return self._padded(self._zeros.new_tensor(head), self._first)
        parameters = parameters_of(self._optimizers[index])
        present = [float(parameter.grad is not None) for parameter in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        vector = torch.cat([self._zeros.new_tensor([*head, *present]), *map(_flat, gradients)])
        vector[self._head + len(present) :] *= weight
        return self._padded(vector, self._first)

    def _padded(self, vector: torch.Tensor, length: int) -> torch.Tensor:
        missing = length - len(vector)
        return torch.cat([vector, self._zeros.expand(missing)]) if missing > 0 else vector

    def _unpack(
        self,
        vector: torch.Tensor,
        parameters: list[torch.nn.Parameter],
        weight: float,
        *,
        follows: bool,
    ) -> None:
        present, gradients = vector.tensor_split([len(parameters)])
        gradients /= weight
        means = gradients.split([parameter.numel() for parameter in parameters])
        own: list[torch.Tensor] = []
        own_means: list[torch.Tensor] = []
        missing = []
        for parameter, mean in zip(parameters, means, strict=True):
            if follows or parameter.grad is None:
                missing.append((parameter, mean))
            else:
                own.append(parameter.grad)
                own_means.append(mean.view_as(parameter))
        if own:
            torch._foreach_copy_(own, own_means)
        if missing:
            elsewhere = dict(zip(map(id, parameters), present.tolist(), strict=True))
            for parameter, mean in missing:
                there = elsewhere[id(parameter)] > 0
                parameter.grad = mean.view_as(parameter).to(parameter, copy=True) if there else None


def _agreed(total: Said, counts: list[float]) -> int | None:
    """Return the optimizer that ranks step, None if all are through."""
    stepped = [index for index, count in enumerate(counts) if count > 0]
    apart = total.odd not in (0, dist.world_size())
    if len(stepped) <= 1 and not (stepped and total.done) and not apart:
        return stepped[0] if stepped else None
    steps = ", ".join(f"{counts[index]:.0f} step optimizer {index}" for index in stepped)
    where = " They are in different batches." if apart else ""
    raise StepsMismatchError(
        f"Of {dist.world_size()} ranks {steps}, {total.through:.0f} are through.{where}",
        "All ranks have to step the same optimizers in the same order, or none at all.",
        "Decide by batch_idx or by a value that is equal on all ranks, not by this rank's loss.",
    )


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _length(parameters: list[torch.nn.Parameter]) -> int:
    return len(parameters) + sum(parameter.numel() for parameter in parameters)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)
