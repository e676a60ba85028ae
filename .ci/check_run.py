"""Check what the main job of the README left behind in the newest run directory."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

VALIDATION_IMAGES = 297


def main() -> None:
    run_dir = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
    for name in ("recipe.yaml", "metrics.csv", "checkpoints"):
        if not (run_dir / name).exists():
            sys.exit(f"{run_dir} has no {name}")
    if not list((run_dir / "checkpoints").iterdir()):
        sys.exit(f"{run_dir} has no checkpoint")
    with (run_dir / "metrics.csv").open() as file:
        accuracies = [float(row["val_acc"]) for row in csv.DictReader(file) if row.get("val_acc")]
    accuracy = accuracies[-1]
    correct = accuracy * VALIDATION_IMAGES
    if abs(correct - round(correct)) > 1e-9:
        sys.exit(f"{accuracy} is no number of {VALIDATION_IMAGES} images")
    if accuracy < 0.98:
        sys.exit(f"the validation accuracy is {accuracy}, not 0.98")
    print(f"{run_dir}: {round(correct)} of {VALIDATION_IMAGES} right, {accuracy:.4f}")


if __name__ == "__main__":
    main()
