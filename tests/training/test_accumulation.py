"""Windows: what one optimizer step is made of, on one rank and several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import minitrainer as mt
from minitrainer import dist
from minitrainer.errors import SettingError
from tests.ranks import run_ranks
from tests.toys import Each, Lin, Rows, loader, quiet


def fit_w(values: list[float], *, module: Lin | None = None, **settings: Any) -> tuple[float, int]:
    module = Lin() if module is None else module
    trainer = quiet(**settings)
    trainer.fit(module, loader(values))
    return module.w.item(), trainer.global_step


def test_last_window_is_divided_by_its_own_length() -> None:
    """Case B39: 6 batches, accumulate 4: steps of 2.5 and 5.5."""
    assert fit_w([1, 2, 3, 4, 5, 6], accumulate=4, max_epochs=1) == (-8.0, 2)


def test_nothing_leaks_over_the_epoch_border() -> None:
    """Case B40: steps after batches 4, 6, 4, 6, and no gradient left when epoch 1 starts."""
    grads: list[Any] = []
    steps: list[tuple[int, int]] = []

    class Watch(mt.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            grads.append(module.w.grad)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            steps.append((batch_idx + 1, trainer.global_step))

    result = fit_w([1, 2, 3, 4, 5, 6], accumulate=4, max_epochs=2, callbacks=[Watch()])
    assert result == (-16.0, 4)
    assert grads == [None, None]
    assert steps == [
        (1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2),
        (1, 2), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4),
    ]  # fmt: skip


def test_gradients_are_reduced_once_per_window_and_on_its_last_micro_batch() -> None:
    """Case B42: rank 0 x=1,3, rank 1 x=2,5, accumulate 2: gradient 2.75 on both.

    The partial last window (7 on rank 0, 9 on rank 1) is reduced too.
    """

    def rank() -> tuple[float, list[float], int]:
        reduced = []

        class Counting(mt.DDPStrategy):
            def setup(self, module: Any, device: Any) -> None:
                super().setup(module, device)
                # torch looks at the names of a hook's parameters and at their annotations.
                self._wrapped.register_comm_hook(  # type: ignore[operator]
                    None,
                    lambda state, bucket: reduced.append(1) or allreduce_hook(None, bucket),  # type: ignore[func-returns-value]
                )

        module, after = Lin(), []
        trainer = quiet(
            accumulate=2,
            max_epochs=1,
            strategy=Counting(),
            callbacks=[Each(lambda t, m, r: after.append(m.w.item()))],
        )
        trainer.fit(module, loader([1, 2, 3, 5, 7, 9]))
        return module.w.item(), after, len(reduced)

    for w, after, reduced in run_ranks(rank):
        assert after == [-2.75, -10.75]
        assert w == -10.75
        assert reduced == 2  # one bucket, two windows


@pytest.mark.parametrize("ranks", [1, 2])
def test_mean_over_tokens_is_the_same_split_or_not(ranks: int) -> None:
    """Case B43: 1 token of 4 and 3 tokens of 0 have the mean 1.0 in any layout."""

    class Tokens(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            valid = batch != -100
            count = valid.sum()
            return {"loss": (self.w * batch * valid).sum() / count, "weight": count}

    data = [torch.tensor([4.0, -100, -100]), torch.tensor([0.0, 0, 0])]

    def fit(batches: list[torch.Tensor], accumulate: int) -> tuple[float, int]:
        module = Tokens()
        trainer = quiet(max_epochs=1, accumulate=accumulate)
        trainer.fit(module, batches)
        return module.w.item(), trainer.global_step

    if ranks == 1:
        assert fit(data, 2) == (-1.0, 1)
        # A window without a single valid token is no step, and poisons nothing.
        empty = torch.tensor([-100.0, -100, -100])
        assert fit([empty, *data], 1) == (-4.0, 2)
        assert fit([empty, *data], 3) == (-1.0, 1)
    else:
        assert run_ranks(lambda: fit(data, 1)) == [(-1.0, 1)] * 2


def test_none_is_weight_zero_for_all_ranks() -> None:
    """Case B16: rank 1 returns None at batch 1: the others' mean stands, nothing hangs."""

    class Skipping(Lin):
        def __init__(self, skip: Any) -> None:
            super().__init__()
            self.skip = skip

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.skip(self.global_rank, batch_idx):
                return None
            return super().training_step(batch, batch_idx)

    def rank(skip: Any) -> tuple[float, int]:
        return fit_w([1.0] * 6, module=Skipping(skip), max_epochs=1)

    one = run_ranks(lambda: rank(lambda rank, batch_idx: rank == 1 and batch_idx == 1))
    assert one == [(-3.0, 3)] * 2
    everybody = run_ranks(lambda: rank(lambda rank, batch_idx: batch_idx == 1))
    assert everybody == [(-2.0, 2)] * 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_tail_counts_each_sample_once_in_any_layout(ranks: int, accumulate: int) -> None:
    """Promise 1: the step after the whole data is the mean over it, tail included."""
    values = [float(v) for v in range(1, 8)]

    def rank() -> float:
        module = Lin()
        sizes = 12 // (ranks * accumulate)
        quiet(max_epochs=1, accumulate=accumulate).fit(module, loader(values, batch_size=sizes))
        return module.w.item()

    results = run_ranks(rank, world_size=ranks) if ranks > 1 else [rank()]
    assert results == pytest.approx([-4.0] * ranks, abs=1e-6)


