"""Batch norm over ranks: what one process computes on the joined batch."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's DDP imports it: here once, and not in each of the forked ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import minitrainer as mt
from minitrainer import dist
from minitrainer.cli import main
from minitrainer.errors import BatchNormError, LayerOrderError, SettingError
from minitrainer.plugins.batchnorm import synced_batch_norm
from tests.ranks import run_ranks
from tests.toys import Each, loader, quiet

CPU = torch.device("cpu")
APART = [0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0]
"""Dealt out in stride: rank 0 gets 0, 1, 2, 3 and rank 1 gets 10, 11, 12, 13."""


class Normed(mt.Module):
    """Batch norm in front of one weight."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1) if norm is None else norm
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(self.norm(batch[:, None])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Deep(mt.Module):
    """Two batch norm layers between layers with weights, for rows of three numbers."""

    def __init__(self, skip: Callable[[int, int, str], bool] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh())
        self.last = nn.Linear(4, 1)
        self.skip = skip or (lambda rank, batch_idx, place: False)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = dist.rank()
        if self.skip(rank, batch_idx, "before"):
            return None
        hidden = self.first(batch)
        if self.skip(rank, batch_idx, "between"):
            return None
        loss = (self.last(self.second(hidden)) - batch.sum(1, keepdim=True)).square().mean()
        if self.skip(rank, batch_idx, "after"):
            return None
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(number: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, generator=generator, dtype=torch.float64) + torch.arange(3.0)


def weights(module: nn.Module) -> dict[str, Any]:
    """Return the state as lists, which travel between processes."""
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64),
            torch.tensor(values, dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# Plain torch falls in ------------------------------------------------------------------------


def test_torch_has_no_synced_batch_norm_on_the_cpu() -> None:
    """Case B57, plain torch: an error in the middle of a run, and one when DDP wraps."""
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        run_ranks(lambda: _in_group(lambda: nn.SyncBatchNorm(1)(torch.zeros(4, 1))))

    def wrap() -> None:
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Normed()))

    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        run_ranks(lambda: _in_group(wrap))


def test_torch_leaves_running_statistics_apart() -> None:
    """Case B35, plain torch: 0.15 on rank 0 and 1.15 on rank 1 after one step."""

    def rank() -> float:
        def step() -> float:
            layer = nn.BatchNorm1d(1)
            wrapped = DistributedDataParallel(layer)
            wrapped(torch.tensor(APART[dist.rank() :: 2])[:, None]).sum().backward()
            assert layer.running_mean is not None
            return layer.running_mean.item()

        return _in_group(step)

    assert run_ranks(rank) == pytest.approx([0.15, 1.15])


def _in_group(function: Callable[[], Any]) -> Any:
    with dist.process_group(CPU, num_ranks=int(os.environ["WORLD_SIZE"]), timeout=20):
        return function()


# Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_running_mean_is_that_of_the_joined_batch(kind: Any) -> None:
    """Case B57: 0..3 and 10..13 give 0.65 after one step, momentum 0.1, on both ranks."""

    def rank() -> list[float]:
        module = Normed(kind(1))
        trainer = quiet(sync_batchnorm=kind is nn.BatchNorm1d)
        trainer.fit(module, loader(APART, batch_size=4))
        assert type(module.norm) is kind
        assert module._exchange is None
        return [*module.norm.running_mean.tolist(), *module.norm.running_var.tolist()]

    # Unbiased variance of the eight values, with weight 0.1 against the first value 1.
    variance = 0.9 + 0.1 * torch.tensor(APART).var().item()
    for found in run_ranks(rank):
        assert found == pytest.approx([0.65, variance], rel=1e-6)


def test_one_process_has_plain_layers() -> None:
    """Case B57: world 1: silently plain BN."""
    kinds = []
    module = Normed()
    trainer = quiet(
        sync_batchnorm=True, callbacks=[Each(lambda t, m, r: kinds.append(type(m.norm)))]
    )
    trainer.fit(module, loader(APART, batch_size=8))
    assert kinds == [nn.BatchNorm1d]
    assert module.norm.running_mean.item() == pytest.approx(0.65)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(3),
    "1d with length": lambda: nn.BatchNorm1d(3, momentum=None),
    "2d": lambda: nn.BatchNorm2d(3, eps=0.1, momentum=0.3),
    "3d": lambda: nn.BatchNorm3d(3, affine=False),
    "no running statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "no bias": lambda: nn.BatchNorm2d(3, bias=False),
}
SHAPES = {"1d": (), "1d with length": (5,), "3d": (2, 3, 2)}


