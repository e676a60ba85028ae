"""A digest of indices: shows that the shares of the ranks are disjoint and make up the order.

Each rank makes a digest of the samples it was dealt and one of the order they were dealt from.
Digests of parts add up to that of the whole, in any order, so ranks need not exchange indices:
if the shares add up to the order, and all ranks had the same order, nothing was lost or repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

_BITS_64 = 2**64 - 1
_BITS_63 = 2**63 - 1


class Digest(NamedTuple):
    """The number of indices, and the sum (modulo 2**64) and exclusive or of their hashes.

    Two different multisets of indices have the same one by chance only, as good as never.
    """

    number: int = 0
    total: int = 0
    folded: int = 0

    @classmethod
    def of(cls, indices: Sequence[object]) -> Digest:
        """Return the digest of indices: whole numbers, or anything of which repr tells all."""
        hashes = _hashes(indices)
        return cls(len(indices), int(hashes.sum()) & _BITS_64, _fold(hashes) & _BITS_64)

    def __or__(self, other: Digest) -> Digest:
        """Return the digest of the indices of both."""
        return Digest(
            self.number + other.number,
            (self.total + other.total) & _BITS_64,
            self.folded ^ other.folded,
        )


class Share(NamedTuple):
    """What one rank was dealt, and from what; plain numbers, so that it can be gathered.

    `different` is the number of different indices in the order, `size` the length of the dataset,
    -1 if it has none.
    """

    dealt: Digest
    order: Digest
    different: int
    size: int

    @classmethod
    def of(cls, dealt: Sequence[object], order: Sequence[object], size: int | None) -> Share:
        """Return the share of one rank.

        Args:
            dealt: The indices that this rank was dealt.
            order: Those that all ranks are to be dealt together.
            size: The length of the dataset, None if it has none.
        """
        different = len({index if _is_plain(index) else repr(index) for index in order})
        return cls(Digest.of(dealt), Digest.of(order), different, -1 if size is None else size)


class Coverage(NamedTuple):
    """What the ranks were dealt together: `dealt` samples, of which `different` are different.

    `whole` says that the shares add up to one order: none was lost, none was dealt twice unless
    the sampler drew it twice.
    """

    dealt: int
    different: int
    size: int
    whole: bool

    def __str__(self) -> str:
        of_all = "" if self.size < 0 else f"/{self.size}"
        if self.whole and self.dealt == self.different:
            return f"{self.dealt}{of_all} unique"
        if self.whole:
            return f"{self.dealt} drawn, {self.different}{of_all} different"
        return f"{self.dealt} dealt, not those of one order"


def coverage(shares: Iterable[Sequence[Any]]) -> Coverage:
    """Return what the shares of all ranks cover.

    Args:
        shares: The `Share` of each rank; nested lists, as JSON makes of it, will do.
    """
    joined = Digest()
    orders = set()
    different, size = 0, -1
    for dealt, order, *numbers in shares:
        joined |= Digest(*dealt)
        orders.add(Digest(*order))
        different, size = numbers
    return Coverage(joined.number, different, size, whole=orders == {joined})


def _hashes(indices: Sequence[object]) -> torch.Tensor:
    plain = [index for index in indices if _is_plain(index)]
    hashes = _mixed(torch.tensor(plain, dtype=torch.int64))
    if len(plain) == len(indices):
        return hashes
    others = [_hash(index) for index in indices if not _is_plain(index)]
    return torch.cat([hashes, torch.tensor(others, dtype=torch.int64)])


def _is_plain(index: object) -> bool:
    return type(index) is int and 0 <= index < 2**63


def _hash(index: object) -> int:
    digest = hashlib.blake2b(repr(index).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    # SplitMix64 (Steele, Lea and Flood, 2014); torch's multiplication wraps around as it needs.
    words = (words + 1) * _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    mixed: torch.Tensor = words ^ _shifted(words, 31)
    return mixed


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts copies of the sign in from the left.
    shifted: torch.Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(word: int) -> int:
    return word - 2**64 if word > _BITS_63 else word


def _fold(hashes: torch.Tensor) -> int:
    while len(hashes) > 1:
        half = len(hashes) // 2
        rest = hashes[2 * half :]
        hashes = torch.cat([hashes[:half] ^ hashes[half : 2 * half], rest])
    return int(hashes[0]) if len(hashes) else 0
