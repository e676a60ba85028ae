"""The data of a recipe as its ranks see them: the same on all, dealt out whole, fetched in time.

Call everything on all ranks: they compare notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from minitrainer import dist
from minitrainer.data import (
    EvaluationData,
    Share,
    TrainingData,
    coverage,
    derive_seed,
    draw_order,
    preserved_rng,
    seed_everything,
)
from minitrainer.data.loading import is_map_style
from minitrainer.data.sampling import length_of, order_length, sampling_of
from minitrainer.data.seeding import PrivateRng
from minitrainer.datamodule import DataModule
from minitrainer.doctor import recipe_codes as codes
from minitrainer.doctor.finding import Finding
from minitrainer.launch import Environment, threads_per_rank
from minitrainer.parity.samples import item_digest
from minitrainer.run import Sources

_PLACE = "data"
_MOST_SAMPLES = 50_000
"""Samples per rank whose numbers are compared; of larger data the first ones."""


@contextmanager
def opened(datamodule: DataModule, seed: int) -> Iterator[Sources]:
    """Hold the loaders of `fit` open, made under the seed that the trainer makes them under."""
    sources = Sources.of(None, None, datamodule)
    try:
        with preserved_rng():
            seed_everything(derive_seed(seed, "setup"))
            loaders = sources.open("fit")
        yield loaders
    finally:
        sources.close("fit")


class Shares:
    """What the ranks are dealt of the training and the validation data.

    Args:
        loaders: The user's.
        environment: The place of this rank.
        seed: The seed of the run.
    """

    def __init__(self, loaders: Sources, environment: Environment, seed: int) -> None:
        self._train: Any = loaders.train
        self._validation: Any = loaders.evaluation
        self._environment = environment
        self._seed = seed
        self.rows: list[tuple[str, str]] = []
        self.batch_size: int | None = None
        """Samples of a full micro-batch of one rank, None when unknown."""

    def examine(self) -> Iterator[Finding]:
        """Yield what is wrong, the training data first."""
        if self._train is not None:
            data = TrainingData(self._train, **self._layout())
            self.batch_size = data.batch_size
            text = [_count(data.num_samples), self._rounds(data)]
            yield from self._same_data(self._train, "training")
            yield from self._covered(self._train, "training", self._dealt_training, text)
            yield from self._rest(data)
        if self._validation is not None:
            validation = EvaluationData(self._validation, stage="validation", **self._layout())
            text = [_count(validation.num_samples)]
            yield from self._same_data(self._validation, "validation")
            yield from self._covered(self._validation, "validation", self._dealt_validation, text)
            yield from self._left_out()
        yield from self._workers()

    # Is it the same data -----------------------------------------------------------------------

    def _same_data(self, loader: Any, stage: str) -> Iterator[Finding]:
        dataset = loader.dataset if isinstance(loader, DataLoader) else loader
        lengths = dist.gather_objects(length_of(dataset))
        if len(set(lengths)) > 1:
            yield Finding(
                codes.DATA_OF_A_RANK,
                "error",
                _PLACE,
                f"The {stage} data have another length on each rank: "
                f"{', '.join(map(str, lengths))}.",
                "Give all ranks the same data; the trainer shares them out.",
            )
        elif is_map_style(loader) and lengths[0]:
            yield from self._same_items(loader, stage, lengths[0])

    def _same_items(self, loader: DataLoader[Any], stage: str, length: int) -> Iterator[Finding]:
        if dist.any_rank(not self._takes_numbers(loader)):
            return
        indices = sorted({0, length // 2, length - 1})
        looks = []
        for _ in range(2):
            with PrivateRng(derive_seed(self._seed, "doctor")):
                looks.append([item_digest(loader.dataset[index]) for index in indices])
        if dist.any_rank(looks[0] != looks[1]):
            yield Finding(
                codes.DATA_WITH_MEMORY,
                "warning",
                _PLACE,
                f"The {stage} dataset gives another item when it is asked for the same one again.",
                "Draw from the global generators of torch, numpy or random, which the trainer "
                "seeds for each item; keep nothing between items.",
            )
            return
        theirs = dist.gather_objects(looks[0])
        others = [
            index for index, *seen in zip(indices, *theirs, strict=True) if len(set(seen)) > 1
        ]
        if others:
            yield Finding(
                codes.DATA_OF_A_RANK,
                "error",
                _PLACE,
                f"Item {others[0]} of the {stage} data is another one on another rank (seen in "
                f"{len(others)} of {len(indices)}): a split at random, or code that looks at the "
                "rank.",
                "Seed the split with a generator of its own; no rank, RANK or world_size in data "
                "code.",
            )

    def _takes_numbers(self, loader: DataLoader[Any]) -> bool:
        if order_length(loader) is None:
            return False
        first = draw_order(loader, self._seed, 0)[0]
        return isinstance(first[0] if isinstance(first, list) and first else first, int)

    # Is it dealt out whole ---------------------------------------------------------------------

    def _covered(
        self,
        loader: Any,
        stage: str,
        deal: Callable[[DataLoader[Any], int], Share | None],
        text: list[str],
    ) -> Iterator[Finding]:
        numbers = _numbers(loader)
        share = None
        if numbers is not None:
            size = sampling_of(loader).batch_size
            share = deal(numbers, max(1, _MOST_SAMPLES // size))
        shares = dist.gather_objects(share)
        if all(part is not None for part in shares):
            covered = coverage(shares)
            text.append(str(covered))
            if not covered.whole:
                yield Finding(
                    codes.ORDER_OF_A_RANK,
                    "error",
                    _PLACE,
                    f"The {covered.dealt} {stage} samples that the ranks are dealt are not those "
                    "of one order: some are lost or repeated.",
                    "The sampler looks at the rank, or at random numbers that nobody seeds: leave "
                    "sharing to the trainer, and give the sampler a set_epoch that seeds it.",
                )
        self.rows.append((stage, ", ".join(filter(None, text))))

    def _dealt_training(self, numbers: DataLoader[Any], limit: int) -> Share | None:
        data = TrainingData(numbers, **self._layout(), limit=limit)
        _exhaust(data.epoch(0))
        return data.share()

    def _dealt_validation(self, numbers: DataLoader[Any], limit: int) -> Share | None:
        data = EvaluationData(numbers, stage="validation", **self._layout(), limit=limit)
        _exhaust(data)
        return data.share()

    def _rounds(self, data: TrainingData) -> str:
        if data.batch_size is None or data.num_batches is None:
            return ""
        ranks = self._environment.world_size
        return f"{data.num_batches} rounds of {ranks} x {data.batch_size}"

    def _rest(self, data: TrainingData) -> Iterator[Finding]:
        ranks, size = self._environment.world_size, data.batch_size
        if size is None or data.num_samples is None:
            return
        fix = "Nothing: the trainer weighs batches by their samples, and no rank waits."
        if data.num_dropped:
            yield Finding(
                codes.DIVISIBLE_LENGTH,
                "note",
                _PLACE,
                f"drop_last leaves {data.num_dropped} of {data.num_samples + data.num_dropped} "
                f"training samples out of each epoch, as {ranks} x {size} do not divide them.",
                "Set drop_last=False to train on all of them.",
            )
        rest = data.num_samples % (ranks * size)
        if rest:
            dry = max(0, ranks - rest)
            what = f"and {dry} of {ranks} ranks have none of them" if dry else "shared by all ranks"
            yield Finding(
                codes.UNEVEN_SHARES,
                "note",
                _PLACE,
                f"The last round of an epoch has {rest} of {ranks * size} samples, {what}.",
                fix,
            )

    def _left_out(self) -> Iterator[Finding]:
        loader = self._validation
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            yield Finding(
                codes.PADDED_VALIDATION,
                "warning",
                _PLACE,
                "The validation loader has a DistributedSampler, which repeats samples to make "
                "the shares of the ranks equal; the trainer undoes that, other code does not.",
                "Leave the sampler out: the trainer shares validation data itself.",
            )
        if not is_map_style(loader):
            return
        sampling, length = sampling_of(loader), order_length(loader)
        if sampling.drop_last and length is not None and length % sampling.batch_size:
            yield Finding(
                codes.PADDED_VALIDATION,
                "warning",
                _PLACE,
                f"The validation loader has drop_last=True: {length % sampling.batch_size} of "
                f"{length} samples are left out.",
                "Set drop_last=False; ranks may have different numbers of batches.",
            )

    # Who fetches it ----------------------------------------------------------------------------

    def _workers(self) -> Iterator[Finding]:
        loaders = (self._train, self._validation)
        workers = max(getattr(loader, "num_workers", 0) for loader in loaders)
        ranks, cores = self._environment.local_world_size, threads_per_rank(1)
        if workers * ranks > cores:
            yield Finding(
                codes.DATA_WAIT,
                "warning",
                _PLACE,
                f"{workers} loader workers on each of {ranks} local ranks are {workers * ranks} "
                f"processes for {cores} cores.",
                f"Set num_workers to {cores // ranks} or less.",
            )

    def _layout(self) -> dict[str, int]:
        place = self._environment
        return {"rank": place.rank, "world_size": place.world_size, "seed": self._seed}


class _Numbers(Dataset[int]):
    """Stands for a dataset of which only the numbers of the samples matter; nothing is read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def _numbers(loader: Any) -> DataLoader[Any] | None:
    """Return a loader that draws what this one draws but fetches nothing; None if it cannot."""
    if not is_map_style(loader) or loader.batch_sampler is None or order_length(loader) is None:
        return None
    length = length_of(loader.dataset)
    if length is None:
        return None
    return DataLoader(_Numbers(length), batch_sampler=loader.batch_sampler, collate_fn=len)


def _exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def _count(number: int | None) -> str:
    return "length unknown" if number is None else f"{number:,} samples"
