"""Each kind of fault, planted in a recipe, is named; a recipe without one is clean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.conftest import Outcome

Parity = Callable[..., Outcome]


@pytest.mark.parametrize(
    "words",
    [
        "",
        # Epochs of two windows with a tail of 45 - 32 samples, which makes a short window.
        "trainer.accumulate=2 --ranks 2 --steps 5",
        "data.drop_last=true --ranks 3 --steps 5",
        "trainer.limit_train_batches=3 trainer.accumulate=2 --steps 4",
        "trainer.limit_train_batches=0.5 trainer.gradient_clip_norm=0.1 --steps 4",
        "data.fault=batch_sampler --steps 7",
        "module.fault=weighted",
        "data.fault=augment",
    ],
)
def test_a_recipe_without_fault_is_clean(parity: Parity, words: str) -> None:
    """Whatever it accumulates, drops, limits, clips and weights by; no false alarm."""
    outcome = parity(*words.split())
    assert outcome.lines[-1] == "no difference"
    assert outcome.exit_code == 0
    assert outcome.codes == []
    assert outcome.row("samples") == outcome.row("gradients") == ["same", "same"]
    assert outcome.row("validation") == ["same", "same"]
    assert not Path("runs").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("fault", "codes", "said"),
    [
        ("norm", ["S30"], "in (b) and (c) 1 batch norm layers (body.1)"),
        ("sum", ["T31"], "in (b) and (c) all gradients are smaller by the 2 parts"),
        ("norm+sum", ["S30", "T31"], "sync_batchnorm=true"),
        ("dropout", ["T32"], "layouts part by chance; without it they agree."),
        ("dropout+sum", ["T32", "T31"], "drop out at random"),
        ("noise", ["T32"], "training_step draws random numbers"),
        ("classes", ["T22"], "it is a mean over something else than samples"),
        ("rank", ["T33"], "only in (b) the step comes out otherwise"),
        ("world", ["T33"], "in (b) all gradients are the right ones times 2:"),
        ("lr", ["R21"], "in (b) the learning rate of step 1 is 0.2 instead of 0.1"),
        ("buffer", ["S27"], "in (b) and (c) buffers part while gradients agree, mean first"),
        ("unseeded", ["D27"], "the first weights are others (head.bias)"),
        ("rank0", ["T34"], "it is logged with sync_dist=False, and so is rank 0's alone"),
        ("running", ["T35"], "depends on the batches that the rank saw before"),
        ("step_metric", ["T35"], "in (b) and (c) hits is averaged over other parts than in (a)"),
        ("step_rank0", ["T34"], "in (b) step_loss is another: it is logged with sync_dist=False"),
    ],
)
def test_a_fault_in_the_module_is_named(
    parity: Parity, fault: str, codes: list[str], said: str
) -> None:
    outcome = parity(f"module.fault={fault}", "--steps", "2")
    assert outcome.codes == codes, outcome.text
    assert said in outcome.text
    assert outcome.exit_code == 1
    assert outcome.lines[-1] == (f"different: {', '.join(codes)} (minitrainer explain {codes[0]})")


@pytest.mark.parametrize(
    ("fault", "codes", "said"),
    [
        ("rank_data", ["D32"], "in (b) 4 of 8 samples of step 1 are others"),
        ("own_numbers", ["D33"], "the dataset gives another item when it is asked for the same"),
        ("stateful", ["D33"], "from random numbers of its own or what it keeps"),
        ("collate", ["D33"], "in (b) and (c) the samples are others: collate_fn makes them"),
    ],
)
def test_a_fault_in_the_data_is_named(
    parity: Parity, fault: str, codes: list[str], said: str
) -> None:
    outcome = parity(f"data.fault={fault}", "--steps", "2")
    assert outcome.codes == codes, outcome.text
    assert said in outcome.text
    assert outcome.row("samples")[0] != "same"
    assert outcome.exit_code == 1


def test_a_fault_is_named_behind_clipping(parity: Parity) -> None:
    """The gradient of a sum, clipped to the norm of that of a mean, looks alike."""
    outcome = parity("module.fault=sum", "trainer.gradient_clip_norm=0.001", "--steps", "2")
    assert outcome.codes == ["T31"]
    assert outcome.row("last weights") == ["same", "same"]


def test_sync_batch_norm_is_clean(parity: Parity) -> None:
    """Over ranks batch norm is in step then; over micro-batches it cannot be, and that is said."""
    outcome = parity("module.fault=norm", "trainer.sync_batchnorm=true", "--steps", "2")
    assert outcome.row("gradients")[0] == "same"
    assert outcome.row("buffers")[0] == "same"
    assert outcome.row("gradients")[1] != "same"
    assert outcome.codes == ["S30"]
    assert "in (b) they are in step" in outcome.text
    assert outcome.lines[-1] == "no difference between one process and the ranks"
    assert outcome.exit_code == 0


@pytest.mark.parametrize(("fault", "code"), [("sum", "T31"), ("rank", "T33")])
def test_another_fault_is_seen_behind_sync_batch_norm(
    parity: Parity, fault: str, code: str
) -> None:
    outcome = parity(f"module.fault=norm+{fault}", "trainer.sync_batchnorm=true", "--steps", "2")
    assert outcome.codes == ["S30", code], outcome.text
    assert "in (b) they are in step" in outcome.text
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("fault", "codes"), [("none", []), ("sum", ["T31"]), ("world", ["T33"]), ("norm", ["S30"])]
)
def test_a_module_that_steps_by_hand_is_compared_without_accumulation(
    parity: Parity, fault: str, codes: list[str]
) -> None:
    outcome = parity("module._target_=planted.ByHand", f"module.fault={fault}", "--steps", "2")
    assert outcome.codes == codes, outcome.text
    assert len(outcome.row("samples")) == 1, "(a) vs (b) only"


@pytest.mark.parametrize(
    ("setting", "codes", "exit_code"),
    [
        ("module.norm=false", [], 0),
        ("module.norm=true", ["S30"], 1),
        ("trainer.sync_batchnorm=true", ["S30"], 0),
    ],
)
def test_digits(
    parity: Parity, repository: Path, setting: str, codes: list[str], exit_code: int
) -> None:
    """The first recipe: its batch norm is named, and clean over ranks once it is synchronised."""
    recipe = str(repository / "recipes/digits.yaml")
    outcome = parity(setting, "data.batch_size=8", "--steps", "2", recipe=recipe)
    assert (outcome.codes, outcome.exit_code) == (codes, exit_code), outcome.text


def test_a_stream_is_compared_with_accumulation(parity: Parity) -> None:
    """Its batches cannot be joined before they are read."""
    outcome = parity("data.fault=stream", "--steps", "3")
    assert outcome.exit_code == 0
    assert "there is no run (a)" in outcome.text
    assert outcome.row("samples") == ["same"]
    outcome = parity("data.fault=stream", "module.fault=rank", "--steps", "3")
    assert outcome.exit_code == 1
    assert outcome.codes == ["T33"]


def test_a_module_that_refuses_float64_is_compared_as_float32(parity: Parity) -> None:
    outcome = parity("module.fault=float32")
    assert "as float32, not float64" in outcome.text
    assert "RuntimeError" in outcome.text
    assert "relative differences up to 1e-03 are rounding" in outcome.text
    assert outcome.lines[-1] == "no difference"
    assert outcome.exit_code == 0
    assert parity("module.fault=float32+norm", "--steps", "2").codes == ["S30"]


def test_parity_starts_its_own_ranks(parity: Parity, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    outcome = parity()
    assert outcome.exit_code == 2
    assert outcome.lines[0].startswith("minitrainer: error: [R03] parity was started by a launcher")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--ranks 1", "[R03] Argument --ranks: wants a whole number of at least 2."),
        ("--steps 0", "[R03] Argument --steps: wants a whole number of at least 1."),
        ("--ckpt x", "[R03] parity has no option --ckpt. It has --ranks N and --steps N;"),
        ("trainer.max_epoch=3", "[R02] trainer.max_epoch: unknown key; did you mean max_epochs?"),
    ],
)
def test_mistakes_are_usage_errors(parity: Parity, words: str, expected: str) -> None:
    outcome = parity(*words.split())
    assert outcome.exit_code == 2
    assert outcome.lines[0].startswith(f"minitrainer: error: {expected}")