class Passes:
    """Twice forward and backward through each of the layers, and what comes of it."""

    def __init__(self, dtype: torch.dtype, rows: slice) -> None:
        generator = torch.Generator().manual_seed(1)
        self.layers, self.data = nn.ModuleDict(), {}
        for name, build in LAYERS.items():
            layer = self.layers[name] = build().to(dtype)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, 0.5, 2.5, generator=generator)
            shape = (7, 3, *SHAPES.get(name, (2, 2)))
            x, factor = torch.randn(2, *shape, generator=generator, dtype=dtype)
            # Far from 0, where sums of squares lose digits.
            self.data[name] = [(x[rows] * 3 + 20).requires_grad_(), factor[rows]]

    def run(self) -> None:
        self.outputs: dict[str, list[Any]] = {}
        for name, (x, factor) in self.data.items():
            y = self.layers[name](x)
            (y * factor).sum().backward()
            self.outputs[name] = y.tolist()

    def rows(self) -> dict[str, list[Any]]:
        """Return what there is per row of the batch."""
        grads = {f"d {name}": x.grad.tolist() for name, (x, _) in self.data.items()}
        return {**self.outputs, **grads}

    def grads(self) -> dict[str, torch.Tensor]:
        """Return what DDP adds up over the ranks."""
        return {
            name: p.grad.double()
            for name, p in self.layers.named_parameters()
            if p.grad is not None
        }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("first_rows", [4, 6, 7])
