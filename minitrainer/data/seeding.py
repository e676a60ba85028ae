"""Seeds that are pure functions of the run, and the global random states of this process."""

from __future__ import annotations

import base64
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
    _seed_cpu(seed)
    torch.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the global CPU random states of torch, numpy and random on exit."""
    states = _cpu_states()
    try:
        yield
    finally:
        _set_cpu_states(states)


class PrivateRng:
    """Let torch, numpy and random draw from a stream of their own while the context is open.

    The context can be entered again and goes on where it was left; the process's own streams
    never notice. CUDA generators are not touched. Entering and leaving costs some
    0.3 ms, nearly all of it numpy's.

    Args:
        seed: Where the stream starts, 63 bits.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inner: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outer = _cpu_states()
        if self._inner is None:
            _seed_cpu(self._seed)
        else:
            _set_cpu_states(self._inner)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inner = _cpu_states()
        _set_cpu_states(self._outer)


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


def _seed_cpu(seed: int) -> None:
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    # torch.manual_seed would reseed the CUDA generators as well.
    torch.default_generator.manual_seed(seed)


def _cpu_states() -> tuple[Any, ...]:
    numpy = _numpy()
    return (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _set_cpu_states(states: tuple[Any, ...]) -> None:
    torch_state, random_state, numpy_state = states
    torch.set_rng_state(torch_state)
    random.setstate(random_state)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.set_state(numpy_state)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
