"""The first recipe's module and data: 1,797 handwritten digits of 8x8 pixels.

Data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, CC BY 4.0 (see README.md beside this file).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import minitrainer as mt

Batch = tuple[torch.Tensor, torch.Tensor]


class DigitsNet(mt.Module):
    """A small convolutional network.

    Args:
        width: Channels of the first convolution; the second has twice as many.
        lr: The highest learning rate of the one-cycle schedule.
        norm: Put batch norm behind each convolution.
    """

    def __init__(self, *, width: int = 16, lr: float = 0.01, norm: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            *_convolution(1, width, norm=norm),
            nn.MaxPool2d(2),
            *_convolution(width, 2 * width, norm=norm),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, 10], of images, [batch, 1, 8, 8]."""
        logits: torch.Tensor = self.layers(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the mean cross entropy of the batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy; the trainer weights both by the number of samples."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        # In double precision, so that the mean over all batches and ranks is exactly k/297.
        self.log("val_acc", (logits.argmax(dim=1) == labels).double().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return AdamW with a one-cycle schedule over all steps of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.total_steps
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Digits(mt.DataModule):
    """The digits: 1,500 to train and 297 to validate, always the same ones.

    Args:
        batch_size: Images per rank and micro-batch.
    """

    def __init__(self, *, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images, scaled to 0..1, and share them out."""
        import numpy as np  # only for its file format and for an order that never changes

        with np.load(Path(__file__).with_name("digits.npz")) as file:
            images = torch.from_numpy(file["images"]).unsqueeze(1) / 16
            labels = torch.from_numpy(file["labels"]).long()
        order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
        train, val = order[:1500], order[1500:]
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val_set, self.batch_size)


def _convolution(inputs: int, outputs: int, *, norm: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=not norm)
    return [convolution, *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]
