"""One run of the user's recipe in one layout, recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from minitrainer.data import draw_order
from minitrainer.data.loading import is_map_style, is_stock
from minitrainer.data.sampling import sampling_of
from minitrainer.data.seeding import PrivateRng
from minitrainer.datamodule import DataModule
from minitrainer.errors import LoaderError, MinitrainerError
from minitrainer.evaluation import VALIDATION
from minitrainer.launch import run_on_local_ranks
from minitrainer.parity.adapt import Changes, adapt, batch_norms, default_dtype, dropout_layers
from minitrainer.parity.layouts import Layout, Layouts, OneProcessData, can_join
from minitrainer.parity.record import Record, Recorder
from minitrainer.parity.samples import item_digest
from minitrainer.plugins import Accumulator
from minitrainer.protocols import Accumulator as AnyAccumulator
from minitrainer.recipe.build import Built, build
from minitrainer.recipe.check import check_recipe
from minitrainer.recipe.load import Recipe
from minitrainer.recipe.planned import Planned

_VALIDATION_BATCHES = 4
_ITEMS_LOOKED_AT = 4
_UNCHANGED = Changes()


@dataclass(frozen=True)
class Facts:
    """What is known of a recipe before anything runs.

    Attributes:
        layouts: The layouts to compare.
        batch_size: The recipe's, None when it is not one number.
        dropouts: Names of dropout layers.
        batch_norms: Names of batch norm layers in training mode.
        synced_batch_norm: Whether the recipe has `sync_batchnorm: true`.
        window_size: Micro-batches that the recipe accumulates.
    """

    layouts: Layouts
    batch_size: int | None
    dropouts: list[str]
    batch_norms: list[str]
    synced_batch_norm: bool
    window_size: int


class Runner:
    """Run a recipe in any layout, each time from new objects.

    Args:
        recipe: The user's recipe.
        num_ranks: Ranks of the layout with ranks.
        steps: Optimizer steps of a run.

    Raises:
        RecipeError: The recipe has problems.
        LoaderError: It has no training loader.
    """

    def __init__(self, recipe: Recipe, num_ranks: int, steps: int) -> None:
        settings = check_recipe(recipe).trainer
        self._recipe = recipe
        self._num_ranks = num_ranks
        self._steps = steps
        self._limit = settings.get("limit_train_batches")
        self._clip_norm = settings.get("gradient_clip_norm")
        self._seed = settings.get("seed", 0)
        self._weights: dict[str, torch.Tensor] | None = None
        self.dtype = torch.float64
        self.refusal: str | None = None
        """Why the module could not be run in float64, if so."""
        self.facts = self._look(_window_size(settings.get("accumulate", 1)))

    def _look(self, window_size: int) -> Facts:
        built = self._build(Layout("a", 1, 1, 1), 1)
        with _opened(built.datamodule) as data:
            loader: Any = data.train_dataloader()
            if loader is None:
                raise LoaderError(
                    "There is no loader for training.",
                    "The runs to be compared are training runs.",
                    "Let train_dataloader return one.",
                )
            size = sampling_of(loader).batch_size if can_join(loader) else None
            val_loader = data.val_dataloader()
        config: dict[str, Any] = self._recipe.config.get("trainer") or {}
        self._validates = (
            val_loader is not None
            and VALIDATION.is_written(built.module)
            and config.get("limit_val_batches") != 0
        )
        return Facts(
            layouts=Layouts.of(
                self._num_ranks,
                window_size,
                joinable=can_join(loader),
                accumulates=built.module.automatic_optimization,
            ),
            batch_size=size,
            dropouts=list(dropout_layers(built.module)),
            batch_norms=list(batch_norms(built.module)),
            synced_batch_norm=bool(config.get("sync_batchnorm")),
            window_size=window_size,
        )

    def run_reference(self) -> Record:
        """Run the reference in float64, or in float32 if the module refuses that.

        Float64 tells a fault from rounding: two right layouts agree to twelve digits.
        """
        reference = self.facts.layouts.reference
        try:
            record = self.run(reference)
        except MinitrainerError:
            raise
        except Exception as error:  # noqa: BLE001 whatever the user's code raises about types
            self.dtype = torch.float32
            self.refusal = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            return self.run(reference)
        if not record.in_double:
            self.refusal = "its loss is not float64 although all that goes in is"
        return record

    def run(
        self, layout: Layout, *, changes: Changes = _UNCHANGED, steps: int | None = None
    ) -> Record:
        """Run the recipe and validate it on the weights of the reference; return the record.

        Args:
            layout: The layout.
            changes: What to change in the module. With changes nothing is validated.
            steps: Optimizer steps, if not all.
        """
        built = self._build(layout, steps or self._steps)
        trainer, module = built.trainer, built.module
        recorder = next(c for c in trainer.callbacks if isinstance(c, Recorder))
        data: DataModule = built.datamodule
        if layout.ranks == 1:
            data = OneProcessData(
                data, layout, num_ranks=self._num_ranks, seed=self._seed, limit=self._limit
            )
        adapt(module, recorder, changes, self.dtype)

        def fit_and_validate() -> dict[str, Any]:
            trainer.fit(module, datamodule=data)
            if self._validates and changes == _UNCHANGED:
                if self._weights is None:
                    self._weights = module.state_dict()
                module.load_state_dict(self._weights)
                recorder.record.validation = trainer.validate(module, datamodule=data)
            return recorder.record.as_plain()

        with _quiet(), default_dtype(self.dtype):
            if layout.ranks == 1:
                fit_and_validate()
                return recorder.record
            # One start of the ranks for both, as under torchrun.
            return Record.from_plain(run_on_local_ranks(fit_and_validate, layout.ranks))

    def items_change(self) -> bool:
        """Return whether the training dataset gives another item when it is asked once more."""
        built = self._build(Layout("a", 1, 1, 1), 1)
        with _quiet(), _opened(built.datamodule) as data:
            loader: Any = data.train_dataloader()
            if not is_stock(loader):
                return False
            dataset, looks = loader.dataset, []
            for seed in (1, 1) if is_map_style(loader) else (1, 2):
                # The trainer seeds each item of a dataset with indices, but not those of a stream.
                with PrivateRng(seed):
                    items = (
                        (dataset[index] for index in self._first_indices(loader))
                        if is_map_style(loader)
                        else islice(dataset, _ITEMS_LOOKED_AT)
                    )
                    looks.append([item_digest(item) for item in items])
        return looks[0] != looks[1]

    def _first_indices(self, loader: Any) -> list[Any]:
        first = draw_order(loader, self._seed, 0)[:_ITEMS_LOOKED_AT]
        return list(first[0]) if isinstance(first[0], list) else first

    def _build(self, layout: Layout, steps: int) -> Built:
        """Build the user's recipe with those settings changed that make up a layout."""
        given: dict[str, Any] = dict(self._recipe.config.get("trainer") or {})
        alone = layout.ranks == 1
        val_limit = given.get("limit_val_batches")
        if not isinstance(val_limit, int) or val_limit > _VALIDATION_BATCHES:
            val_limit = _VALIDATION_BATCHES
        recorder = {
            "_target_": f"{Recorder.__module__}.{Recorder.__qualname__}",
            "steps": steps,
            "clip_norm": given.get("gradient_clip_norm"),
        }
        ours = {
            "accelerator": "cpu",
            "devices": layout.ranks,
            "strategy": None if alone else given.get("strategy"),
            "precision": "fp32",
            "accumulate": layout.micro_batches,
            "min_epochs": 0,
            # On one process the data end where those of the ranks do.
            "limit_train_batches": None if alone else self._limit,
            "limit_val_batches": val_limit * (self._num_ranks if alone else 1),
            "log_every_n_steps": 1,
            "run_dir": None,
            "callbacks": [recorder],
            "loggers": [],
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "dry_run": False,
        }
        config = {**self._recipe.config, "trainer": {**given, **ours}}
        return build(replace(self._recipe, config=config))


def _window_size(accumulate: Any) -> int:
    if isinstance(accumulate, Planned):
        assert accumulate.target is not None
        accumulate = accumulate.target(**accumulate.arguments)
    given = isinstance(accumulate, AnyAccumulator)
    accumulator: AnyAccumulator = accumulate if given else Accumulator(accumulate)
    return accumulator.window_size(0)


@contextmanager
def _opened(data: DataModule) -> Iterator[DataModule]:
    data.prepare_data()
    data.setup("fit")
    try:
        yield data
    finally:
        data.teardown("fit")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the ledger and the like: ten runs of the same recipe would say it ten times."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)
