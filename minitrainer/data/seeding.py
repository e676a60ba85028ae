"""Seeds that are pure functions of the run, and the global random states of this process."""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

import torch

from minitrainer.errors import SettingError

_SEED_BITS = 63
_64_BITS = 2**64 - 1
_NUMPY_BYTES = 625 * 4  # 624 words and the position of a Mersenne twister


def derive_seed(seed: int, *stream: int | str) -> int:
    """Return the seed of one random stream of a run, for example `(seed, "order", epoch)`.

    A pure function, the same on every machine and in every process (BLAKE2b over the JSON text
    of the arguments), so streams need not be agreed upon over ranks.

    Args:
        seed: The seed of the run.
        *stream: What the stream is for: names and numbers.

    Returns:
        A number of 63 bits.
    """
    text = json.dumps([seed, *stream]).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def mix(seed: int, number: int) -> int:
    """Return the seed of one of very many streams: cheaper than `derive_seed`, as pure.

    Args:
        seed: What `derive_seed` returned for all of them.
        number: Which of them.

    Returns:
        A number of 63 bits: one output of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    word = (seed + number * 0x9E3779B97F4A7C15) & _64_BITS
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return (word ^ (word >> 31)) >> (64 - _SEED_BITS)


def seed_everything(seed: int) -> None:
    """Seed the global generators of random, numpy (if installed) and torch, CUDA included.

    Args:
        seed: From 0 up to, not including, 2**63. numpy takes its lower 32 bits.

    Raises:
        SettingError: The seed is not an integer of that range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**_SEED_BITS:
        raise SettingError(
            f"The seed is {seed!r}.",
            f"A seed must be an integer from 0 to 2**{_SEED_BITS} - 1.",
            "Choose a small number such as 0 or 1234.",
        )
    seed_cpu(seed)
    torch.manual_seed(seed)


class RngStates:
    """The global CPU random states of torch, numpy and random at one moment; some 20 us."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._random = random.getstate()
        self._numpy = _numpy_state()

    def are_left(self) -> bool:
        """Return whether one of the generators was drawn from or seeded since; some 20 us."""
        _, old, old_spare = self._random
        _, new, new_spare = random.getstate()
        # A draw moves the position, which stands last; if it has gone full circle, all the words
        # in front of it are others.
        return (
            old[-1] != new[-1]
            or old[0] != new[0]
            or old_spare != new_spare
            or self._numpy != _numpy_state()
            or not torch.equal(self._torch, torch.get_rng_state())
        )

    def restore(self) -> None:
        """Put the generators back; some 15 us."""
        torch.set_rng_state(self._torch)
        random.setstate(self._random)
        _set_numpy_state(*self._numpy)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the global CPU random states of torch, numpy and random on exit."""
    states = RngStates()
    try:
        yield
    finally:
        states.restore()


class PrivateRng:
    """Let torch, numpy and random draw from a stream of their own while the context is open.

    The context can be entered again and goes on where it was left; the process's own streams
    never notice. CUDA generators are not touched. Entering and leaving costs some 70 us.

    Args:
        seed: Where the stream starts, 63 bits.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inner: RngStates | None = None
        self._outer: RngStates | None = None

    def __enter__(self) -> None:
        self._outer = RngStates()
        if self._inner is None:
            seed_cpu(self._seed)
        else:
            self._inner.restore()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._outer is not None
        self._inner = RngStates()
        self._outer.restore()


def collect_rng_states(device: torch.device) -> dict[str, Any]:
    """Return the global random states of this rank as plain values.

    Args:
        device: The device of the rank; its generator is included if it is a CUDA device.

    Returns:
        Strings and lists of numbers only: JSON can hold it, `torch.load` needs no pickled code.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": _to_text(torch.get_rng_state()),
        "random": [version, list(words), gauss],
    }
    numpy = _numpy()
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        numbers = [int(key) for key in keys]
        states["numpy"] = [kind, numbers, int(position), int(has_gauss), float(cached)]
    if device.type == "cuda":
        states["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    return states


def restore_rng_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `collect_rng_states` returned.

    A part that the states lack (saved on another kind of device) is left as it is.

    Args:
        states: The plain values.
        device: The device of the rank.
    """
    torch.set_rng_state(_to_tensor(states["torch"]))
    version, words, gauss = states["random"]
    random.setstate((version, tuple(words), gauss))
    numpy = _numpy()
    if numpy is not None and "numpy" in states:
        kind, numbers, position, has_gauss, cached = states["numpy"]
        keys = numpy.array(numbers, dtype=numpy.uint32)
        numpy.random.set_state((kind, keys, position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_to_tensor(states["cuda"]), device)


@functools.cache
def _numpy() -> ModuleType | None:
    # Only here, because torch works without numpy and so do we.
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def seed_cpu(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and random; some 15 us.

    Args:
        seed: 63 bits. torch and numpy use the lower 32 of them.
    """
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    # torch.manual_seed would reseed the CUDA generators as well.
    torch.default_generator.manual_seed(seed)


def _numpy_address() -> int | None:
    """Return where the words and the position of numpy's global generator lie.

    The usual way to them takes 60 us; numpy offers the address to programs in C.
    """
    numpy = _numpy()
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator()
    address: int | None = None
    # Another one can only be there by the user's hand, and could not be seeded either.
    if isinstance(generator, numpy.random.MT19937):
        address = generator.ctypes.state_address
    return address


def _numpy_words() -> bytes | None:
    address = _numpy_address()
    return None if address is None else ctypes.string_at(address, _NUMPY_BYTES)


def _numpy_state() -> tuple[bytes | None, float | None]:
    """Return words and position, and the spare number of the normal distribution if there is one.

    Nothing tells of the spare number but to draw: if the words stand still, that was it.
    """
    numpy, words = _numpy(), _numpy_words()
    if numpy is None or words is None:
        return None, None
    drawn: float | None = numpy.random.standard_normal()
    spare = drawn if _numpy_words() == words else None
    _set_numpy_state(words, spare)
    return words, spare


def _set_numpy_state(words: bytes | None, spare: float | None) -> None:
    numpy, address = _numpy(), _numpy_address()
    if numpy is None or words is None or address is None:
        return
    if spare is None:
        numpy.random.seed(0)  # throws a spare number away
        ctypes.memmove(address, words, _NUMPY_BYTES)
    else:
        *keys, position = memoryview(words).cast("I")
        numpy.random.set_state(("MT19937", keys, position, 1, spare))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
