"""One global batch laid out in three ways, and the loaders that make it so.

The order of samples is a pure function of (seed, epoch), so the same samples come in the same
windows in all three; that is a promise of the trainer, which a comparison checks on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import Sampler

from minitrainer.data import TrainingData
from minitrainer.data.loading import is_map_style, rebuild
from minitrainer.data.sampling import sampling_of
from minitrainer.datamodule import DataModule
from minitrainer.errors import LoaderError


class Layout(NamedTuple):
    """How a window of `ranks * micro_batches * joined` batches of the recipe is laid out.

    Attributes:
        key: The letter that tables call it by.
        ranks: Processes.
        micro_batches: Micro-batches per rank and window.
        joined: Batches of the recipe in one micro-batch.
    """

    key: str
    ranks: int
    micro_batches: int
    joined: int

    def describe(self, batch_size: int | None) -> str:
        """Return the layout in words, with the sizes of its micro-batches where known."""
        size = "one batch" if batch_size is None else str(batch_size * self.joined)
        ranks = "1 process" if self.ranks == 1 else f"{self.ranks} ranks"
        accumulated = f"{self.micro_batches} x " if self.micro_batches > 1 else ""
        return f"({self.key}) {ranks} x {accumulated}{size}"


class Layouts(NamedTuple):
    """The three ways.

    Attributes:
        whole: None where batches cannot be joined before they are fetched.
        ranks: Is always there.
        accumulated: None where the module steps its optimizers by itself.
    """

    whole: Layout | None
    ranks: Layout
    accumulated: Layout | None

    @classmethod
    def of(
        cls, num_ranks: int, window_size: int, *, joinable: bool, accumulates: bool = True
    ) -> Layouts:
        """Return the layouts of a recipe that accumulates `window_size` micro-batches.

        Raises:
            LoaderError: There is nothing to compare the ranks with.
        """
        if not joinable and not accumulates:
            raise LoaderError(
                "There is no run in one process that the ranks could be compared with.",
                "The batches of this loader cannot be joined, and a module that steps its "
                "optimizers by itself does not accumulate.",
                "Give a DataLoader of a dataset with indices.",
            )
        in_window = num_ranks * window_size
        return cls(
            Layout("a", 1, 1, in_window) if joinable else None,
            Layout("b", num_ranks, window_size, 1),
            Layout("c", 1, in_window, 1) if accumulates else None,
        )

    @property
    def reference(self) -> Layout:
        """What the others are compared with."""
        reference = self.whole or self.accumulated
        assert reference is not None
        return reference

    @property
    def others(self) -> list[Layout]:
        """What is compared with the reference."""
        rest = [self.accumulated] if self.whole and self.accumulated else []
        return [self.ranks, *rest]


def can_join(loader: Any) -> bool:
    """Return whether its batches can be joined by what they are fetched by, their indices."""
    return is_map_style(loader) and sampling_of(loader).unit != "key"


class OneProcessData(DataModule):
    """The user's data for a layout of one process.

    Args:
        data: The user's DataModule.
        layout: A layout of one process.
        num_ranks: The ranks whose share of the data is to be trained on here.
        seed: The seed of the run.
        limit: The recipe's `limit_train_batches`, which counts batches per rank.
    """

    def __init__(
        self, data: DataModule, layout: Layout, *, num_ranks: int, seed: int, limit: Any
    ) -> None:
        self._data = data
        self._layout = layout
        self._num_ranks = num_ranks
        self._seed = seed
        self._limit = limit

    def prepare_data(self) -> None:
        """Prepare the user's data."""
        self._data.prepare_data()

    def setup(self, stage: str) -> None:
        """Set the user's data up."""
        self._data.setup(stage)

    def train_dataloader(self) -> Iterable[Any] | None:
        """Return the user's loader, with batches joined, ending where that of the ranks does."""
        loader: Any = self._data.train_dataloader()
        if not can_join(loader):
            return cast(Iterable[Any] | None, loader)
        dealt = TrainingData(
            loader, rank=0, world_size=self._num_ranks, seed=self._seed, limit=self._limit
        )
        sampling, joined = sampling_of(loader), self._layout.joined
        if sampling.unit == "sample":
            # What drop_last and the limit leave out on several ranks is cut off here; a window
            # may be short, but not one batch shorter than on the ranks.
            return rebuild(
                loader,
                torch.Generator(),
                batch_size=sampling.batch_size * joined,
                sampler=_First(sampling.source, dealt.num_samples),
                drop_last=sampling.drop_last and dealt.num_samples is None,
            )
        rounds = dealt.num_batches
        batches = None if rounds is None else rounds * self._num_ranks
        return rebuild(
            loader,
            torch.Generator(),
            batch_sampler=_Joined(_First(sampling.source, batches), joined),
        )

    def val_dataloader(self) -> Iterable[Any] | None:
        """Return the user's validation loader as it is."""
        return self._data.val_dataloader()

    def teardown(self, stage: str) -> None:
        """Take the user's data down."""
        self._data.teardown(stage)


class _First(Sampler[Any]):
    """The first `number` units of a sampler, all of them if None."""

    def __init__(self, sampler: Any, number: int | None) -> None:
        self.sampler = sampler  # under this name the trainer finds its generators and set_epoch
        self._number = number

    def __len__(self) -> int:
        length = len(self.sampler)
        return length if self._number is None else min(length, self._number)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self._number)


class _Joined(Sampler[list[Any]]):
    """The batches of a batch sampler, so many joined in one."""

    def __init__(self, sampler: _First, joined: int) -> None:
        self.sampler = sampler
        self._joined = joined

    def __len__(self) -> int:
        return (len(self.sampler) + self._joined - 1) // self._joined

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.sampler)
        while parts := list(islice(batches, self._joined)):
            yield [index for part in parts for index in part]
