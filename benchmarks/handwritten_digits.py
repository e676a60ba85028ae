"""The digits recipe as a careful person writes it by hand: plain PyTorch, DDP, one file.

    python benchmarks/handwritten_digits.py
    torchrun --nproc-per-node=2 benchmarks/handwritten_digits.py

The same model, data, order of work and files as `recipes/digits.yaml`: validation and a whole
checkpoint after each epoch, every validation image counted once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DIGITS = Path(__file__).resolve().parent.parent / "recipes" / "digits.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/handwritten"))
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size > 1:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    try:
        train(args, rank, world_size, device)
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    torch.manual_seed(args.seed)
    train_set, val_set = load_digits()
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    # Every validation image once: a DistributedSampler would repeat some to make shares equal.
    share = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(share, args.batch_size)

    net = make_net().to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True) if world_size > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(train_loader)
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        val_loss, correct = validate(net, val_loader, world_size, device)
        if rank == 0:
            accuracy = correct / len(val_set)
            print(f"epoch {epoch}  val_loss {val_loss / len(val_set):.4f}  val_acc {accuracy:.4f}")
            save(args.folder, epoch, net, optimizer, scheduler)


@torch.inference_mode()
def validate(
    net: nn.Module, loader: DataLoader, world_size: int, device: torch.device
) -> tuple[float, float]:
    """Return the sums of the losses and of the right answers over all ranks."""
    if world_size > 1:  # each rank has its own running statistics of batch norm; take rank 0's
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)
    net.eval()
    sums = torch.zeros(2, dtype=torch.double, device=device)
    for images, labels in loader:
        logits, labels = net(images.to(device)), labels.to(device)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
    if world_size > 1:
        dist.all_reduce(sums)
    loss, correct = sums.tolist()
    return loss, correct


def save(
    folder: Path,
    epoch: int,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Write the checkpoint whole: to a file beside it first, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = {
        "epoch": epoch,
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(checkpoint, folder / "last.tmp")
    with (folder / "last.tmp").open("rb") as file:
        os.fsync(file.fileno())
    (folder / "last.tmp").replace(folder / "last.ckpt")


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    with np.load(DIGITS) as file:
        images = torch.from_numpy(file["images"]).unsqueeze(1) / 16
        labels = torch.from_numpy(file["labels"]).long()
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    train, val = order[:1500], order[1500:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def make_net(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        *convolution(1, width),
        nn.MaxPool2d(2),
        *convolution(width, 2 * width),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 10),
    )


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


if __name__ == "__main__":
    main()