def test_clipping_takes_place_once_per_window_and_the_norm_is_logged() -> None:
    """Case B48: x = 3, -3, accumulate 2, clip norm 1: w stays 0.0, the norm logged is 0.0."""
    rows = Rows()
    w, steps = fit_w(
        [3, -3],
        accumulate=2,
        max_epochs=1,
        gradient_clip_norm=1.0,
        log_every_n_steps=1,
        loggers=[rows],
        run_dir="run",
    )
    assert (w, steps) == (0.0, 1)
    assert rows.column("grad_norm") == [0.0]


def test_clipping_by_norm_and_by_value() -> None:
    rows = Rows()
    w, _ = fit_w([3], gradient_clip_norm=1.0, log_every_n_steps=1, loggers=[rows], run_dir="run")
    assert w == pytest.approx(-1.0, abs=1e-5)
    assert rows.column("grad_norm") == [3.0]
    assert fit_w([3], gradient_clip_value=0.5)[0] == -0.5


def test_one_row_per_optimizer_step() -> None:
    """Case B45: 8 batches, accumulate 4: rows at steps 1, 2; every second step: one row."""

    class Logging(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", batch.mean())
            return super().training_step(batch, batch_idx)

    def rows(every: int) -> Rows:
        kept = Rows()
        fit_w(
            [1, 2, 3, 4, 5, 6, 7, 8],
            module=Logging(),
            accumulate=4,
            log_every_n_steps=every,
            loggers=[kept],
            run_dir="run",
        )
        return kept

    assert rows(1).steps == [1, 2]
    assert rows(1).column("x") == [2.5, 6.5]
    assert rows(2).steps == [2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_scheduler_counts_optimizer_steps(ranks: int) -> None:
    """Case B46: 8 batches per rank, accumulate 4: last_epoch 2 and lr 0.25 on 1 and 2 ranks."""

    class Stepping(Lin):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"},
            }

    def rank() -> tuple[int, float]:
        module = Stepping()
        quiet(max_epochs=1, accumulate=4).fit(module, loader([1.0] * 8 * ranks))
        return module.scheduler.last_epoch, module.scheduler.get_last_lr()[0]

    results = run_ranks(rank, world_size=ranks) if ranks > 1 else [rank()]
    assert results == [(2, 0.25)] * ranks


def test_accumulation_by_epoch() -> None:
    accumulator = mt.Accumulator({0: 1, 2: 4})
    assert [accumulator.window_size(epoch) for epoch in range(4)] == [1, 1, 4, 4]
    assert fit_w([1.0] * 8, accumulate={0: 1, 2: 4}, max_epochs=3)[1] == 8 + 8 + 2


@pytest.mark.parametrize("size", [0, -1, 1.5, True, {0: 0}, {-1: 2}])
def test_refuses_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(SettingError, match="R01"):
        mt.Accumulator(size)


def test_unsized_training_ends_its_last_window_where_the_data_ends() -> None:
    """An iterable without a length: the last, shorter window is stepped and divided rightly."""

    class Stream:
        def __iter__(self) -> Any:
            return iter([torch.tensor([float(x)]) for x in (1, 2, 3, 4, 5, 6)])

    module = Lin()
    trainer = quiet(max_epochs=2, accumulate=4)
    trainer.fit(module, Stream())
    assert (module.w.item(), trainer.global_step) == (-16.0, 4)


def test_ranks_that_run_dry_at_different_times_train_every_item() -> None:
    """Case B10: rank 0 has 3 batches, rank 1 has 5: 5 steps on both, then the epoch ends."""

    class Uneven(torch.utils.data.IterableDataset[torch.Tensor]):
        shards_itself = True

        def __iter__(self) -> Any:
            count = 3 if dist.rank() == 0 else 5
            return iter([torch.tensor(float(x + 1)) for x in range(count)])

    def rank() -> tuple[float, int]:
        module = Lin()
        trainer = quiet(max_epochs=1)
        trainer.fit(module, torch.utils.data.DataLoader(Uneven(), batch_size=1))
        return module.w.item(), trainer.global_step

    # Steps of mean(1,1), mean(2,2), mean(3,3), 4, 5.
    assert run_ranks(rank) == [(-15.0, 5)] * 2
