"""Everything that a seed decides before a simulated run begins: limits, clients, faults, end."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from actors.kit.faults import CRASH_POINTS
from actors.limits import LANES, Limits
from actors.requests import (
    CachePolicy,
    ChatPrompt,
    GenerationRequest,
    LoopRule,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from models.sampling import SamplingParams
from models.scripted import EngineFaults, StepCost, default_script
from models.scripted_text import ScriptedTextModel
from tests.sim.oracle import prompt_ids

COST = StepCost()
SCRIPT_BYTES = 24


class Mood(enum.Enum):
    """How a client behaves."""

    PROMPT = "reads at once"
    SLOW = "reads slowly"
    NAPPING = "stops reading for a while, then goes on"
    STALLED = "stops reading until the server gives up"
    LEAVES_AFTER = "leaves after a number of events"
    LEAVES_AT = "leaves at some time"
    LEAVES_AT_ONCE = "leaves before it is accepted"
    DEADLINE = "has a deadline"


class Ending(enum.Enum):
    """How a run ends."""

    IDLE = "all clients are done"
    DRAIN = "drain at some time"
    STOP = "stop at once at some time, as a second signal does"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    arrives_s: float
    request: GenerationRequest  # its deadline counts from the moment when it is sent
    mood: Mood
    events: int = 0  # after how many the mood shows
    pause_s: float = 0.0  # SLOW: after each event; NAPPING, STALLED: once
    leaves_s: float = math.inf  # after the arrival
    retries: int = 0  # how often it sends a failed request again, at once
    choices: int = 1
    moody: int = 1  # so many choices, the first ones, are read in that mood; the rest at once

    def mood_of(self, choice: int) -> Mood:
        if choice < self.moody or self.mood is Mood.DEADLINE:
            return self.mood
        return Mood.PROMPT

    def patient(self, choice: int) -> bool:
        return self.mood_of(choice) in (Mood.PROMPT, Mood.SLOW, Mood.NAPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """``crashes``: point -> the hits (1 = first) at which it raises."""

    seed: int
    limits: Limits
    clients: tuple[ClientPlan, ...]
    ending: Ending
    ends_s: float
    engine: EngineFaults
    crashes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    store_clients: int = 0
    prefix: Literal["blocks", "snapshots", "none"] = "blocks"

    @property
    def faults(self) -> int:
        """Things that go wrong, slow steps excepted."""
        engine = self.engine
        planned = (
            len(engine.failing) + len(engine.failing_rows) + sum(map(len, self.crashes.values()))
        )
        return planned + (engine.dead is not None) + (engine.hanging is not None)

    @property
    def max_step_s(self) -> float:
        limits = self.limits
        busiest_s = COST.base_s + COST.decode_row_s * limits.max_slots
        busiest_s += COST.prefill_token_s * limits.step_tokens
        slowest_s = busiest_s + max(self.engine.slow.values(), default=0.0)
        return limits.step_timeout_s if self.engine.hanging is not None else slowest_s


def make_plan(seed: int) -> WorldPlan:
    rng = Random(seed)
    limits = _limits(rng)
    count = rng.randint(6, 30)
    span_s = rng.choice((0.02, 0.2, 0.8, 2.0))
    stop_strings = rng.random() < 0.6
    ending = rng.choices((Ending.IDLE, Ending.DRAIN, Ending.STOP), (6, 3, 1))[0]
    ends_s = rng.uniform(0.0, span_s * 1.2 + 0.2)
    bursts = (0.0, span_s / 2, ends_s)  # some arrive together, and some just as the end begins
    clients = [
        _client(rng, number, span_s, bursts, limits, stop_strings=stop_strings)
        for number in range(count)
    ]
    engine, crashes = _faults(rng)
    return WorldPlan(
        seed=seed,
        limits=limits,
        clients=tuple(clients),
        ending=ending,
        ends_s=ends_s,
        engine=engine,
        crashes=crashes,
        store_clients=rng.choice((0, 0, 1, 3)),
    )


def _limits(rng: Random) -> Limits:
    """Everything small, so that everything gets full."""
    slots = rng.randint(1, 4)
    context = rng.randint(24, 96)
    chunk_min = rng.randint(1, 6)
    return Limits(
        max_slots=slots,
        max_queue_depth=rng.randint(0, 12),
        token_buffer=rng.choice((1, 1, 2, 3, 6)),
        lease_quantum_tokens=rng.choice((2, 4, 16)),
        enable_preemption=rng.random() < 0.6,
        preemption_policy=rng.choice(("longest-first", "lowest-priority")),
        prefill_grant_interval=rng.choice((1, 1, 0, 3)),
        max_batch=rng.choice((None, None, rng.randint(1, slots))),
        max_batch_prefill=rng.choice((1, 4)),
        max_batch_prefill_tokens=rng.choice((4096, rng.randint(8, 64))),
        priority_max_skips=rng.choice((0, 1, 2, 3)),
        slot_context_tokens=context,
        cache_budget_tokens=int(context * rng.uniform(0.8, slots + 0.2)),
        prefill_chunk_tokens=rng.choice((None, None, rng.randint(1, 16))),
        prefill_chunk_min_tokens=chunk_min,
        prefill_chunk_max_tokens=chunk_min + rng.randint(0, 24),
        step_tokens=slots + chunk_min + rng.randint(0, 40),
        sweep_s=rng.choice((0.05, 0.25)),
        poll_s=rng.choice((0.005, 0.02)),
        stall_s=rng.uniform(0.2, 0.8),
        step_timeout_s=2.0,
        request_timeout_s=rng.choice((3600.0, 3600.0, 1.5)),
        drain_s=rng.choice((0.0, 0.1, 0.5, 30.0)),
        restart_max=rng.choice((0, 1, 3, 3)),
        restart_window_s=rng.choice((5.0, 60.0)),
        restart_backoff_s=rng.choice((0.0, 0.1)),
        restart_backoff_max_s=0.4,
        store_queue=rng.randint(1, 4),
        store_max_entries=3,
        store_max_bytes=rng.choice((2000, 5000)),
        store_ttl_s=0.3,
    )


def _client(
    rng: Random,
    number: int,
    span_s: float,
    bursts: tuple[float, ...],
    limits: Limits,
    *,
    stop_strings: bool,
) -> ClientPlan:
    mood = rng.choices(
        tuple(Mood),
        (8, 3, 2, 1, 2, 2, 1, 2),
    )[0]
    pause_s = 0.0
    if mood is Mood.SLOW:
        pause_s = rng.uniform(0.0, 0.15)
    elif mood is Mood.NAPPING:
        pause_s = rng.uniform(0.0, limits.stall_s * 0.9)
    elif mood is Mood.STALLED:
        pause_s = limits.stall_s * 2 + 5.0
    deadline_s = math.inf
    if mood is Mood.DEADLINE:
        deadline_s = rng.choice((0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 1.0)))
    arrives_s = rng.choice((*bursts[: rng.randint(2, 3)], rng.uniform(0.0, span_s)))
    if rng.random() < 0.4:
        arrives_s = rng.uniform(0.0, span_s)
    choices = rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
    return ClientPlan(
        choices=choices,
        moody=rng.choice((1, choices)),
        arrives_s=arrives_s,
        request=_request(rng, f"r{number:02d}", deadline_s, limits, stop_strings=stop_strings),
        mood=mood,
        events=rng.choice((0, 1, 2, rng.randint(1, 20))),
        pause_s=pause_s,
        leaves_s=rng.uniform(0.0, 0.4) if mood is Mood.LEAVES_AT else math.inf,
        retries=rng.choice((0, 0, 1, 3)),
    )


def _request(
    rng: Random, rid: str, deadline_s: float, limits: Limits, *, stop_strings: bool
) -> GenerationRequest:
    prompt = _prompt(rng, limits)
    sampling = SamplingParams(temperature=rng.choice((0.0, 0.8)), seed=rng.getrandbits(63))
    stop: tuple[str, ...] = ()
    if stop_strings and rng.random() < 0.5:
        stop = _stop(rng, prompt, sampling)
    return GenerationRequest(
        request_id=rid,
        prompt=prompt,
        sampling=sampling,
        max_tokens=rng.choice((None, None, 0, 1, 2, rng.randint(1, 30), rng.randint(1, 30))),
        stop=stop,
        min_tokens=rng.choice((0, 0, 0, rng.randint(1, 30))),
        loop=_loop(rng) if rng.random() < 0.25 else None,
        cache=CachePolicy(use=rng.random() < 0.9, bucket=rng.choice(("", "", "other"))),
        ignore_eos=rng.random() < 0.1,
        lane=rng.choice(LANES),
        deadline_s=deadline_s,
    )


def _loop(rng: Random) -> LoopRule:
    return LoopRule(
        min_size=rng.randint(1, 2), max_size=rng.randint(1, 4), count=rng.choice((2, 2, 3))
    )


def _prompt(rng: Random, limits: Limits) -> Prompt:
    kind = rng.random()
    length = rng.choice((1, rng.randint(1, 12), rng.randint(1, limits.slot_context_tokens)))
    if kind < 0.06:  # what admission has to refuse
        return rng.choice(
            (
                TokenPrompt(token_ids=()),
                TokenPrompt(token_ids=(5, 9999)),
                ChatPrompt(messages=({"role": "narrator", "content": "?"},)),
                TokenPrompt(token_ids=(7,) * (limits.slot_context_tokens + 1)),
            )
        )
    if kind < 0.3:
        return ChatPrompt(messages=({"role": "user", "content": "x" * rng.randint(0, 8)},))
    if kind < 0.5:
        return TextPrompt(text="".join(rng.choice("ab é") for _ in range(length // 2 + 1)))
    if kind < 0.75:  # many prompts begin alike, and some are equal
        common = Random(rng.randrange(2))
        known = [common.randrange(256) for _ in range(limits.slot_context_tokens)]
        own = [rng.randrange(256) for _ in range(rng.choice((0, 0, 1, 3)))]
        return TokenPrompt(token_ids=(*known[: max(1, length - len(own))], *own))
    return TokenPrompt(token_ids=tuple(rng.randrange(256) for _ in range(length)))


def _stop(rng: Random, prompt: Prompt, sampling: SamplingParams) -> tuple[str, ...]:
    """Stop strings, most of them from the text that will come."""
    ids = prompt_ids(prompt, ScriptedTextModel())
    text = bytes(default_script(ids, sampling, SCRIPT_BYTES)).decode()
    found = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randint(1, 4)]
        found.append(piece if rng.random() < 0.7 else piece + "zz")
    return tuple(found)


def _faults(rng: Random) -> tuple[EngineFaults, dict[str, tuple[int, ...]]]:
    """Nothing in half of the worlds; otherwise a mixture."""
    engine = EngineFaults()
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 4)):
            engine.slow[rng.randint(1, 60)] = rng.uniform(0.0, 0.3)
    kind = rng.random()
    if kind < 0.5:
        return engine, {}
    if kind < 0.62:
        for _ in range(rng.randint(1, 3)):
            engine.failing.add(rng.randint(1, 80))
    elif kind < 0.74:
        for _ in range(rng.randint(1, 4)):
            engine.failing_rows[rng.randint(1, 80)] = rng.randint(0, 3)
    elif kind < 0.77:
        engine.dead = rng.randint(1, 80)
    elif kind < 0.80:
        engine.hanging = rng.randint(1, 80)
    crashes: dict[str, tuple[int, ...]] = {}
    if kind > 0.7:
        for point in rng.sample(CRASH_POINTS, rng.randint(1, 3)):
            crashes[point] = tuple(
                sorted({rng.randint(1, 25) for _ in range(rng.choice((1, 1, 2, 5)))})
            )
    return engine, crashes
