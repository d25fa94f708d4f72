"""Pulse, supervision, hand-overs and closing."""

from __future__ import annotations

import pytest
import trio

from actors.closing import SHUTTING_DOWN, closing_failure
from actors.errors import ErrorCode
from actors.events import Event, Failed
from actors.kit.channels import PeerGone, ask, fail_pending, hand_over, reply
from actors.kit.journal import RingJournal
from actors.kit.pulse import Pulse
from actors.kit.supervise import (
    RestartPolicy,
    RestartWindow,
    SupervisionFailed,
    Supervisor,
    contains,
)
from actors.messages import CacheRefused, CacheReply, SlotGrant, Submit
from actors.phase import Phase, PhaseCell
from actors.requests import GenerationRequest, TokenPrompt
from actors.token_sender import TokenSender
from models.engine import EngineDead
from models.sampling import GREEDY

POLICY = RestartPolicy(max_restarts=3, window_s=60.0, backoff_s=0.1, backoff_max_s=0.3)
Clock = trio.testing.MockClock


def supervisor() -> tuple[Supervisor, RingJournal]:
    journal = RingJournal(trio.current_time)
    return Supervisor(policy=POLICY, journal=journal), journal


async def test_a_beat_between_reading_and_waiting_is_not_lost(autojump_clock: Clock) -> None:
    pulse = Pulse()
    seen = pulse.version
    pulse.beat()
    with trio.fail_after(1):
        assert await pulse.since(seen) == 1


async def test_a_beat_wakes_every_waiter(autojump_clock: Clock) -> None:
    pulse = Pulse()
    woken: list[int] = []

    async def wait() -> None:
        woken.append(await pulse.since(0))

    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert woken == []
            pulse.beat()
    assert woken == [1, 1]


def test_the_wait_before_a_restart_doubles_and_old_restarts_are_forgotten() -> None:
    window = RestartWindow(POLICY)
    assert [window.crashed(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.1, 0.2, 0.3, None]
    assert window.crashed(61.5) == 0.2  # only the restart at 2.0 is recent
    assert window.crashed(200.0) == 0.1


async def test_a_crash_restarts_and_a_return_ends(autojump_clock: Clock) -> None:
    boss, journal = supervisor()
    runs: list[float] = []

    async def child() -> None:
        runs.append(trio.current_time())
        if len(runs) < 3:
            raise ValueError("bug")

    await boss.run("child", child)
    assert runs == pytest.approx([0.0, 0.1, 0.3])
    assert boss.restarts == {"child": 2}
    assert [entry.event for entry in journal] == ["crashed", "restarted"] * 2


async def test_too_many_crashes_escalate(autojump_clock: Clock) -> None:
    boss, journal = supervisor()

    async def child() -> None:
        raise ValueError("bug")

    with pytest.raises(SupervisionFailed) as caught:
        await boss.run("child", child)
    assert isinstance(caught.value.__cause__, ValueError)
    assert boss.restarts == {"child": POLICY.max_restarts}
    assert [entry.event for entry in journal][-1] == "escalated"


async def test_a_fatal_error_inside_a_group_escalates_at_once(autojump_clock: Clock) -> None:
    boss, _ = supervisor()

    async def dies() -> None:
        raise EngineDead("gone")

    async def child() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(dies)

    with pytest.raises(SupervisionFailed):
        await boss.run("child", child, fatal=(EngineDead,))
    assert boss.restarts == {"child": 0}


async def test_cancellation_is_not_a_crash(autojump_clock: Clock) -> None:
    boss, journal = supervisor()
    with trio.move_on_after(1) as scope:
        await boss.run("child", trio.sleep_forever)
    assert scope.cancelled_caught
    assert list(journal) == []


@pytest.mark.parametrize("fatal", [False, True])
async def test_a_crash_while_being_cancelled_does_not_restart(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture, fatal: bool
) -> None:
    """It is logged, but only a fatal one outlives the cancellation: a stop stays a stop."""
    boss, _ = supervisor()
    runs = 0

    async def fails_on_the_way_out() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("bug")

    async def child() -> None:
        nonlocal runs
        runs += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_on_the_way_out)
            nursery.start_soon(trio.sleep_forever)

    escaped: list[Exception] = []
    try:
        with trio.move_on_after(1):
            await boss.run("child", child, fatal=(ValueError,) if fatal else ())
    except ExceptionGroup as group:
        escaped.append(group)
    assert [contains(group, (ValueError,)) for group in escaped] == ([True] if fatal else [])
    assert "child crashed while it was being stopped" in caplog.text
    assert runs == 1


async def test_a_full_upward_channel_is_a_bug_and_a_closed_one_means_a_crashed_peer() -> None:
    tx, rx = trio.open_memory_channel[SlotGrant](1)
    hand_over(tx, SlotGrant(slot=0))
    with pytest.raises(trio.WouldBlock):
        hand_over(tx, SlotGrant(slot=1))
    rx.close()
    with pytest.raises(PeerGone):
        hand_over(tx, SlotGrant(slot=1))


async def test_an_unanswered_reply_channel_tells_that_the_peer_is_gone() -> None:
    tx, rx = trio.open_memory_channel[CacheReply](1)
    tx.close()
    with pytest.raises(PeerGone):
        await ask(rx)
    tx, rx = trio.open_memory_channel[CacheReply](1)
    rx.close()
    assert reply(tx, CacheRefused(free_tokens=1)) is False


async def test_fail_pending_ends_every_request_and_gives_its_place_back() -> None:
    freed: list[str] = []
    submit_tx, submit_rx = trio.open_memory_channel[Submit](2)
    ends: list[trio.MemoryReceiveChannel[Event]] = []
    for rid in ("a", "b"):
        tx, rx = trio.open_memory_channel[Event](4)
        ends.append(rx)
        sender = TokenSender(rid, tx, 4, lambda rid=rid: freed.append(rid))  # type: ignore[misc]
        request = GenerationRequest(
            request_id=rid, prompt=TokenPrompt(token_ids=(1,)), sampling=GREEDY
        )
        submit_tx.send_nowait(Submit(request=request, senders=(sender,), arrived_s=0.0))
    fail_pending(submit_rx, SHUTTING_DOWN)
    assert freed == ["a", "b"]
    for rx in ends:
        event = rx.receive_nowait()
        assert isinstance(event, Failed)
        assert event.code is ErrorCode.SHUTTING_DOWN
        with pytest.raises(trio.EndOfChannel):
            rx.receive_nowait()
    with pytest.raises(trio.BrokenResourceError):
        submit_tx.send_nowait(Submit(request=request, senders=(sender,), arrived_s=0.0))


def test_the_closing_failure_names_the_most_telling_cause() -> None:
    codes = [
        closing_failure(PhaseCell(phase=phase, engine_dead=dead)).code
        for phase, dead in (
            (Phase.READY, False),
            (Phase.DRAINING, False),
            (Phase.STOPPED, False),
            (Phase.STOPPED, True),
        )
    ]
    assert codes == [
        ErrorCode.INTERNAL,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.ENGINE_DEAD,
    ]
