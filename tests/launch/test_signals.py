"""StopSignals in one process, and what it leaves to the processes that are forked meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from minitrainer.launch import Interrupted, StopSignals

STOP = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _as_python_starts() -> Iterator[None]:
    """A test runner that was started in the background may have SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in STOP}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP)
def test_the_first_signal_is_only_noted(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP]
    with StopSignals() as signals:
        assert signals.received is None
        signals.raise_if_received()
        signal.raise_signal(number)
        assert signals.received is number
        with pytest.raises(Interrupted) as raised:
            signals.raise_if_received()
        assert raised.value.signal is number
        assert raised.value.result is None
        assert isinstance(raised.value, KeyboardInterrupt)
    assert [signal.getsignal(each) for each in STOP] == before
    assert signals.received is number


def test_a_second_interrupt_leaves_at_once() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_users_own_handler_is_called_and_restored() -> None:
    called: list[int] = []

    def own(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGTERM, own)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGTERM
    assert called == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_handlers_are_restored_after_an_exception() -> None:
    before = [signal.getsignal(each) for each in STOP]
    with pytest.raises(ValueError, match="x"), StopSignals():
        raise ValueError("x")
    assert [signal.getsignal(each) for each in STOP] == before


def test_another_thread_is_left_alone() -> None:
    before = [signal.getsignal(each) for each in STOP]
    seen: list[object] = []

    def run() -> None:
        with StopSignals() as signals:
            seen.extend([signal.getsignal(each) for each in STOP])
            seen.append(signals.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [*before, None]


@pytest.mark.parametrize("number", STOP)
def test_a_forked_worker_ignores_ctrl_c_and_dies_by_sigterm(number: signal.Signals) -> None:
    with StopSignals() as signals:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        assert signals.received is None
    code = os.waitstatus_to_exitcode(status)
    assert code == (7 if number is signal.SIGINT else -signal.SIGTERM)
