"""What one rank trains on: its share of every epoch, and of the rest of one after a resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from minitrainer.data.dealing import deal_of
from minitrainer.data.digest import Share
from minitrainer.data.loading import Layout, check_loader
from minitrainer.data.sampling import tell_epoch
from minitrainer.protocols import EpochData


class TrainingData:
    """The training loader, shared out over the ranks.

    A round is one micro-batch of every rank. Every sample of an epoch is trained once, on one
    rank, in the order that the loader's sampler draws, which is a pure function of (seed, epoch):

    - A DataLoader of a map-style dataset: round k is `order[k*B*W:(k+1)*B*W]` for a batch size
      of B on W ranks, and rank r takes every W-th sample of it from the r-th on. The last round
      may be short, and leave a rank dry; with `drop_last` it is dropped.
    - With a batch sampler of one's own, `batch_size=None` or a list of batches: rank r takes
      every W-th batch from the r-th on; the last round may leave ranks dry.
    - A DataLoader of an IterableDataset, or any other iterable of batches: likewise, but each
      rank must read the batches of all (see `Stream`). The length of one that has a length is
      taken at its word: an epoch ends there, with dry micro-batches if the batches did before.

    The cursor of a resume is a number of samples over all ranks. Data with a sampler go on behind
    it at no cost, on any layout. Where nothing tells the sizes of batches beforehand
    (`batch_size=None`, streams) they are read again up to there.

    Args:
        loader: A torch DataLoader, or an iterable of batches.
        rank: This rank.
        world_size: The number of ranks.
        seed: The seed of the run.
        limit: The most micro-batches per rank and epoch, or a fraction of the epoch.

    Raises:
        LoaderError: The loader is of a kind that cannot be used or shared.
        EmptyDataError: The loader has no samples.
        BatchSizeError: A list has a batch whose samples cannot be counted.
        SettingError: The limit makes no sense.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        limit: int | float | None = None,
    ) -> None:
        check_loader(loader, "train")
        self._deal = deal_of(loader, Layout(rank, world_size, seed), limit)
        self._told: Any = loader.dataset if isinstance(loader, DataLoader) else loader

    @property
    def num_batches(self) -> int | None:
        """Micro-batches per rank in a whole epoch, dry ones included; None when unknown."""
        return self._deal.num_batches

    @property
    def num_samples(self) -> int | None:
        """Samples of a whole epoch over all ranks, within the limit; None when unknown."""
        return self._deal.num_samples

    @property
    def num_dropped(self) -> int | None:
        """Samples of a whole epoch that `drop_last` leaves out; None when unknown."""
        return self._deal.num_dropped

    @property
    def batch_size(self) -> int | None:
        """Samples of a full micro-batch of one rank; None when unknown or not one number."""
        return self._deal.batch_size

    def epoch(self, epoch: int, *, samples_seen: int = 0, batch_idx: int = 0) -> EpochData:
        """Return the share of this rank in (the rest of) an epoch, to be iterated once.

        `set_epoch(epoch)` of samplers and datasets is called here, before workers start.

        Args:
            epoch: The epoch, from 0.
            samples_seen: Samples of the epoch that were trained before, over all ranks.
            batch_idx: The number of the first micro-batch.

        Raises:
            LoaderError: The loader is an iterator, and this is not the first epoch.
        """
        tell_epoch(self._told, epoch)
        return self._deal.epoch(epoch, samples_seen, batch_idx)

    def share(self) -> Share | None:
        """Return which samples this rank was dealt in the newest epoch, for `coverage`.

        Only for the first epoch that was dealt out from its start to its end, and once; only
        where a sampler of known length names the samples. None otherwise, on all ranks alike.
        """
        return self._deal.share()
