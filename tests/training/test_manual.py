"""Several optimizers, stepped by hand: the same result on any layout, and nobody waits."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's DDP imports it: here once, and not in each of the forked ranks
from torch.nn.parallel import DistributedDataParallel

import minitrainer as mt
from minitrainer import dist
from minitrainer.errors import (
    CheckpointMismatchError,
    ManualOptimizationError,
    MinitrainerError,
    OptimizersError,
    SettingError,
    StepsMismatchError,
)
from tests.ranks import run_ranks
from tests.toys import Each, Rows, loader, quiet

VALUES = [0.1 * i - 1.0 for i in range(24)]


class Gan(mt.Module):
    """A tiny GAN whose noise is a function of the sample, so that layouts can be compared."""

    automatic_optimization = False

    def __init__(self, *, hidden: int = 4, toggle: bool = True, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = torch.nn.BatchNorm1d(1) if norm else torch.nn.Identity()
        self.generator = torch.nn.Sequential(
            first, torch.nn.Linear(1, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)
        )
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )
        self.toggle = toggle
        self.calls = 0
        self.left: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        opt_g, opt_d = self.optimizers()
        noise, real = torch.cos(7 * batch[:, None]), batch[:, None]
        self.step_critic(opt_d, noise, real)
        self.step_generator(opt_g, noise)
        self.log("calls", float(self.calls))

    def step_critic(self, optimizer: Any, noise: torch.Tensor, real: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = self.critic(self.generator(noise).detach()) - self.critic(real)
        self.manual_backward(loss.mean())
        optimizer.step()

    def step_generator(self, optimizer: Any, noise: torch.Tensor) -> None:
        for parameter in self.critic.parameters():
            parameter.grad = None
        if self.toggle:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(-self.critic(self.generator(noise)).mean())
        optimizer.step()
        self.left.append(any(p.grad is not None for p in self.critic.parameters()))
        if self.toggle:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.02, weight_decay=0.1),
        ]


def weights(module: torch.nn.Module) -> list[float]:
    return [x for tensor in module.state_dict().values() for x in tensor.flatten().tolist()]


def fitted(module: mt.Module, values: Any = VALUES, batch_size: int = 8, **settings: Any) -> Any:
    quiet(**settings).fit(module, loader(values, batch_size=batch_size))
    return weights(module)


def on_ranks(make: Any, values: Any = VALUES, ranks: int = 2, **settings: Any) -> list[Any]:
    """Fit on ranks with a global batch of 8; all must end alike."""

    def rank() -> list[float]:
        found: list[float] = fitted(make(), values, 8 // ranks, **settings)
        return found

    first, *others = run_ranks(rank, ranks, timeout=30)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_optimizers_count_one_step(ranks: int) -> None:
    """Case B92: two optimizers, max_steps=4: 4 calls, global_step 4, rows at 1, 2, 3, 4."""

    def rank() -> tuple[int, int, list[int]]:
        module, rows = Gan(), Rows()
        trainer = quiet(max_steps=4, max_epochs=9, log_every_n_steps=1, loggers=[rows])
        trainer.fit(module, loader(VALUES, batch_size=4))
        return module.calls, trainer.global_step, rows.steps

    first, *others = run_ranks(rank, ranks)
    assert first == (4, 4, [1, 2, 3, 4])
    assert all(other[:2] == (4, 4) for other in others)


def test_plain_ddp_falls_in() -> None:
    """What DDP says to two losses and two backwards, with `find_unused_parameters` off and on."""

    class Both(torch.nn.Module):
        def __init__(self, gan: Gan) -> None:
            super().__init__()
            self.gan = gan

        def forward(self, x: torch.Tensor) -> Any:
            fake = self.gan.generator(x)
            return self.gan.critic(fake.detach()).mean(), -self.gan.critic(fake).mean()

    def rank(*, find_unused: bool) -> str:
        with dist.process_group(torch.device("cpu"), num_ranks=2, timeout=20):
            wrapped = DistributedDataParallel(Both(Gan()), find_unused_parameters=find_unused)
            try:
                for _ in range(2):
                    loss_d, loss_g = wrapped(torch.ones(4, 1))
                    loss_d.backward()
                    loss_g.backward()
            except RuntimeError as error:
                return str(error)
        return ""

    for message in run_ranks(lambda: rank(find_unused=False)):
        assert "Expected to mark a variable ready only once" in message, message
    # A layer of DDP's own, around all outputs, is freed by the first backward.
    for message in run_ranks(lambda: rank(find_unused=True)):
        assert "backward through the graph a second time" in message


@pytest.mark.parametrize("find_unused", [False, True])
def test_gan_is_the_same_on_two_ranks(find_unused: bool) -> None:
    """Case B93: 3 steps on 2 ranks: equal to one process, and no gradient of D left by G."""
    reference = fitted(Gan())

    def rank() -> tuple[list[float], list[bool]]:
        module = Gan()
        strategy = mt.DDPStrategy(find_unused_parameters=find_unused)
        return fitted(module, batch_size=4, strategy=strategy), module.left

    (first, left), (second, _) = run_ranks(rank)
    assert first == second
    assert first == pytest.approx(reference, abs=1e-6)
    assert left == [False] * 3


def test_without_toggling_the_other_network_is_polluted_but_not_reduced() -> None:
    untoggled = Gan(toggle=False)
    assert fitted(untoggled) == fitted(Gan())
    assert untoggled.left == [True] * 3
    assert on_ranks(lambda: Gan(toggle=False)) == pytest.approx(fitted(Gan()), abs=1e-6)


def test_a_toggled_optimizer_is_untoggled_with_the_training_step() -> None:
    class Forgetful(Gan):
        def untoggle_optimizer(self, optimizer: Any) -> None:
            pass

    module = Forgetful()
    module.generator[1].bias.requires_grad_(False)
    assert fitted(module) != fitted(Gan())
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["generator.1.bias"]


@pytest.mark.parametrize("size", [17, 18, 21])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_tails(size: int, ranks: int) -> None:
    """The last batch leaves one rank dry (17), or gives ranks different numbers of samples."""
    values = VALUES[:size]
    reference = fitted(Gan(), values, max_epochs=2)
    assert on_ranks(Gan, values, ranks, max_epochs=2) == pytest.approx(reference, abs=1e-6)


def test_optimizers_of_very_different_sizes() -> None:
    """The generator does not fit into the first piece, the critic does."""
    reference = fitted(Gan(hidden=3000), VALUES[:17])
    found = on_ranks(lambda: Gan(hidden=3000), VALUES[:17])
    assert found == pytest.approx(reference, abs=1e-6)


class Elaborate(Gan):
    """Schedulers, clipping, clamped weights, the generator every second batch, an idle layer."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Parameter(torch.ones(2))
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        opt_g, opt_d = self.optimizers()
        noise, real = torch.cos(7 * batch[:, None]), batch[:, None]
        for _ in range(2):
            self.clip_gradients(opt_d, norm=0.05)
            self.step_critic(opt_d, noise, real)
            self.lr_schedulers()[1].step()
            with torch.no_grad():
                for parameter in self.critic.parameters():
                    parameter.clamp_(-0.4, 0.4)
        if batch_idx % 2 == 0:
            self.clip_gradients(opt_g, value=0.01)
            self.step_generator(opt_g, noise)
        self.lr_schedulers()[0].step()
        self.rates.append(opt_g.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW([*self.generator.parameters(), self.idle], lr=0.01)
        critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        rate = torch.optim.lr_scheduler
        return [
            {"optimizer": generator, "lr_scheduler": rate.ExponentialLR(generator, 0.7)},
            {"optimizer": critic, "lr_scheduler": rate.OneCycleLR(critic, 0.2, total_steps=50)},
        ]


@pytest.mark.parametrize("size", [16, 17])
def test_a_dry_rank_follows_all_that_a_training_step_may_do(size: int) -> None:
    """With 17 values rank 1 is dry in the third batch, and goes on as if it had been there."""
    module = Elaborate()
    reference = fitted(module, VALUES[:size], max_epochs=3)
    assert module.idle.tolist() == [1.0, 1.0]  # no gradient anywhere: no weight decay either
    found = on_ranks(Elaborate, VALUES[:size], max_epochs=3)
    assert found == pytest.approx(reference, abs=2e-6)


def test_a_dry_rank_that_has_not_seen_a_single_batch() -> None:
    """One sample per epoch, fp16: the scaler of rank 1 has never scaled anything."""

    def rank() -> tuple[list[float], int, float]:
        module, plugin = Elaborate(), mt.AMPPlugin("fp16", init_scale=256.0, growth_interval=3)
        trainer = quiet(precision=plugin, max_epochs=3)
        trainer.fit(module, loader([0.5]))
        scale: float = plugin.state_dict()["scaler"]["scale"]
        return weights(module), trainer.global_step, scale

    first, second = run_ranks(rank)
    assert first == second
    assert first[1:] == (3, 256.0 * 8)


def test_a_rank_that_steps_nothing_follows() -> None:
    """As None in automatic optimization: this batch of rank 1 has weight 0."""

    class Skipping(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1 and batch_idx == 1:
                return
            super().training_step(batch, batch_idx)

    def rank() -> tuple[list[float], int]:
        module = Skipping()
        return fitted(module, batch_size=4), module.calls

    (first, calls), (second, fewer) = run_ranks(rank)
    assert first == second
    assert (calls, fewer) == (3, 2)


def test_a_step_of_a_small_optimizer_is_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing besides, but for one meeting before the collective at the end of the epoch."""
    calls = []
    reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        calls.append(len(tensor))
        return reduce(tensor, *args, **settings)

    def rank() -> tuple[int, int]:
        fitted(Gan(), VALUES * 4, batch_size=4)
        return len(calls), len(set(calls))

    monkeypatch.setattr(torch.distributed, "all_reduce", counted)
    assert run_ranks(rank) == [(2 * 12 + 1, 1)] * 2


@pytest.mark.parametrize("log_every", [1, 50])
@pytest.mark.parametrize("kind", ["more", "fewer", "other", "more at first", "fewer at last"])
def test_ranks_that_step_differently_get_an_error(kind: str, log_every: int) -> None:
    """What comes after the odd step is another window, a flush of metrics, or the epoch's end."""
    odd_batch = {"more at first": 0, "fewer at last": 2}.get(kind, 1)
    apart = "more" in kind and log_every == 50
    words = r"2 step.*in different batches" if apart else r"1 step.*this rank's loss"

    class Different(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            opt_g, opt_d = self.optimizers()
            noise, real = torch.cos(batch[:, None]), batch[:, None]
            odd = self.global_rank == 1 and batch_idx == odd_batch
            if odd and kind == "other":
                opt_g, opt_d = opt_d, opt_g
            self.step_critic(opt_d, noise, real)
            if not (odd and "fewer" in kind):
                self.step_generator(opt_g, noise)
            if odd and "more" in kind:
                self.step_critic(opt_d, noise, real)

    start = time.monotonic()
    with pytest.raises(StepsMismatchError, match=words):
        run_ranks(
            lambda: fitted(Different(), batch_size=4, log_every_n_steps=log_every), timeout=30
        )
    assert time.monotonic() - start < 10


def test_a_stop_asked_for_on_one_rank_stops_all_at_the_same_step() -> None:
    def stop(trainer: Any, module: Any, result: Any) -> None:
        trainer.should_stop |= trainer.global_rank == 1 and trainer.global_step == 3

    def rank() -> int:
        trainer = quiet(max_epochs=5, callbacks=[Each(stop)])
        trainer.fit(Gan(), loader(VALUES))
        return trainer.global_step

    assert run_ranks(rank) == [4, 4]


def test_parameters_in_float64_and_bfloat16() -> None:
    """Gradients are added up in the widest type, and each is given back in its own."""

    class Mixed(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.generator.double()
            self.coarse = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (optimizer,) = [self.optimizers()]
            optimizer.zero_grad()
            out = self.generator(batch[:, None].double()) * self.coarse.double()
            self.manual_backward(out.square().mean())
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.generator.parameters(), self.coarse], lr=0.5)

    module = Mixed()
    reference = fitted(module)
    assert on_ranks(Mixed) == pytest.approx(reference, abs=1e-9)
    assert module.coarse.item() != 1.0


def test_accumulation_by_hand() -> None:
    class Accumulating(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            opt_g, _ = self.optimizers()
            loss = (self.generator(batch[:, None]) - 1).square().mean()
            self.manual_backward(loss / 2)
            if batch_idx % 2 == 1:
                opt_g.step()
                opt_g.zero_grad()

    values = VALUES[:16]
    reference = fitted(Accumulating(), values, batch_size=16, max_epochs=0)
    assert on_ranks(Accumulating, values, max_epochs=2) == pytest.approx(
        fitted(Accumulating(), values, max_epochs=2), abs=1e-6
    )
    assert reference != fitted(Accumulating(), values)

    def rank() -> tuple[int, int]:
        trainer = quiet(max_epochs=2)
        trainer.fit(Accumulating(), loader(values, batch_size=4))
        return trainer.global_step, trainer._progress.state.samples_seen

    assert run_ranks(rank) == [(2, 0)] * 2


class Scaled(mt.Module):
    """Two weights; gradients are what the batch says; both backwards before both steps."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(()))
        self.b = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        opt_a, opt_b = self.optimizers()
        opt_a.zero_grad()
        opt_b.zero_grad()
        self.manual_backward((self.a * batch).mean())
        self.manual_backward((self.b * batch.nan_to_num(posinf=1.0)).mean())
        return opt_a.step(), opt_b.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_overflow_skips_one_optimizer_and_moves_the_scale_once(ranks: int) -> None:
    """Batch 2 of 3 is infinite for a only; b's gradients are divided by the scale they had."""

    def rank() -> tuple[float, float, float, int, int]:
        module, plugin = Scaled(), mt.AMPPlugin("fp16", init_scale=1024.0)
        trainer = quiet(precision=plugin)
        ones = [1.0] * (ranks - 1)
        trainer.fit(module, loader([*ones, 1.0, *ones, math.inf, *ones, 1.0]))
        scale = plugin.state_dict()["scaler"]["scale"]
        skipped = trainer._progress.state.skipped_steps
        return module.a.item(), module.b.item(), scale, trainer.global_step, skipped

    assert run_ranks(rank, ranks) == [(-2.0, -3.0, 512.0, 3, 1)] * ranks


def test_a_scale_that_grows_between_two_steps_does_not_distort_the_second() -> None:
    module, plugin = Scaled(), mt.AMPPlugin("fp16", init_scale=1024.0, growth_interval=1)
    quiet(precision=plugin).fit(module, loader([1.0, 1.0]))
    assert (module.a.item(), module.b.item()) == (-2.0, -2.0)
    assert plugin.state_dict()["scaler"]["scale"] == 1024.0 * 4


def test_a_forward_after_a_step_sees_the_new_weights_under_autocast() -> None:
    """Autocast keeps the weights it has cast until its context ends, which is too late here."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.mm(torch.ones(1, 2), weight).sum().backward()
        optimizer.step()
        assert torch.mm(torch.ones(1, 2), weight).sum().item() == 4.0  # plain torch falls in
    seen = []

    class Twice(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                loss = torch.mm(torch.ones(1, 2), self.weight).sum()
                seen.append(loss.item())
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            self.weight = torch.nn.Parameter(torch.ones(2, 2))
            return torch.optim.SGD([self.weight], lr=1.0)

    quiet(precision="bf16").fit(Twice(), loader([1.0]))
    assert seen == [4.0, 0.0]


@pytest.mark.parametrize("size", [24, 18])
def test_synced_batch_norm_in_a_generator(size: int) -> None:
    """With 18 values two of four ranks are dry in the last batch, and follow the layers too."""
    reference = fitted(Gan(norm=True), VALUES[:size], max_epochs=2)
    found = on_ranks(lambda: Gan(norm=True), VALUES[:size], 4, max_epochs=2, sync_batchnorm=True)
    assert found == pytest.approx(reference, abs=2e-6)


def test_resume_goes_on_with_all_optimizers_and_schedulers() -> None:
    class Save(mt.Callback):
        def on_train_step_end(self, trainer: Any, module: Any, result: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint("four.ckpt")

    whole = Elaborate()
    reference = fitted(whole, max_epochs=2)
    fitted(Elaborate(), max_epochs=2, max_steps=4, callbacks=[Save()])
    saved = torch.load("four.ckpt", weights_only=True)
    assert len(saved["optimizers"]) == len(saved["lr_schedulers"]) == 2
    module = Elaborate()
    quiet(max_epochs=2).fit(module, loader(VALUES, batch_size=8), ckpt_path="four.ckpt")
    assert weights(module) == reference
    assert module.rates == whole.rates[4:]
    with pytest.raises(CheckpointMismatchError, match="2 optimizers"):
        quiet().fit(_one_optimizer(Elaborate()), loader(VALUES), ckpt_path="four.ckpt")


def _one_optimizer(module: Elaborate) -> Elaborate:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accumulate": 2}, r"accumulate .*every so many"),
        ({"accumulate": {0: 1, 1: 4}, "max_epochs": 3}, r"accumulate .*every so many"),
        ({"gradient_clip_norm": 1.0}, r"norm .*clip_gradients\(opt, norm"),
        ({"gradient_clip_value": 1.0}, r"value .*clip_gradients\(opt, value"),
        ({"lr_rule": mt.LearningRateRule(base_batch=1)}, r"lr_rule .*configure_optimizers"),
    ],
)
def test_settings_of_automatic_steps_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        quiet(**settings).fit(Gan(), loader(VALUES))


def test_optimizers_are_stepped_in_training_step_and_by_what_optimizers_returns() -> None:
    class Past(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.optimizers()[0].optimizer.step()

    with pytest.raises(ManualOptimizationError, match=r"Adam\.step .*self\.optimizers"):
        fitted(Past())

    def late(trainer: Any, module: Any, result: Any) -> None:
        module.optimizers()[0].step()

    with pytest.raises(ManualOptimizationError, match="outside of training_step"):
        fitted(Gan(), callbacks=[Each(late)])


def test_steps_by_hand_are_refused_where_the_trainer_steps() -> None:
    class Automatic(Gan):
        automatic_optimization = True
        number = 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.optimizers() is self.trainer.optimizers[0]
            self.manual_backward(self.generator(batch[:, None]).mean())

        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()[: self.number]

    with pytest.raises(ManualOptimizationError, match="manual_backward"):
        fitted(Automatic())
    Automatic.number = 2
    with pytest.raises(OptimizersError, match=r"2 optimizers.*automatic_optimization = False"):
        fitted(Automatic())


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [({"interval": "step"}, "interval"), ({"monitor": "loss", "frequency": 2}, "monitor")],
)
def test_settings_of_schedulers_that_nobody_would_follow(scheduler: Any, words: str) -> None:
    class Scheduled(Gan):
        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            rate = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
            return optimizers, [{"scheduler": rate, **scheduler}]

    with pytest.raises(OptimizersError, match=words):
        fitted(Scheduled())


def test_bounds_of_clipping_are_checked() -> None:
    class Clipping(Gan):
        bounds: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.clip_gradients(self.optimizers()[0], **self.bounds)

    for Clipping.bounds in ({}, {"norm": 0.0}, {"norm": 1.0, "value": -1.0}):
        with pytest.raises(SettingError, match="clip_gradients"):
            fitted(Clipping())


def test_a_module_can_be_trained_again_and_evaluated() -> None:
    class Validating(Gan):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("out", self.generator(batch[:, None]).mean())

    def rank() -> tuple[float, float]:
        module = Validating()
        trainer = quiet(max_epochs=1)
        trainer.fit(module, loader(VALUES, batch_size=4), loader(VALUES, batch_size=5))
        first = trainer.callback_metrics["out"]
        again = quiet().validate(module, loader(VALUES, batch_size=3))["out"]
        assert again == pytest.approx(first, abs=1e-6)
        fitted(module)
        with pytest.raises(MinitrainerError):
            module.optimizers()
        return first, again

    first, second = run_ranks(rank)
    assert first == second
