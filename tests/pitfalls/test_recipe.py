"""Recipe: what YAML and a dictionary of settings let pass."""

from __future__ import annotations

import logging
import re
from typing import Any

import yaml
from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler

from tests.ranks import run_ranks
from tests.toys import Lin, loader, quiet


def test_plain_settings_take_a_misspelt_key() -> None:
    """R02: the default stays in effect, and nobody hears of the typing error."""
    settings = OmegaConf.merge({"max_epochs": 1}, OmegaConf.from_dotlist(["max_epoch=3"]))
    assert settings.max_epochs == 1


def test_plain_yaml_reads_other_numbers() -> None:
    """R20: 1e-4 is a string, 010 is 8 and 1:30 is 90."""
    settings = yaml.safe_load("{lr: 1e-4, seed: 010, time: 1:30}")
    assert settings == {"lr": "1e-4", "seed": 8, "time": 90}


def test_the_global_batch_is_said() -> None:
    """R21: more ranks take fewer, larger steps with the same learning rate; the ledger says so."""
    per_rank = [len(DistributedSampler(range(16), ranks, 0)) // 4 for ranks in (1, 2)]
    assert per_rank == [4, 2]  # optimizer steps of an epoch, at 4 samples per rank

    def rank() -> tuple[str, int]:
        lines: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        logging.getLogger("minitrainer").addHandler(Keep())
        trainer = quiet()
        trainer.fit(Lin(), loader([1.0] * 16, batch_size=4))
        (line,) = [line for line in lines if line.startswith("global batch")] or [""]
        return line, trainer.global_step

    def said(results: list[Any]) -> list[str]:
        return [str(found[1]) for line, _ in results if (found := re.search(r"= (\d+)", line))]

    assert said([rank()]) == ["4"]
    results = run_ranks(rank)
    assert said(results) == ["8"]  # by rank 0 only
    assert [steps for _, steps in results] == [2, 2]
