"""Performance: settings that cost or do nothing."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
import torch
from torch.distributed.run import config_from_args, parse_args
from torch.utils.data import DataLoader

from tests.pitfalls.plain import codes
from tests.ranks import run_ranks
from tests.toys import Values


def test_plain_torchrun_gives_each_rank_one_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F20: with several ranks and OMP_NUM_THREADS unset, it becomes 1 on any number of cores."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    with caplog.at_level(logging.WARNING):
        config_from_args(parse_args(["--nproc-per-node=2", "train.py"]))
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "F20" in codes(caplog.text)


def test_plain_pinning_without_a_gpu_warns() -> None:
    """F21: pinned memory is of no use there, and torch says so in every epoch."""
    if torch.cuda.device_count() > 0:
        pytest.skip("there is a GPU, so memory is pinned")
    data = DataLoader(Values([1.0]), pin_memory=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(data)
    assert "F21" in codes(str(caught[0].message))


def test_plain_loaders_count_their_own_workers_only() -> None:
    """F23: one worker too many for the cores is warned of; twice as many on two ranks are not."""
    cores = len(os.sched_getaffinity(0))
    with pytest.warns(UserWarning, match="This DataLoader will create") as caught:
        DataLoader(Values([1.0]), num_workers=cores + 1)
    assert "F23" in codes(str(caught[0].message))

    def on_rank() -> int:
        with warnings.catch_warnings(record=True) as here:
            warnings.simplefilter("always")
            DataLoader(Values([1.0]), num_workers=cores)
        return len(here)

    assert run_ranks(on_rank, world_size=2) == [0, 0]
