"""Training: what a hand-written loop gets wrong with windows, clipping, metrics and modes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from minitrainer.errors import StepOutputError
from tests.pitfalls.plain import Weight, plain_group, wrapped_weight
from tests.ranks import run_ranks
from tests.toys import Lin, loader, quiet


def test_plain_output_comes_from_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """T20: one line of the script, one line per rank on the screen."""

    def rank() -> None:
        print("epoch 0: loss 1.0")
        sys.stdout.flush()

    run_ranks(rank)
    assert capfd.readouterr().out.count("epoch 0") == 2


def accumulate(xs: list[float], size: int, *, epochs: int = 1) -> tuple[float, bool]:
    """Train as guides do, with `% size`; return w, and whether gradients are left over."""
    module = Weight()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(epochs):
        for index, x in enumerate(xs):
            (module(torch.tensor([x])) / size).backward()
            if (index + 1) % size == 0:
                optimizer.step()
                optimizer.zero_grad()
    return module.w.item(), module.w.grad is not None


def test_plain_counter_drops_the_last_window_and_leaks_it() -> None:
    """T21: x = 1..6, accumulate 4: 5 and 6 are lost, or found again in the next epoch."""
    xs = [1.0, 2, 3, 4, 5, 6]
    assert accumulate(xs, 4) == (-2.5, True)  # and not -2.5 - 5.5
    leaked, _ = accumulate(xs, 4, epochs=2)
    assert leaked == -2.5 - (2.5 + 11 / 4)  # and not 2 * -8.0


def test_plain_mean_of_means_is_not_the_mean_over_tokens() -> None:
    """T22: 1 token of 4 and 3 tokens of 0: the mean is 1.0, that of the two means 2.0."""
    module = Weight()
    for tokens in ([4.0], [0.0, 0.0, 0.0]):
        (module(torch.tensor(tokens)) / 2).backward()
    assert module.w.grad.item() == 2.0


def test_plain_clipping_in_each_micro_batch() -> None:
    """T23: gradients 3 and -3 make 0 together; clipped to norm 1 on the way they do not."""
    module = Weight()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for x in (3.0, -3.0):
        (module(torch.tensor([x])) / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    assert module.w.item() == pytest.approx(0.5, abs=1e-5)


def test_plain_scheduler_steps_with_each_micro_batch() -> None:
    """T24: lr 1, halved per step; 8 batches, accumulate 4: 1/256, and not 1/4."""
    module = Weight()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for index in range(8):
        module(torch.ones(1)).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
        elif index == 0:
            optimizer.step()  # keeps torch from warning of the wrong order
        scheduler.step()
    assert scheduler.get_last_lr() == [1 / 256]


def graph_size(tensor: torch.Tensor) -> int:
    """Return how many nodes of the autograd graph a tensor keeps alive."""
    todo: list[Any] = [tensor.grad_fn]
    nodes = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo.extend(parent for parent, _ in node.next_functions)
    return len(nodes)


def test_plain_sum_of_losses_keeps_every_graph() -> None:
    """T25: `total += loss` holds one graph per step; emptying a cache frees none of them."""
    module = Weight()
    total = torch.zeros(())
    sizes = []
    for _ in range(3):
        total = total + module(torch.ones(2))
        torch.cuda.empty_cache()
        sizes.append(graph_size(total))
    assert sizes[0] < sizes[1] < sizes[2]


def test_plain_mean_of_batch_means() -> None:
    """T26: ten values in batches of 4: 5.1667, and not 4.5."""
    means = [batch.mean() for batch in torch.arange(10.0).split(4)]
    assert torch.stack(means).mean().item() == pytest.approx(5.1666667)


class Modes(Lin):
    """Has dropout and a layer that the user keeps in eval mode; notes the modes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.BatchNorm1d(1)
        self.modes: list[tuple[str, bool, bool]] = []

    def note(self, stage: str) -> None:
        self.modes.append((stage, self.dropout.training, self.frozen.training))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 0:
            self.frozen.eval()
        self.note("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("validation")


def test_modes_are_those_of_the_stage() -> None:
    """T27: `train()` after a validation also wakes layers that were frozen on purpose."""
    module = Modes()
    module.frozen.eval()
    module.eval()
    assert module.dropout(torch.ones(100)).sum() == 100
    module.train()
    assert module.frozen.training  # plain torch: no longer frozen

    module = Modes()
    quiet(max_epochs=2).fit(module, loader([1.0]), loader([1.0]))
    assert module.modes == [
        ("train", True, False),
        ("validation", False, False),
        ("train", True, False),
        ("validation", False, False),
    ]


@pytest.mark.parametrize("returned", [torch.ones(4), 1.0, {"los": torch.ones(())}])
def test_what_is_no_loss_is_refused(returned: Any) -> None:
    """T02: said where it is returned, and not by backward."""

    class Wrong(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    with pytest.raises(StepOutputError, match="T02"):
        quiet().fit(Wrong(), loader([1.0]))


def test_a_loader_without_a_step_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """T29: once, and training goes on."""
    module = Lin()
    quiet().fit(module, loader([1.0]), loader([1.0]))
    assert module.w.item() == -1.0
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message[:5] for message in told] == ["[T29]"]


def test_plain_ddp_divides_what_is_no_mean() -> None:
    """T31 and T33: x = 1, 2, 3, 4 on 2 ranks: a sum gives 5 instead of 10, and a mean that is
    divided by the ranks once more 1.25 instead of 2.5."""

    def rank() -> tuple[float, float]:
        with plain_group() as rank:
            gradients = []
            for scale in (2.0, 0.5):  # of a mean: of two samples a sum; by 2 ranks
                module, ddp = wrapped_weight()
                (ddp(torch.tensor([1.0, 2.0]) + 2 * rank) * scale).backward()
                gradients.append(module.w.grad.item())
        return gradients[0], gradients[1]

    assert run_ranks(rank) == [(5.0, 1.25)] * 2


def test_plain_dropout_follows_the_layout() -> None:
    """T32: one batch, and the same in two halves, under the same seed: other masks."""
    torch.manual_seed(0)
    whole = torch.nn.functional.dropout(torch.ones(64))
    halves = []
    for _rank in range(2):
        torch.manual_seed(0)
        halves.append(torch.nn.functional.dropout(torch.ones(32)))
    assert not torch.equal(whole, torch.cat(halves))


def test_plain_value_is_that_of_its_rank() -> None:
    """T34: the mean of 1, 2, 3, 4 is 2.5; rank 0 has 1.5 and prints that."""

    def rank() -> float:
        with plain_group() as rank:
            _, ddp = wrapped_weight()
            x = torch.tensor([1.0, 2.0]) + 2 * rank
            ddp(x).backward()
            return x.mean().item()

    assert run_ranks(rank) == [1.5, 3.5]
