"""The actors wired together around a scripted engine, for tests that need more than one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random

import trio

from actors.admission import AdmissionActor
from actors.core.service_rate import ServiceRate
from actors.events import Event, Failed, Finished, TextDelta
from actors.generation import Generation, open_generation
from actors.kit.faults import CRASH_POINTS
from actors.kit.journal import Entry, RingJournal
from actors.kit.seams import Seams
from actors.kit.supervise import RestartPolicy, Supervisor
from actors.limits import LANES, Limits
from actors.messages import Queued, StoreMessage, Submit
from actors.offload import inline_offload
from actors.phase import Phase, PhaseCell
from actors.pipeline import Pipeline
from actors.ports import Places, Ports, RuntimeStatus
from actors.prefill_queue import open_room
from actors.requests import ChatPrompt, GenerationRequest, Priority, Prompt, TextPrompt
from actors.responses_store import ResponsesStore
from models.sampling import GREEDY, SamplingParams
from models.scripted import ScriptedEngine
from models.scripted_text import ScriptedTextModel


class Crash(Exception):
    """Raised at an armed crash point."""


@dataclass
class ArmedFaults:
    """``arm(point, n)`` makes the n-th hit of ``point`` from now on raise."""

    armed: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)

    def arm(self, point: str, nth: int = 1) -> None:
        assert point in CRASH_POINTS
        self.armed[point] = nth

    def hit(self, point: str) -> None:
        assert point in CRASH_POINTS, point
        self.hits[point] = self.hits.get(point, 0) + 1
        if point in self.armed:
            self.armed[point] -= 1
            if self.armed[point] == 0:
                del self.armed[point]
                raise Crash(point)


@dataclass
class World:
    """Everything that is inside, reachable for assertions."""

    ports: Ports
    phase: PhaseCell
    engine: ScriptedEngine
    text: ScriptedTextModel
    journal: RingJournal
    faults: ArmedFaults
    supervisor: Supervisor
    admission: AdmissionActor
    pipeline: Pipeline
    store: ResponsesStore
    scope: trio.CancelScope
    ids: Callable[[], int] = field(default_factory=lambda: count(1).__next__)

    def request(
        self,
        prompt: str | Prompt = "hello",
        *,
        lane: Priority = Priority.NORMAL,
        rid: str | None = None,
        max_tokens: int | None = 8,
        stop: tuple[str, ...] = (),
        deadline_s: float = float("inf"),
        sampling: SamplingParams = GREEDY,
        ignore_eos: bool = False,
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=rid or f"r{self.ids()}",
            prompt=TextPrompt(text=prompt, add_special=False)
            if isinstance(prompt, str)
            else prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            lane=lane,
            deadline_s=deadline_s,
            ignore_eos=ignore_eos,
        )

    def open(self, prompt: str | Prompt = "hello", **options: object) -> Generation:
        return open_generation(self.ports, self.request(prompt, **options))  # type: ignore[arg-type]

    def entries(self, *events: str) -> list[Entry]:
        return [entry for entry in self.journal if entry.event in events]

    def assert_idle(self) -> None:
        """Nothing leaks: all places, slots and leases are free and nobody waits."""
        status = self.pipeline.status()
        assert self.ports.places.free == self.ports.places.count
        assert (status.waiting, status.leases, status.leased_tokens) == (0, 0, 0)
        assert all(slot.request_id is None for slot in status.slots)


async def read_all(generation: Generation) -> list[Event]:
    return [event async for event in generation]


async def read_text(generation: Generation) -> tuple[str, Finished | Failed]:
    """The joined text and the terminal event."""
    text = ""
    async for event in generation:
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            return text + event.text, event
        elif isinstance(event, Failed):
            return text, event
    raise AssertionError("the channel ended without a terminal event")


def chat(content: str) -> ChatPrompt:
    return ChatPrompt(messages=({"role": "user", "content": content},))


@asynccontextmanager
async def open_world(
    *,
    limits: Limits | None = None,
    engine: ScriptedEngine | None = None,
    text: ScriptedTextModel | None = None,
    seed: int = 0,
) -> AsyncIterator[World]:
    """Run all actors; the body's end closes everything.  A SupervisionFailed comes out of it."""
    limits = limits or Limits()
    engine = engine or ScriptedEngine()
    text = text or ScriptedTextModel()
    phase = PhaseCell(phase=Phase.READY)
    journal = RingJournal(trio.current_time)
    faults = ArmedFaults()
    rate = ServiceRate(slots=limits.max_slots)
    supervisor = Supervisor(policy=RestartPolicy.from_limits(limits), journal=journal)
    submits = {lane: trio.open_memory_channel[Submit](limits.submit_channel) for lane in LANES}
    lanes = {lane: trio.open_memory_channel[Queued](0) for lane in LANES}
    store_tx, store_rx = trio.open_memory_channel[StoreMessage](limits.store_queue)
    admission = AdmissionActor(
        submit={lane: rx for lane, (_, rx) in submits.items()},
        lanes={lane: tx for lane, (tx, _) in lanes.items()},
        text=text,
        limits=limits,
        phase=phase,
        journal=journal,
        offload=inline_offload,
        retry_after_s=rate.retry_after_s,
        faults=faults,
    )
    pipeline = Pipeline(
        engine=engine,
        text=text,
        limits=limits,
        phase=phase,
        room=open_room(limits),
        lanes={lane: rx for lane, (_, rx) in lanes.items()},
        journal=journal,
        rate=rate,
        faults=faults,
    )
    store = ResponsesStore(inbox=store_rx, limits=limits, faults=faults)
    refusals: list[str] = []
    ports = Ports(
        phase=phase,
        places=Places(limits.places),
        submit={lane: tx for lane, (tx, _) in submits.items()},
        store=store_tx,
        status=lambda: _status(phase, pipeline, admission, supervisor, store, len(refusals)),
        model=lambda: None,
        note_refusal=refusals.append,
        retry_after_s=rate.retry_after_s,
        seams=Seams(rng=Random(seed), wall_time=lambda: 0.0),
        limits=limits,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.supervised, supervisor)
        nursery.start_soon(pipeline.supervised, supervisor)
        nursery.start_soon(store.supervised, supervisor)
        yield World(
            ports=ports,
            phase=phase,
            engine=engine,
            text=text,
            journal=journal,
            faults=faults,
            supervisor=supervisor,
            admission=admission,
            pipeline=pipeline,
            store=store,
            scope=nursery.cancel_scope,
        )
        nursery.cancel_scope.cancel()


def _status(
    phase: PhaseCell,
    pipeline: Pipeline,
    admission: AdmissionActor,
    supervisor: Supervisor,
    store: ResponsesStore,
    refusals: int,
) -> RuntimeStatus:
    inner = pipeline.status()
    counters = pipeline.counters
    return RuntimeStatus(
        phase=phase.phase,
        engine_alive=inner.alive,
        slots=inner.slots,
        queue_depth=inner.waiting + admission.waiting,
        leases=inner.leases,
        leased_tokens=inner.leased_tokens,
        sequences_started=counters.started,
        sequences_completed=counters.completed,
        sequences_cancelled=counters.cancelled,
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        decode_steps=counters.decode_steps,
        prefill_chunks=counters.prefill_chunks,
        requests_refused=admission.refused + refusals,
        restarts=supervisor.restarts,
        store_entries=store.entries,
        store_bytes=store.size_bytes,
        step_cost=pipeline.cost.snapshot(),
    )
