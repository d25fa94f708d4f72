"""One simulated run of the real actor tree: ``run_world(seed)``.

The engine and the text model are scripted, the clock jumps, one seed decides everything: limits,
clients, faults, and (through ``schedule.py``) the order in which trio runs its tasks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import trio
import trio.abc
import trio.testing

from actors.kit.channels import PeerGone
from actors.kit.journal import Entry, RingJournal
from actors.kit.seams import Seams
from actors.kit.supervise import SupervisionFailed
from actors.offload import inline_offload
from actors.phase import Phase, PhaseCell
from actors.ports import ServedModel
from models.engine import EngineDead, EngineError, EngineInfo
from models.scripted import EngineFaults, ScriptedEngine
from models.scripted_text import VOCAB_SIZE, ScriptedTextModel
from runtime.lifecycle import Lifecycle
from runtime.tree import Loaded, Tree
from tests.sim import oracle
from tests.sim.clients import Client, arriving, store_client
from tests.sim.run import RequestFacts, Run
from tests.sim.schedule import seeded_schedule
from tests.sim.world_plan import COST, SCRIPT_BYTES, Ending, WorldPlan, make_plan

NAME = "world"
INFO = EngineInfo(
    model_type="scripted",
    vocab_size=VOCAB_SIZE,
    context_length=8192,
    kv_bytes_per_token=1024,
    prefix="blocks",
)
#: No run takes longer in virtual seconds, or more task steps; one that does hangs.
WATCHDOG_S = 300.0
WATCHDOG_STEPS = 1_000_000


class WorldHung(AssertionError):
    """The run did not end; the message has the end of its journal."""


class UnplannedCrash(AssertionError):
    """An actor crashed and no fault of the plan explains it; ``__cause__`` says where."""


class SimulatedCrash(Exception):
    """Raised at a crash point of an actor."""


class CrashPoints:
    """Implements ``actors.kit.faults.Faults``: raises at planned hits and records that."""

    def __init__(self, crashes: Mapping[str, tuple[int, ...]], journal: RingJournal) -> None:
        self._crashes = crashes
        self._journal = journal
        self._hits: Counter[str] = Counter()

    def hit(self, point: str) -> None:
        self._hits[point] += 1
        if self._hits[point] in self._crashes.get(point, ()):
            self._journal.record(NAME, "fault_armed", "crash", point)
            raise SimulatedCrash(f"{point}, hit {self._hits[point]}")


class _StepLimit(trio.abc.Instrument):
    """Cancels a run whose tasks go round and round without time passing."""

    def __init__(self) -> None:
        self.steps = 0
        self.scope = trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if self.steps == WATCHDOG_STEPS:
            self.scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldResult:
    """``run`` is what the checkers take; ``steps`` counts task steps."""

    plan: WorldPlan
    run: Run
    steps: int

    @property
    def journal(self) -> list[Entry]:
        return list(self.run.entries)


class World:
    def __init__(self, plan: WorldPlan, journal: RingJournal) -> None:
        self._plan = plan
        self._journal = journal
        self._clients_done = trio.Event()
        self._text = ScriptedTextModel()
        self._phase = PhaseCell()
        self.engine = ScriptedEngine(
            info=replace(INFO, prefix=plan.prefix),
            cost=COST,
            faults=_copy(plan.engine),
            max_length=SCRIPT_BYTES,
            observe=self._observe,
        )
        self._lifecycle = Lifecycle(self._phase, journal)
        self._tree = Tree(
            limits=plan.limits,
            seams=Seams(rng=Random(plan.seed), wall_time=trio.current_time),
            journal=journal,
            phase=self._phase,
            faults=CrashPoints(plan.crashes, journal),
            offload=inline_offload,
        )
        self._tree.attach(
            Loaded(engine=self.engine, text=self._text, limits=plan.limits, model=_model(plan))
        )

    def _observe(self, event: str, *fields: object) -> None:
        self._journal.record("engine", f"engine_{event}", *fields)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._serve)
            await self._run_clients()

    async def _run_clients(self) -> None:
        ports = self._tree.ports
        async with trio.open_nursery() as nursery:
            for plan in self._plan.clients:
                nursery.start_soon(Client(plan, ports, self._journal).run)
            for number in range(self._plan.store_clients):
                nursery.start_soon(store_client, number, ports, self._journal, self._plan.seed)
        self._clients_done.set()

    async def _serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """What the command does around the tree, without sockets and signals."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tree_run)
                self._lifecycle.enter(Phase.READY)
                task_status.started()
                await self._wait_for_end()
                nursery.cancel_scope.cancel()
        except* (SupervisionFailed, EngineDead):
            pass
        self._lifecycle.enter(Phase.STOPPED)
        self._journal.record(NAME, "ended")

    async def _tree_run(self) -> None:
        try:
            await self._tree.run()
        finally:
            self._lifecycle.enter(Phase.STOPPED)

    async def _wait_for_end(self) -> None:
        plan = self._plan
        match plan.ending:
            case Ending.IDLE:
                await self._clients_done.wait()
                limits = plan.limits
                settle_s = limits.sweep_s * 2 + plan.max_step_s + limits.restart_backoff_max_s
                await trio.sleep(settle_s)  # the engine of a crashed pipeline is reset by then
                self._probe_idle()
            case Ending.DRAIN:
                await trio.sleep_until(plan.ends_s)
                await self._lifecycle.drain(self._tree.ports.places, plan.limits.drain_s)
            case Ending.STOP:
                await trio.sleep_until(plan.ends_s)
                self._lifecycle.enter(Phase.DRAINING)

    def _probe_idle(self) -> None:
        """With nobody inside, everything has been given back."""
        status = self._tree.status()
        places = self._tree.ports.places
        held = {
            "places": places.count - places.free,
            "active": status.active,
            "waiting": status.queue_depth,
            "leases": status.leases,
            "leased_tokens": status.leased_tokens,
            "engine_sequences": len(self.engine.sequences) if self.engine.alive else 0,
            "fork_snapshots": self._fork_snapshots(),
        }
        self._journal.record(NAME, "probe", "idle", tuple(held.items()))

    def _fork_snapshots(self) -> int:
        kept = self.engine.kept if self.engine.alive else ()
        return sum(handle < 0 for handle in kept)


