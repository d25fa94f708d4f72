"""The actors together: a request's life, cancellation in each phase, crashes, drain."""

from __future__ import annotations

import trio

from actors.events import Accepted, Finished, FinishReason, Started, TextDelta
from models.scripted import ScriptedEngine
from tests.actors.harness import open_world, read_all


async def test_a_request_from_start_to_end(autojump_clock: trio.testing.MockClock) -> None:
    engine = ScriptedEngine(scripts={"hello": "héy"})
    async with open_world(engine=engine) as world:
        with world.open("hello") as generation:
            events = await read_all(generation)
        await trio.testing.wait_all_tasks_blocked()
        world.assert_idle()
    assert events[:2] == [Accepted(prompt_tokens=5), Started()]
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [delta.position for delta in deltas] == [0, 1, 2, 3]
    assert [delta.text for delta in deltas] == ["h", "", "é", "y"]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.STOP
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 4)
