"""The actor tree: every long-lived channel, the actors, and the nurseries that hold them.

A :class:`Tree` exists before the model does, so that the HTTP server can answer while it loads:
``ports`` is complete from the start, ``attach`` brings the model, ``run`` supervises the actors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from actors.admission import AdmissionActor
from actors.core.cache_stats import CacheStats
from actors.core.service_rate import ServiceRate
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.kit.seams import Seams
from actors.kit.supervise import RestartPolicy, Supervisor
from actors.limits import LANES, Limits
from actors.messages import CacheCleared, Queued, StoreMessage, Submit
from actors.offload import Offload, ThreadOffload
from actors.phase import PhaseCell
from actors.pipeline import Pipeline
from actors.ports import (
    Places,
    Ports,
    RuntimeStatus,
    ServedModel,
    SlotStatus,
    nothing_cleared,
)
from actors.prefill_queue import open_room
from actors.responses_store import ResponsesStore
from models.engine import Engine
from models.text_model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready, with the limits that fit it (no wider than the tree's own)."""

    engine: Engine
    text: TextModel
    limits: Limits
    model: ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actors:
    loaded: Loaded
    admission: AdmissionActor
    pipeline: Pipeline
    store: ResponsesStore
    rate: ServiceRate


class Tree:
    """Call ``attach`` once, then ``run`` once, both before the phase becomes READY."""

    def __init__(
        self,
        *,
        limits: Limits,
        seams: Seams,
        journal: Journal,
        phase: PhaseCell,
        faults: Faults = NO_FAULTS,
        offload: Offload | None = None,
        loop_lag: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._limits = limits
        self._journal = journal
        self._phase = phase
        self._faults = faults
        self._offload = offload or ThreadOffload(workers=limits.tokenize_workers)
        self._actors: _Actors | None = None
        self._refusals: Counter[str] = Counter()
        self._supervisor = Supervisor(policy=RestartPolicy.from_limits(limits), journal=journal)
        submit = {lane: trio.open_memory_channel[Submit](limits.submit_channel) for lane in LANES}
        self._submit_rx = {lane: rx for lane, (_, rx) in submit.items()}
        store_tx, self._store_rx = trio.open_memory_channel[StoreMessage](limits.store_queue)
        self.ports = Ports(
            phase=phase,
            places=Places(limits.places),
            submit={lane: tx for lane, (tx, _) in submit.items()},
            store=store_tx,
            status=self.status,
            model=self._model,
            note_refusal=self._note_refusal,
            retry_after_s=self._retry_after_s,
            seams=seams,
            limits=limits,
            cache_stats=self._cache_stats,
            clear_cache=self._clear_cache,
            loop_lag=loop_lag,
        )

    def attach(self, loaded: Loaded) -> None:
        """Build the actors around a loaded model."""
        assert self._actors is None
        limits = loaded.limits
        assert limits.places <= self._limits.places, "the model needs wider limits than the tree's"
        self.ports.places.resize(limits.places)
        rate = ServiceRate(slots=limits.max_slots)
        lanes = {lane: trio.open_memory_channel[Queued](0) for lane in LANES}
        admission = AdmissionActor(
            submit=self._submit_rx,
            lanes={lane: tx for lane, (tx, _) in lanes.items()},
            text=loaded.text,
            limits=limits,
            phase=self._phase,
            journal=self._journal,
            offload=self._offload,
            retry_after_s=rate.retry_after_s,
            fingerprint=loaded.engine.info.fingerprint,
            faults=self._faults,
        )
        pipeline = Pipeline(
            engine=loaded.engine,
            text=loaded.text,
            limits=limits,
            phase=self._phase,
            room=open_room(limits),
            lanes={lane: rx for lane, (_, rx) in lanes.items()},
            journal=self._journal,
            rate=rate,
            faults=self._faults,
        )
        store = ResponsesStore(inbox=self._store_rx, limits=limits, faults=self._faults)
        self._actors = _Actors(
            loaded=loaded, admission=admission, pipeline=pipeline, store=store, rate=rate
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervise the actors until cancelled.  Raises SupervisionFailed (in a group).

        However it ends, every request that was inside has got its terminal event by then.
        """
        assert self._actors is not None
        actors = self._actors
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actors.pipeline.supervised, self._supervisor)
            nursery.start_soon(actors.admission.supervised, self._supervisor)
            nursery.start_soon(actors.store.supervised, self._supervisor)
            task_status.started()

    # What others see -----------------------------------------------------------------------------

    def _model(self) -> ServedModel | None:
        return None if self._actors is None else self._actors.loaded.model

    def _cache_stats(self) -> CacheStats | None:
        return None if self._actors is None else self._actors.pipeline.cache_stats()

    async def _clear_cache(self) -> CacheCleared:
        if self._actors is None:
            return await nothing_cleared()
        return await self._actors.pipeline.clear_cache()

    def _note_refusal(self, code: str) -> None:
        self._refusals[code] += 1

    def _retry_after_s(self) -> float:
        return 1.0 if self._actors is None else self._actors.rate.retry_after_s()

    def status(self) -> RuntimeStatus:
        """A consistent snapshot.  Never awaits."""
        if self._actors is None:
            return self._status_while_loading()
        actors = self._actors
        pipeline = actors.pipeline.status()
        counters = actors.pipeline.counters
        submitted = sum(rx.statistics().current_buffer_used for rx in self._submit_rx.values())
        return RuntimeStatus(
            phase=self._phase.phase,
            engine_alive=pipeline.alive and not self._phase.engine_dead,
            slots=pipeline.slots,
            queue_depth=pipeline.waiting + actors.admission.waiting + submitted,
            leases=pipeline.leases,
            leased_tokens=pipeline.leased_tokens,
            sequences_started=counters.started,
            sequences_completed=counters.completed,
            sequences_cancelled=counters.cancelled,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            decode_steps=counters.decode_steps,
            prefill_chunks=counters.prefill_chunks,
            requests_refused=actors.admission.refused + self._refusals.total(),
            restarts=dict(self._supervisor.restarts),
            store_entries=actors.store.entries,
            store_bytes=actors.store.size_bytes,
            step_cost=actors.pipeline.cost.snapshot(),
        )

    def _status_while_loading(self) -> RuntimeStatus:
        idle = tuple(
            SlotStatus(slot=slot, request_id=None, state="idle")
            for slot in range(self._limits.max_slots)
        )
        return RuntimeStatus(
            phase=self._phase.phase,
            engine_alive=False,
            slots=idle,
            queue_depth=0,
            leases=0,
            leased_tokens=0,
            sequences_started=0,
            sequences_completed=0,
            sequences_cancelled=0,
            prefill_tokens=0,
            decode_tokens=0,
            decode_steps=0,
            prefill_chunks=0,
            requests_refused=self._refusals.total(),
            restarts={},
        )
