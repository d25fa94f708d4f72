"""Runs that once found a bug, by seed or as a small world of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from actors.limits import Limits
from actors.requests import GenerationRequest, Priority, TextPrompt
from models.sampling import GREEDY
from models.scripted import EngineFaults
from tests.sim.checkers import check_all
from tests.sim.world import WorldResult, run_plan
from tests.sim.world_plan import ClientPlan, Ending, Mood, WorldPlan

pytestmark = pytest.mark.sim


def client(
    name: str, arrives_s: float, *, lane: Priority = Priority.NORMAL, max_tokens: int = 4
) -> ClientPlan:
    request = GenerationRequest(
        request_id=name,
        prompt=TextPrompt(text=f"prompt of {name}"),
        sampling=GREEDY,
        max_tokens=max_tokens,
        ignore_eos=True,
        lane=lane,
        deadline_s=math.inf,
    )
    return ClientPlan(arrives_s=arrives_s, request=request, mood=Mood.PROMPT)


def ends_of(result: WorldResult, rid: str) -> list[str]:
    """How the request ended, as its client saw it."""
    ends = ("finished", "failed", "turned_away")
    entries = [e for e in result.journal if e.event == "client_event" and e["rid"] == rid]
    return [f"{e['kind']} {e['text']}" for e in entries if e["kind"] in ends]


def test_newcomers_are_turned_away_while_the_server_gives_up() -> None:
    """Admission has given up, but the step in flight still holds the pipeline: who comes now gets
    an answer, and no place is lost."""
    plan = WorldPlan(
        seed=1,
        limits=Limits(max_slots=2, restart_max=0, slot_context_tokens=64),
        clients=(
            client("runs", 0.0),
            client("crashes", 0.1, lane=Priority.HIGH),
            client("comes", 0.2),
            client("comes_high", 0.2, lane=Priority.HIGH),
        ),
        ending=Ending.IDLE,
        ends_s=0.0,
        engine=EngineFaults(slow={2: 0.5}),
        crashes={"admission.in_hand": (2,)},
    )
    result = run_plan(plan)
    check_all(result.run)
    assert ends_of(result, "crashes") == ["failed internal"]
    assert ends_of(result, "comes") == ["turned_away engine_dead"]
    assert ends_of(result, "comes_high") == ["turned_away engine_dead"]


def test_a_read_during_a_long_step_is_seen() -> None:
    """A parked client that reads while a long step runs was ended as slow after that step."""
    plan = WorldPlan(
        seed=1,
        limits=Limits(max_slots=2, token_buffer=1, stall_s=0.3, slot_context_tokens=64),
        clients=(
            replace(client("naps", 0.0, max_tokens=12), mood=Mood.NAPPING, events=1, pause_s=0.25),
            client("runs", 0.0, max_tokens=12),
        ),
        ending=Ending.IDLE,
        ends_s=0.0,
        engine=EngineFaults(slow={7: 0.5}),
    )
    result = run_plan(plan)
    check_all(result.run)
    assert ends_of(result, "naps") == ["finished length,15,12"]


def test_a_step_that_fails_while_the_server_is_stopped_does_not_escape() -> None:
    """The failure of the step in flight was raised through the whole tree."""
    plan = WorldPlan(
        seed=1,
        limits=Limits(max_slots=2, slot_context_tokens=64),
        clients=(client("runs", 0.0),),
        ending=Ending.STOP,
        ends_s=0.1,
        engine=EngineFaults(slow={2: 0.5}, failing={2}),
    )
    result = run_plan(plan)
    check_all(result.run)
    assert ends_of(result, "runs") == ["failed engine_error"]


def test_only_the_fatal_part_of_a_crash_outlives_a_drain() -> None:
    """The queue crashes while a step hangs, and the drain ends before the step is given up."""
    plan = WorldPlan(
        seed=1,
        limits=Limits(max_slots=2, slot_context_tokens=64, step_timeout_s=2.0, drain_s=0.5),
        clients=(client("runs", 0.0), client("crashes", 0.1)),
        ending=Ending.DRAIN,
        ends_s=0.2,
        engine=EngineFaults(hanging=2),
        crashes={"prefill.after_reserve": (2,)},
    )
    result = run_plan(plan)
    check_all(result.run)
    assert ends_of(result, "runs") == ["failed engine_dead"]
    assert ends_of(result, "crashes") == ["failed engine_dead"]
