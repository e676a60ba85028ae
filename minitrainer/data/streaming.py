"""Batches that can only be read one after the other: iterable datasets and other iterables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker

from minitrainer.data.items import WorkerStart
from minitrainer.data.loading import Layout, is_stock, rebuild, tell_changes
from minitrainer.data.sampling import length_of, refuse_dealing, tell_epoch, tell_samplers
from minitrainer.data.seeding import PrivateRng, derive_seed, mix, preserved_rng, seed_cpu
from minitrainer.errors import LoaderError

_logger = logging.getLogger(__name__)
_END = object()


class Stream:
    """Batches that can only be read one after the other, every rank reading all of them.

    With several workers, each item of an IterableDataset is read by all of them and kept by one.
    A dataset or iterable with the attribute `shards_itself = True` is left alone: it must look
    at its rank (RANK, WORLD_SIZE) and at `get_worker_info()` and give each of them its own items.

    `num_batches` is the length of the whole stream in batches, None when unknown.
    `dealt_by_source` says that the stream of each rank is its own already.

    Args:
        source: A DataLoader of an IterableDataset, or any iterable of batches.
        layout: The share of this process.
        stage: What the stream is for, for messages.
    """

    def __init__(self, source: Any, layout: Layout, stage: str) -> None:
        self._layout = layout
        self._stage = stage
        self._generator = torch.Generator()
        self._was_read = False
        stock = is_stock(source)
        shards_itself = bool(getattr(source.dataset if stock else source, "shards_itself", False))
        self.dealt_by_source = shards_itself and layout.world_size > 1
        self.batch_size: int | None = source.batch_size if stock else None
        in_workers = stock and source.num_workers > 0
        self._in_process = not in_workers
        self._source: Iterable[Any] = source
        self._in_worker: _InWorker | None = None
        if stock:
            hears = stage == "train"
            tell_changes(source, hears=hears)
            self.num_batches = _stream_length(source, shards_itself=shards_itself)
            dataset = source.dataset
            if in_workers:
                dataset = self._in_worker = _InWorker(
                    dataset,
                    hears=hears,
                    shards_itself=shards_itself,
                )
            self._source = rebuild(
                source,
                self._generator,
                hears=hears,
                dataset=dataset,
                collate_fn=_undisturbing(source.collate_fn),
                worker_init_fn=WorkerStart(source.worker_init_fn),
                batch_size=source.batch_size,
                drop_last=source.drop_last,
            )
        else:
            if isinstance(source, DataLoader):
                refuse_dealing(source.sampler, source.batch_sampler, replaceable=False)
            self.num_batches = length_of(source)
        if self.dealt_by_source:
            self.num_batches = None
        if not shards_itself:
            self._tell_readers(source.num_workers if stock else 0)

    def open(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Up to its first batch the source runs under random states seeded by (seed, epoch), so
        that one which shuffles when it starts does so alike on all ranks and on resume. The rest
        goes on under them, as ranks and workers that read the same stream must see the same one:
        in this process that costs some 70 us for each batch, and leaves its own states alone. A
        source of which each rank and worker has its own share goes on under their own seeds.

        Raises:
            LoaderError: The source is a one-shot iterator that was read before.
        """
        if self._was_read and isinstance(self._source, Iterator):
            raise LoaderError(
                f"The {self._stage} loader is a {type(self._source).__name__}, which can be "
                "read only once.",
                "A second pass would find it empty.",
                "Give something that can be iterated again: a DataLoader, a list, or an object "
                "whose __iter__ is the generator function.",
            )
        self._was_read = True
        if isinstance(self._source, DataLoader):
            samplers = self._source.sampler, self._source.batch_sampler
            tell_samplers(*samplers, seed=self._layout.seed, epoch=epoch)
        return self._read(epoch)

    def _tell_readers(self, num_workers: int) -> None:
        readers = [
            f"{number} {name}"
            for number, name in ((self._layout.world_size, "ranks"), (num_workers, "workers"))
            if number > 1
        ]
        if readers:
            _logger.info(
                "Each of %s reads the whole %s stream and keeps its share. Set shards_itself = "
                "True on a dataset that reads only the share of its rank and worker.",
                " x ".join(readers),
                self._stage,
            )

    def _read(self, epoch: int) -> Iterator[Any]:
        rank, _, seed = self._layout
        # Ranks that read the same stream must see the same one, whatever its workers draw.
        stream_rank = rank if self.dealt_by_source else 0
        own_seed = derive_seed(seed, "workers", epoch, stream_rank)
        self._generator.manual_seed(own_seed)
        order_seed = derive_seed(seed, "order", epoch)
        if self._in_worker is not None:
            self._in_worker.start(epoch, order_seed, own_seed)
        rng = PrivateRng(order_seed)
        with rng:
            batches = iter(self._source)
            batch = next(batches, _END)
        if self.dealt_by_source:
            rng = PrivateRng(own_seed)
        while batch is not _END:
            yield batch
            with rng if self._in_process else nullcontext():
                batch = next(batches, _END)


