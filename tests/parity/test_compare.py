"""What is rounding and what is a difference."""

from __future__ import annotations

import torch

from minitrainer.parity.compare import Tolerance, compare, parted_metrics, scale_between
from minitrainer.parity.record import Record, WindowRecord

DOUBLE = Tolerance.of(in_double=True)


def record(*gradients: dict[str, list[float]], samples: str = "abc") -> Record:
    return Record(
        [
            WindowRecord(
                sorted(samples), 1.0, {name: torch.tensor(g).double() for name, g in g.items()}
            )
            for g in gradients
        ]
    )


def test_a_gradient_that_is_zero_but_for_rounding_is_judged_by_the_others() -> None:
    """As that of a bias before batch norm, which is noise in every layout."""
    one = record({"w": [1.0, 2.0], "b": [1e-17]})
    other = record({"w": [1.0, 2.0], "b": [-3e-17]})
    assert compare(one, other, DOUBLE).is_clean
    assert not compare(one, record({"w": [1.0, 2.0], "b": [1e-8]}), DOUBLE).is_clean


def test_rounding_of_float32_is_a_difference_in_float64() -> None:
    one, other = record({"w": [1.0, 2.0]}), record({"w": [1.0, 2.00001]})
    assert not compare(one, other, DOUBLE).is_clean
    assert compare(one, other, Tolerance.of(in_double=False)).is_clean


def test_the_first_step_and_the_first_parameter_that_part_are_told() -> None:
    same, b, both = {"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [2.0]}, {"a": [3.0], "b": [3.0]}
    parting = compare(record(same, same, same), record(same, b, both), DOUBLE).gradients
    assert parting is not None
    assert (parting.step, parting.name, parting.count, parting.total) == (1, "b", 1, 2)
    assert parting.size == 1.0


def test_a_parameter_without_gradient_parts_from_one_with_it() -> None:
    parting = compare(record({"a": [1.0], "b": [1.0]}), record({"a": [1.0]}), DOUBLE).gradients
    assert parting is not None
    assert parting.name == "b"


def test_samples_that_are_others_are_counted() -> None:
    parting = compare(record({}), record({}, samples="abb"), DOUBLE).samples
    assert parting is not None
    assert (parting.count, parting.total) == (1, 3)
    shorter = compare(record({}, {}), record({}), DOUBLE).samples
    assert shorter is not None, "a run with fewer steps"


def test_nan_in_both_is_no_difference_and_in_one_it_is() -> None:
    nan = float("nan")
    assert compare(record({"a": [nan, 1.0]}), record({"a": [nan, 1.0]}), DOUBLE).is_clean
    assert not compare(record({"a": [nan, 1.0]}), record({"a": [1.0, 1.0]}), DOUBLE).is_clean
    assert parted_metrics({"x": nan}, {"x": nan}, 1e-6) == {}
    assert set(parted_metrics({"x": nan, "y": 1.0}, {"x": 1.0}, 1e-6)) == {"x", "y"}


def test_a_factor_between_gradients_is_found() -> None:
    whole = {"a": torch.tensor([2.0, 4.0]).double(), "b": torch.tensor([-6.0]).double()}
    half = {name: gradient / 2 for name, gradient in whole.items()}
    assert scale_between(whole, half, 1e-6) == 2.0
    half["b"] += 0.1
    assert scale_between(whole, half, 1e-6) is None
