from __future__ import annotations

import os
import signal

import pytest
import trio
from trio.testing import MockClock

from actors.kit.journal import NullJournal, RingJournal
from actors.phase import Phase, PhaseCell
from actors.ports import Places
from runtime.lifecycle import Lifecycle


def lifecycle() -> Lifecycle:
    return Lifecycle(PhaseCell(), NullJournal())


async def test_drain_waits_for_the_last_request(autojump_clock: MockClock) -> None:
    life, places = lifecycle(), Places(2)
    release = places.take()
    assert release is not None

    async def leave() -> None:
        await trio.sleep(3)
        release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        assert await life.drain(places, 30) == 0
    assert life.phase is Phase.DRAINING
    assert trio.current_time() == pytest.approx(3, abs=0.1)


async def test_drain_gives_up_at_its_limit(autojump_clock: MockClock) -> None:
    life, places = lifecycle(), Places(2)
    places.take()
    started = trio.current_time()
    assert await life.drain(places, 5) == 1
    assert trio.current_time() - started == pytest.approx(5, abs=0.1)


async def test_a_second_request_to_stop_cuts_the_drain(autojump_clock: MockClock) -> None:
    life, places = lifecycle(), Places(1)
    places.take()
    life.request_stop()
    assert not life.stop_requested.is_set()
    life.request_stop()
    started = trio.current_time()
    assert await life.drain(places, 30) == 1
    assert trio.current_time() == started


async def test_phases_are_journalled_once() -> None:
    journal = RingJournal(lambda: 0.0)
    life = Lifecycle(PhaseCell(), journal)
    life.enter(Phase.READY)
    life.enter(Phase.READY)
    assert [entry["phase"] for entry in journal] == ["ready"]


async def test_a_real_signal_asks_for_a_drain() -> None:
    life = lifecycle()
    async with trio.open_nursery() as nursery:
        await nursery.start(life.watch_signals, [signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        await life.drain_requested.wait()
        assert not life.stop_requested.is_set()
        os.kill(os.getpid(), signal.SIGUSR1)
        await life.stop_requested.wait()
        nursery.cancel_scope.cancel()
