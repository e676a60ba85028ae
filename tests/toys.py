"""The toys of the cases: a one-parameter regression and a recording module, and quiet trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import minitrainer as mt


class Values(Dataset[torch.Tensor]):
    """Item i is values[i], float32."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = torch.tensor(list(values), dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


def loader(values: Sequence[float], batch_size: int = 1, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Values(values), batch_size=batch_size, **settings)


class Lin(mt.Module):
    """LIN: one scalar parameter w=0, loss = (w * x).mean(), so a step does w -= lr * mean(x)."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.lr = lr

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Idx(Lin):
    """IDX: records (epoch, batch_idx, items, rank, global_step) of every training_step."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(lr)
        self.seen: list[tuple[int, int, list[int], int, int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen.append(
            (
                self.current_epoch,
                batch_idx,
                [int(item) for item in batch],
                self.global_rank,
                self.global_step,
            )
        )
        return super().training_step(batch, batch_idx)

    def items(self, epoch: int | None = None) -> list[int]:
        return [
            item for entry in self.seen for item in entry[2] if epoch is None or entry[0] == epoch
        ]


class Rows:
    """A logger that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def start(self, run_dir: Any, *, resume_step: int | None) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparameters(self, values: Any) -> None:
        pass

    def finish(self) -> None:
        pass

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def column(self, name: str) -> list[float]:
        return [row[name] for _, row in self.rows if name in row]


class Each(mt.Callback):
    """Calls a function after each optimizer step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_step_end(self, trainer: Any, module: Any, result: Any) -> None:
        self.function(trainer, module, result)


def quiet(**settings: Any) -> mt.Trainer:
    """A trainer that writes and shows nothing unless told to."""
    defaults = {
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "loggers": [],
        "accelerator": "cpu",
    }
    return mt.Trainer(**{**defaults, **settings})