def _copy(faults: EngineFaults) -> EngineFaults:
    return replace(
        faults,
        slow=dict(faults.slow),
        failing=set(faults.failing),
        failing_rows=dict(faults.failing_rows),
    )


def _model(plan: WorldPlan) -> ServedModel:
    return ServedModel(
        name="scripted",
        context_length=plan.limits.slot_context_tokens,
        vocab_size=VOCAB_SIZE,
        has_chat_template=True,
        supports_tools=False,
        created_s=0,
    )


class _CrashLog(logging.Handler):
    """Collects what the supervisors log: a crash that nobody planned is a bug."""

    PLANNED = (SimulatedCrash, EngineError, PeerGone)

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.unplanned: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._sort(record.exc_info[1])

    def _sort(self, error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                self._sort(inner)
        elif not isinstance(error, self.PLANNED):
            self.unplanned.append(error)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Planned crashes are no news: nothing is printed."""
        log = logging.getLogger("mlxcel")
        before = (log.level, log.propagate)
        log.setLevel(logging.ERROR)
        log.propagate = False
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)
            log.setLevel(before[0])
            log.propagate = before[1]


def _expected(
    plan: WorldPlan, engine: ScriptedEngine, entries: list[Entry]
) -> dict[str, RequestFacts]:
    """What the oracle says about every request that was sent."""
    text = ScriptedTextModel()
    clients = {client.request.request_id: client for client in plan.clients}
    requests: dict[str, RequestFacts] = {}
    for entry in entries:
        if entry.event != "client_sent":
            continue
        sent, _, choice = entry["rid"].partition("#")
        first, _, attempt = sent.partition(".")
        client = clients[first]
        requests[entry["rid"]] = oracle.facts(
            arriving(client, int(attempt or 0), entry.time_s),
            engine=engine,
            text=text,
            limits=plan.limits,
            sent_s=entry.time_s,
            patient=client.patient(int(choice or 0)),
            choice=int(choice or 0),
        )
    return requests


def run_world(seed: int) -> WorldResult:
    return run_plan(make_plan(seed))


def run_plan(plan: WorldPlan) -> WorldResult:
    """Raises WorldHung, or whatever a bug raises through the tree."""
    limit = _StepLimit()
    journal = RingJournal(trio.current_time)
    engines: list[ScriptedEngine] = []

    async def main() -> None:
        with limit.scope, trio.move_on_after(WATCHDOG_S) as watchdog:
            world = World(plan, journal)
            engines.append(world.engine)
            await world.run()
        if limit.scope.cancelled_caught or watchdog.cancelled_caught:
            tail = "\n".join(map(str, list(journal)[-40:]))
            raise WorldHung(f"seed {plan.seed} does not end (python -m tools.sim):\n{tail}")

    crashes = _CrashLog()
    with seeded_schedule(plan.seed), crashes.listening():
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(main, clock=clock, instruments=[limit])
    if crashes.unplanned:
        raise UnplannedCrash(f"seed {plan.seed}: {crashes.unplanned}") from crashes.unplanned[0]
    requests = _expected(plan, engines[0], list(journal))
    run = Run(
        entries=list(journal),
        limits=plan.limits,
        requests=requests,
        max_step_s=plan.max_step_s,
        faults=plan.faults,
    )
    return WorldResult(plan=plan, run=run, steps=limit.steps)