class _InWorker(IterableDataset[Any]):
    """A dataset in each of n workers: every n-th item of it, or all if it shards itself.

    While a dataset that does not shard itself yields, it is kept from seeing that it is in a
    worker: one that shares its items out over the workers by itself would otherwise lose most of
    them. It is read under the same random states in all workers, so that they see the same items.

    Args:
        dataset: The user's dataset.
        hears: Whether it is to be told of the epoch.
        shards_itself: Whether each worker gets items of its own from it.
    """

    def __init__(self, dataset: Any, *, hears: bool, shards_itself: bool) -> None:
        self.dataset = dataset
        self._hears = hears
        self._shards_itself = shards_itself
        self._told = 0
        # In shared memory, as workers that live on hold a copy of this object: the epoch, the
        # seed of what all of them read, and that of what each has for itself.
        self._shared = torch.zeros(3, dtype=torch.int64).share_memory_()

    def start(self, epoch: int, order_seed: int, own_seed: int) -> None:
        """Let the workers start an epoch; the dataset of this process has been told of it."""
        self._told = epoch
        self._shared.copy_(torch.tensor([epoch, order_seed, own_seed]))

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        items = self._items(info, *self._shared.tolist())
        return items if self._shards_itself else islice(items, info.id, None, info.num_workers)

    def _items(self, info: Any, epoch: int, order_seed: int, own_seed: int) -> Iterator[Any]:
        if self._hears and epoch != self._told:
            self._told = epoch
            tell_epoch(self.dataset, epoch)
        hidden = nullcontext if self._shards_itself else partial(_hidden, info)
        seed_cpu(order_seed)
        with hidden():
            items = iter(self.dataset)
            item = next(items, _END)
        if self._shards_itself:
            seed_cpu(mix(own_seed, info.id))
        while item is not _END:
            yield item
            with hidden():
                item = next(items, _END)


@contextmanager
def _hidden(info: Any) -> Iterator[None]:
    # The variable behind torch's get_worker_info; the collate function may ask for it again.
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _undisturbing(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a collate function after which the items go on as if it had drawn nothing."""
    if collate in (default_collate, default_convert):
        return collate
    return partial(_collated_aside, collate)


def _collated_aside(collate: Callable[[Any], Any], items: Any) -> Any:
    with preserved_rng():
        seed_cpu(int(torch.randint(2**62, ())))
        return collate(items)


def _stream_length(loader: DataLoader[Any], *, shards_itself: bool) -> int | None:
    """Return the batches of a stream: those of each worker, as each one has a last batch."""
    num_items = length_of(loader.dataset)
    num_workers = max(1, loader.num_workers)
    if num_items is None or (shards_itself and num_workers > 1):
        return None
    if loader.batch_size is None:
        return num_items
    shares = [len(range(worker, num_items, num_workers)) for worker in range(num_workers)]
    spare = 0 if loader.drop_last else loader.batch_size - 1
    return sum((share + spare) // loader.batch_size for share in shares)
