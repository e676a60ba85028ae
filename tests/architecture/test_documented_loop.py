"""The loop in `Callback`'s docstring is the loop that runs."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import minitrainer as mt

EPOCHS, TRAIN_BATCHES, WINDOW, VAL_BATCHES = 2, 5, 2, 3
WINDOWS = -(-TRAIN_BATCHES // WINDOW)
VALIDATE_EVERY = 2  # optimizer steps, counted through the epochs


@dataclass
class Line:
    """A line of the pseudocode and the lines that are indented under it."""

    text: str
    body: list[Line] = field(default_factory=list)


def parse(docstring: str) -> list[Line]:
    """Return the indented block of the docstring as a tree."""
    block = docstring.split("The loop, in running order", 1)[1].split("\n\n")[1]
    root = Line("root")
    path = [(-1, root)]
    for raw in textwrap.dedent(block).splitlines():
        depth = len(raw) - len(raw.lstrip())
        line = Line(raw.strip())
        while path[-1][0] >= depth:
            path.pop()
        path[-1][1].body.append(line)
        path.append((depth, line))
    return root.body


class Reader:
    """Goes through the pseudocode as a reader would, with the numbers of the small run below."""

    def __init__(self) -> None:
        self.window = 0
        self.steps = 0
        self.times: dict[str, Callable[[], int]] = {
            "for epoch:": lambda: EPOCHS,
            "for window of micro-batches:": lambda: WINDOWS,
            "for micro-batch but the last:": lambda: self._window_length() - 1,
            "for batch:": lambda: VAL_BATCHES,
        }
        self.conditions: dict[str, Callable[[], bool]] = {
            "if validation is due:": lambda: self.steps % VALIDATE_EVERY == 0,
            "if the epoch goes on:": lambda: self.window < WINDOWS - 1,
        }
        self.actions = {
            "training_step, backward": ["training_step", "backward"],
            "[unscale, clip] optimizer step, scheduler step": ["optimizer step", "scheduler step"],
            "validation_step": ["validation_step"],
        }

    def read(self, lines: list[Line]) -> Iterator[str]:
        """Yield the events in the order in which the text promises them."""
        for line in lines:
            if line.text in self.times:
                for index in range(self.times[line.text]()):
                    if line.text == "for window of micro-batches:":
                        self.window = index
                    yield from self.read(line.body)
            elif line.text in self.conditions:
                if self.conditions[line.text]():
                    yield from self.read(line.body)
            elif line.text in self.actions:
                for action in self.actions[line.text]:
                    self.steps += action == "optimizer step"
                    yield action
            else:
                assert line.text.startswith("on_"), f"nothing is known of {line.text!r}"
                assert not line.body
                yield line.text

    def _window_length(self) -> int:
        return min(WINDOW, TRAIN_BATCHES - self.window * WINDOW)


EVENTS: list[str] = []


def _record(hook: str) -> Callable[..., None]:
    def record(*args: Any, **kwargs: Any) -> None:
        EVENTS.append(hook)

    return record


HOOKS = [name for name in vars(mt.Callback) if name.startswith("on_")]
Recorder = type("Recorder", (mt.Callback,), {hook: _record(hook) for hook in HOOKS})


class Recorded(mt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        EVENTS.append("training_step")
        loss: torch.Tensor = self.layer(batch[0]).mean()
        loss.register_hook(lambda grad: EVENTS.append("backward"))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        EVENTS.append("validation_step")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        optimizer.register_step_post_hook(lambda *_: EVENTS.append("optimizer step"))
        step = scheduler.step
        scheduler.step = lambda *args: (EVENTS.append("scheduler step"), step(*args))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def _batches(number: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(number, 1)), batch_size=1)


def test_hooks_run_in_the_documented_order() -> None:
    EVENTS.clear()
    mt.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate=WINDOW,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        callbacks=[Recorder()],
        loggers=[],
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Recorded(), _batches(TRAIN_BATCHES), _batches(VAL_BATCHES))
    documented = list(Reader().read(parse(inspect.getdoc(mt.Callback) or "")))
    assert documented.count("optimizer step") == EPOCHS * WINDOWS
    assert documented.count("on_validation_end") == EPOCHS * WINDOWS // VALIDATE_EVERY
    assert documented == EVENTS


def test_each_hook_of_a_fit_stands_in_the_text() -> None:
    documented = set(Reader().read(parse(inspect.getdoc(mt.Callback) or "")))
    elsewhere = {name for name in HOOKS if name.startswith(("on_test_", "on_predict_"))}
    assert set(HOOKS) - elsewhere - {"on_exception"} == {
        name for name in documented if name.startswith("on_")
    }
