from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from minitrainer.data import (
    collect_rng_states,
    derive_seed,
    preserved_rng,
    restore_rng_states,
    seed_everything,
)
from minitrainer.data.seeding import PrivateRng
from minitrainer.errors import SettingError
from tests.data.shares import global_states

CPU = torch.device("cpu")


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]


def test_derived_seeds_are_the_same_everywhere() -> None:
    # Written down, because another machine and another version must find the same.
    assert derive_seed(0, "order", 0) == 8407243675484231436
    assert derive_seed(7, "workers", 1, 3) == 7891159742278750973


def test_derived_seeds_are_distinct_and_have_63_bits() -> None:
    seeds = [
        derive_seed(seed, name, *numbers)
        for seed in (0, 1)
        for name in ("order", "rank")
        for numbers in [(0,), (1,), (0, 1), (1, 0), (11,), (1, 1)]
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**60


def test_seed_everything_seeds_all_three() -> None:
    seed_everything(3)
    first = draws()
    assert draws() != first
    seed_everything(3)
    assert draws() == first
    seed_everything(derive_seed(3, "rank", 1))
    assert draws() != first


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.5, "7"])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(SettingError, match="seed"):
        seed_everything(seed)


def test_states_are_plain_json_and_bring_the_draws_back() -> None:
    seed_everything(1)
    random.gauss(0, 1)  # leaves a second number waiting inside
    np.random.randn()
    states = json.loads(json.dumps(collect_rng_states(CPU)))
    first = [draws(), random.gauss(0, 1), np.random.randn()]
    seed_everything(2)
    restore_rng_states(states, CPU)
    assert [draws(), random.gauss(0, 1), np.random.randn()] == first


def test_states_load_without_pickled_code(tmp_path: Any) -> None:
    torch.save({"rng": collect_rng_states(CPU)}, tmp_path / "states.pt")
    loaded = torch.load(tmp_path / "states.pt", weights_only=True)["rng"]
    first = draws()
    restore_rng_states(loaded, CPU)
    assert draws() == first


def test_preserved_rng_restores_all_three_even_after_an_exception() -> None:
    before = global_states()
    with pytest.raises(ZeroDivisionError), preserved_rng():
        assert draws()[2] / 0
    assert global_states() == before


def test_a_private_stream_goes_on_where_it_was_left() -> None:
    with PrivateRng(5):
        whole = [draws(), draws()]
    rng = PrivateRng(5)
    before = global_states()
    parts = []
    for _ in range(2):
        with rng:
            parts.append(draws())
        assert global_states() == before
        draws()
        before = global_states()
    assert parts == whole