def test_a_layer_equals_one_process_on_the_joined_batch(
    first_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Forward, gradients and running statistics; 4 rows and 3, 6 and 1, 7 and none."""

    def rank() -> tuple[Any, Any, Any]:
        def twice() -> tuple[Any, Any, Any]:
            mine = [slice(first_rows), slice(first_rows, None)][dist.rank()]
            passes = Passes(dtype, mine)
            module = Normed(passes.layers)
            with synced_batch_norm(module, CPU, everywhere=True, timeout=20):
                exchange = module._exchange
                assert exchange is not None
                for _ in range(2):  # the second time running statistics are mixed
                    exchange.open()
                    passes.run()
                    exchange.follow()
            grads = {name: grad.tolist() for name, grad in passes.grads().items()}
            return passes.rows(), grads, weights(passes.layers)

        found: tuple[Any, Any, Any] = _in_group(twice)
        return found

    alone = Passes(dtype, slice(None))
    alone.run()
    alone.run()
    (rows, grads, state), (more_rows, more_grads, same_state) = run_ranks(rank)
    assert state == same_state
    assert_same(state, weights(alone.layers), tolerance)
    assert_same({name: rows[name] + more_rows[name] for name in rows}, alone.rows(), tolerance)
    # Sums over the batch: in float32 those of torch itself are off by as much as ours.
    for name, grad in alone.grads().items():
        added = grad.new_tensor(grads[name]) + grad.new_tensor(more_grads[name])
        assert_same({name: added.tolist()}, {name: grad.tolist()}, 5 * tolerance)


# Whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [29, 26])
@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (2, 2), (4, 1)])
def test_a_run_equals_one_process(size: int, ranks: int, accumulate: int) -> None:
    """Promise 1 with batch norm inside: weights, running statistics, accumulation and tails.

    The last of 26 rows leave two of four ranks dry.
    """
    data = list(rows(size))

    def fit(batch_size: int) -> tuple[dict[str, Any], float]:
        module = Deep()
        trainer = quiet(max_epochs=3, accumulate=accumulate, sync_batchnorm=True)
        trainer.fit(module, DataLoader(data, batch_size, shuffle=True))  # type: ignore[arg-type]
        return weights(module), trainer.callback_metrics["loss"]

    expected, loss = fit(8)
    for found, same_loss in run_ranks(lambda: fit(8 // ranks), world_size=ranks):
        assert_same(found, expected)
        assert same_loss == pytest.approx(loss, rel=1e-12)


def test_layouts_differ_without_it() -> None:
    """What the test above would see otherwise."""
    data = list(rows(32))

    def fit(batch_size: int) -> dict[str, Any]:
        module = Deep()
        quiet(max_epochs=3).fit(module, DataLoader(data, batch_size))  # type: ignore[arg-type]
        return weights(module)

    expected = fit(8)
    for found in run_ranks(lambda: fit(4)):
        with pytest.raises(AssertionError):
            assert_same(found, expected, 1e-2)


class Uneven(IterableDataset[torch.Tensor]):
    """As many batches of four rows as told, on each rank."""

    shards_itself = True

    def __init__(self, *per_rank: int) -> None:
        self.per_rank = per_rank

    def batches(self, rank: int) -> list[torch.Tensor]:
        return [rows(4, seed=10 * rank + index) for index in range(self.per_rank[rank])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches(dist.rank()))


@pytest.mark.parametrize(
    ("per_rank", "accumulate", "bucket_cap_mb"),
    [((3, 5), 1, None), ((3, 5), 2, 1e-4), ((0, 3), 1, 1e-4), ((2, 0), 2, None), ((2, 0), 1, 1e-4)],
)
def test_ranks_that_run_dry_or_never_had_a_batch(
    per_rank: tuple[int, int], accumulate: int, bucket_cap_mb: float | None
) -> None:
    """Case B10 with synced batch norm: equal to one process on the joined batches.

    With tiny buckets gradients are reduced between the sums of batch norm layers on the rank
    with a batch, and after all of them on the one without.
    """
    data = Uneven(*per_rank)

    def fit(loader: Any) -> tuple[dict[str, Any], int]:
        module = Deep()
        trainer = quiet(
            max_epochs=2,
            accumulate=accumulate,
            sync_batchnorm=True,
            strategy=mt.DDPStrategy(bucket_cap_mb=bucket_cap_mb, timeout=20.0),
        )
        trainer.fit(module, loader)
        return weights(module), trainer.global_step

    rounds = zip(range(max(per_rank)), strict=False)
    joined = [
        torch.cat([part[i] for part in map(data.batches, (0, 1)) if i < len(part)])
        for (i,) in rounds
    ]
    expected, steps = fit(joined)
    for found, same_steps in run_ranks(lambda: fit(DataLoader(data, batch_size=None))):
        assert same_steps == steps
        assert_same(found, expected)


def test_optimizers_stepped_by_hand_and_a_rank_that_runs_dry() -> None:
    """Case B10 with synced batch norm where `training_step` runs backward and steps itself."""

    class ByHand(Deep):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    data = Uneven(1, 3)

    def fit(loader: Any) -> dict[str, Any]:
        module = ByHand()
        strategy = mt.DDPStrategy(timeout=20.0)
        quiet(max_epochs=2, sync_batchnorm=True, strategy=strategy).fit(module, loader)
        return weights(module)

    own, more = data.batches(0), data.batches(1)
    expected = fit([torch.cat([own[0], more[0]]), *more[1:]])
    for found in run_ranks(lambda: fit(DataLoader(data, batch_size=None))):
        assert_same(found, expected)


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("skipping", [(1,), (0, 1)])
def test_none_before_between_or_after_the_layers(place: str, skipping: tuple[int, ...]) -> None:
    """Case B16 with synced batch norm: one rank, or both, return None at batch 1."""

    def rank() -> tuple[dict[str, Any], int]:
        module = Deep(lambda rank, i, where: rank in skipping and i == 1 and where == place)
        strategy = mt.DDPStrategy(timeout=20.0)
        trainer = quiet(sync_batchnorm=True, strategy=strategy)
        trainer.fit(module, DataLoader(list(rows(24)), 4))  # type: ignore[arg-type]
        return weights(module), trainer.global_step

    first, second = run_ranks(rank)
    assert first == second
    assert first[1] == (3 if len(skipping) == 1 else 2)
    counts = [first[0]["first.1.num_batches_tracked"], first[0]["second.1.num_batches_tracked"]]
    skipped = len(skipping) == 2
    assert counts == [3 - (skipped and place == "before"), 3 - (skipped and place != "after")]
    if place == "before" and not skipped:
        # Then the micro-batch is rank 0's rows alone, in one process too.
        data = rows(24)
        alone = Deep()
        batches = [data[:8], data[8:16:2], data[16:]]
        quiet().fit(alone, batches)
        assert_same(first[0], weights(alone))


def test_hooks_keys_checkpoints_and_copies_are_those_of_plain_layers() -> None:
    """Case B57: nothing of the exchange is left in them."""

    def rank() -> dict[str, Any]:
        module, called = Deep(), []
        layer = module.first[1]
        hook = layer.register_forward_hook(lambda *_: called.append(1))
        identities = [id(part) for part in module.modules()]

        def look(trainer: Any, module: Any, result: Any) -> None:
            assert isinstance(layer, nn.BatchNorm1d)
            assert type(layer) is not nn.BatchNorm1d
            for copied in (copy.deepcopy(module.last), copy.deepcopy(layer)):
                assert not hasattr(copied, "_exchange")
            hook.remove()  # a local function cannot be pickled
            assert type(pickle.loads(pickle.dumps(layer))) is nn.BatchNorm1d
            if dist.rank() == 0:  # alone, in train mode, and nobody waits
                copy.deepcopy(module.first)(rows(4))
                module.first(rows(4))
            if trainer.global_step == 2:
                trainer.save_checkpoint("a.ckpt")

        trainer = quiet(sync_batchnorm=True, callbacks=[Each(look)])
        trainer.fit(module, DataLoader(list(rows(24)), 4))  # type: ignore[arg-type]
        assert type(layer) is nn.BatchNorm1d
        assert [id(part) for part in module.modules()] == identities
        assert called == [1]
        assert list(module.state_dict()) == list(Deep().state_dict())
        saved = torch.load("a.ckpt", weights_only=True)
        Deep().load_state_dict(saved["state_dict"])
        return weights(module)

    first, second = run_ranks(rank)
    assert first == second


def test_layers_are_plain_again_after_an_error() -> None:
    def rank() -> tuple[str, bool]:
        module = Normed()

        def fail(*_: Any) -> None:
            raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            quiet(sync_batchnorm=True, callbacks=[Each(fail)]).fit(module, loader(APART, 4))
        return type(module.norm).__name__, module._exchange is None

    assert run_ranks(rank) == [("BatchNorm1d", True)] * 2


def test_evaluation_exchanges_nothing() -> None:
    """Ranks have different numbers of validation batches, and one layer has no statistics."""

    class Validating(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.second[1] = nn.BatchNorm1d(4, track_running_stats=False).double()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("out", self.second(self.first(batch)).mean())

    def rank() -> float:
        trainer = quiet(sync_batchnorm=True, strategy=mt.DDPStrategy(timeout=20.0))
        data = DataLoader(list(rows(16)), 4)  # type: ignore[arg-type]
        trainer.fit(Validating(), data, DataLoader(list(rows(20)), 4))  # type: ignore[arg-type]
        return trainer.callback_metrics["out"]

    first, second = run_ranks(rank)
    assert first == second


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_autocast_statistics_are_not_rounded(precision: Any) -> None:
    """Sums of halves are taken in float32: 1,000 values near 50 keep their mean and variance."""

    class Halves(mt.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1, momentum=1.0)
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            half = torch.bfloat16 if precision == "bf16" else torch.float16
            normalized = self.norm(batch[:, None].to(half))
            assert normalized.dtype == half
            return self.layer(normalized).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    values = torch.arange(2000) % 3 * 0.25 + 50.0  # exact in both formats

    def rank() -> tuple[float, float, float]:
        module = Halves()
        nn.init.ones_(module.layer.weight)
        plugin = mt.AMPPlugin(precision, init_scale=1024.0)
        trainer = quiet(sync_batchnorm=True, precision=plugin)
        trainer.fit(module, loader(values.tolist(), batch_size=1000))
        norm = module.norm
        return norm.running_mean.item(), norm.running_var.item(), module.norm.weight.item()

    first, second = run_ranks(rank)
    assert first == second
    assert first[0] == pytest.approx(values.mean().item(), rel=1e-6)
    assert first[1] == pytest.approx(values.var().item(), rel=1e-5)
    assert first[2] == pytest.approx(0.8, abs=0.02)  # d mean(n^2) / d weight = 2


def test_digits_with_synced_batch_norm_end_with_the_same_weights() -> None:
    """The first recipe as it is: devices=2 with 32 images each, against one rank with 64."""
    recipe = Path(__file__).parents[2] / "recipes" / "digits.yaml"

    def fit(name: str, *settings: str) -> dict[str, torch.Tensor]:
        common = ["trainer.max_steps=12", "trainer.accelerator=cpu", f"trainer.run_dir={name}"]
        assert main(["fit", str(recipe), *common, *settings]) == 0
        saved: dict[str, torch.Tensor] = torch.load(
            f"{name}/checkpoints/last.ckpt", weights_only=True
        )["state_dict"]
        return saved

    alone = fit("alone", "data.batch_size=64")
    shared = ["data.batch_size=32", "trainer.devices=2"]
    synced = fit("synced", *shared, "trainer.sync_batchnorm=true")
    apart = fit("apart", *shared)
    for name, weight in alone.items():
        torch.testing.assert_close(synced[name], weight, atol=1e-3, rtol=1e-3)
    running = "layers.1.running_var"
    assert (apart[running] - alone[running]).abs().max() > 1e-3


# What is refused -----------------------------------------------------------------------------


class Renamed(nn.BatchNorm1d):
    """A subclass that computes what torch's does."""


class Own(nn.BatchNorm1d):
    """A subclass that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_subclasses_without_a_forward_are_kept() -> None:
    def rank() -> tuple[float, str]:
        module, names = Normed(Renamed(1)), []
        note = Each(lambda t, m, r: names.append(isinstance(m.norm, Renamed)))
        quiet(sync_batchnorm=True, callbacks=[note]).fit(module, loader(APART, 4))
        assert names == [True]
        return module.norm.running_mean.item(), type(module.norm).__name__

    assert run_ranks(rank) == [(pytest.approx(0.65), "Renamed")] * 2


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Own(1), r"norm \(Own\) has a forward of its own"),
        (nn.LazyBatchNorm1d, r"norm \(LazyBatchNorm1d\) does not know its size"),
        (
            lambda: nn.SyncBatchNorm(1, process_group=1),
            r"norm \(SyncBatchNorm\) has a process group",
        ),
    ],
)
def test_layers_that_cannot_be_synced_are_refused_by_name(build: Any, words: str) -> None:
    with pytest.raises(BatchNormError, match=words):
        run_ranks(lambda: quiet(sync_batchnorm=True).fit(Normed(build()), loader(APART, 4)))


def test_a_layer_whose_forward_was_patched_is_refused() -> None:
    def rank() -> None:
        module = Normed()
        module.norm.forward = lambda x: x  # type: ignore[method-assign]
        quiet(sync_batchnorm=True).fit(module, loader(APART, 4))

    with pytest.raises(BatchNormError, match="norm"):
        run_ranks(rank)


def test_ranks_at_different_layers_are_an_error_and_not_a_mixture() -> None:
    class Forked(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # The layers have the same size, so that their sums could be mixed up unseen.
            layers = [self.first[1], self.other]
            hidden = self.first[0](batch)
            for layer in layers if dist.rank() == 0 else reversed(layers):
                hidden = layer(hidden)
            return self.last(self.second(hidden)).mean()

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.BatchNorm1d(8).double()

    with pytest.raises(LayerOrderError, match=r"S05.*forward of (first\.1|other) when"):
        run_ranks(
            lambda: quiet(sync_batchnorm=True).fit(Forked(), DataLoader(list(rows(8)), 4))  # type: ignore[arg-type]
        )


# Buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buffers", "mean", "count"), [("rank0", 0.15, 1), ("mean", 0.65, 1)])
def test_policy_of_buffers(buffers: Any, mean: float, count: int) -> None:
    """Case B35: 0.15 and 1.15 become 0.15 (rank 0's) or 0.65 (their mean) on both ranks."""

    class Counting(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1 + dist.rank()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("running", self.norm.running_mean.mean(), sync_dist=False)
            self.at_validation = self.norm.running_mean.item(), self.steps.item()

    def rank() -> tuple[Any, Any]:
        module = Counting()
        trainer = quiet(strategy=mt.DDPStrategy(buffers=buffers))
        trainer.fit(module, loader(APART, 4), loader([1.0, 2.0]))
        return module.at_validation, (module.norm.running_mean.item(), module.steps.item())

    expected = (pytest.approx(mean), count)
    assert run_ranks(rank) == [(expected, expected)] * 2


def test_buffers_are_equal_after_fit_without_validation() -> None:
    def rank() -> float:
        module = Normed()
        quiet(strategy=mt.DDPStrategy(buffers="mean")).fit(module, loader(APART, 4))
        return module.norm.running_mean.item()

    assert run_ranks(rank) == pytest.approx([0.65, 0.65])


def test_refuses_an_unknown_policy() -> None:
    with pytest.raises(SettingError, match="rank0, mean"):
        mt.DDPStrategy(buffers="median")  # type: ignore[arg-type]
