"""The simulated callers: what an HTTP route would do with a request, each in its own mood."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TypeVar

import trio

from actors.errors import RequestError
from actors.events import Accepted, Event, Failed, Finished, Started, TextDelta
from actors.generation import Generation, open_generations
from actors.kit.journal import RingJournal
from actors.messages import DeleteResponse, GetResponse, PutResponse
from actors.ports import Ports
from actors.requests import GenerationRequest
from tests.sim.world_plan import ClientPlan, Mood

NAME = "client"
T = TypeVar("T")


class Client:
    """Sends one request, of one or several choices, and again if it fails."""

    def __init__(self, plan: ClientPlan, ports: Ports, journal: RingJournal) -> None:
        self._plan = plan
        self._ports = ports
        self._journal = journal

    async def run(self) -> None:
        await trio.sleep_until(self._plan.arrives_s)
        for attempt in range(1 + self._plan.retries):
            if await self._attempt(arriving(self._plan, attempt, trio.current_time())):
                return

    async def _attempt(self, request: GenerationRequest) -> bool:
        """Whether no choice of it failed."""
        rids = [choice_id(request.request_id, n) for n in range(self._plan.choices)]
        for rid in rids:
            self._journal.record(NAME, "client_sent", rid, request.lane.name)
        try:
            generations = open_generations(self._ports, request, self._plan.choices)
        except RequestError as error:
            for rid in rids:
                self._journal.record(NAME, "client_event", rid, "turned_away", error.code.value)
            return False
        talks = [
            Conversation(self._plan, self._plan.mood_of(n), generation, self._journal)
            for n, generation in enumerate(generations)
        ]
        async with trio.open_nursery() as nursery:
            for talk in talks:
                nursery.start_soon(talk.run)
        return not any(talk.failed for talk in talks)


class Conversation:
    """The reader of one choice."""

    def __init__(
        self, plan: ClientPlan, mood: Mood, generation: Generation, journal: RingJournal
    ) -> None:
        self._plan = plan
        self._mood = mood
        self._generation = generation
        self._journal = journal
        self._rid = generation.request_id
        self._over = False  # a terminal event was read
        self.failed = False

    def _note(self, kind: str, text: str = "") -> None:
        self._journal.record(NAME, "client_event", self._rid, kind, text)

    async def run(self) -> None:
        try:
            if self._mood is not Mood.LEAVES_AT_ONCE:
                leaves = self._mood is Mood.LEAVES_AT
                with trio.move_on_after(self._plan.leaves_s if leaves else math.inf):
                    await self._converse(self._generation)
        finally:
            self._close(self._generation)

    def _close(self, generation: Generation) -> None:
        if not self._over:
            self._journal.record(NAME, "client_closed", self._rid)
        generation.close()

    async def _converse(self, generation: Generation) -> None:
        try:
            prompt_tokens = await generation.wait_accepted()
        except RequestError as error:
            self._ended(generation, "failed", error.code.value)
            return
        self._note("accepted", str(prompt_tokens))
        read = 1
        while not self._over:
            if await self._acts_up(read):
                return
            self._take(generation, await anext(generation))
            read += 1

    async def _acts_up(self, read: int) -> bool:
        """Whether the client leaves now, having read so many events."""
        plan = self._plan
        match self._mood:
            case Mood.LEAVES_AFTER:
                return read > plan.events
            case Mood.SLOW:
                await trio.sleep(plan.pause_s)
            case Mood.NAPPING | Mood.STALLED if read == plan.events + 1:
                await trio.sleep(plan.pause_s)
            case _:
                pass
        return False

    def _take(self, generation: Generation, event: Event) -> None:
        match event:
            case Accepted():
                self._note("accepted again")
            case Started(cached_tokens=cached):
                self._note("started", str(cached))
            case TextDelta():
                self._note(f"delta:{event.position}", event.text)
            case Finished(usage=usage):
                if event.text:
                    self._note("rest", event.text)
                counts = f"{usage.prompt_tokens},{usage.completion_tokens}"
                self._ended(generation, "finished", f"{event.reason.value},{counts}")
            case Failed():
                self._ended(generation, "failed", event.code.value)

    def _ended(self, generation: Generation, kind: str, detail: str) -> None:
        self._over = True
        self.failed = kind == "failed"
        self._note(kind, detail)
        try:
            event = generation._rx.receive_nowait()
        except trio.EndOfChannel:
            self._note("end")
        except trio.WouldBlock:
            self._note("still open")
        else:
            self._note("event after the end", repr(event))


def choice_id(rid: str, number: int) -> str:
    return f"{rid}#{number}" if number else rid


def arriving(plan: ClientPlan, attempt: int, now: float) -> GenerationRequest:
    """The request as it is sent: an id of its own and an absolute deadline."""
    suffix = f".{attempt}" if attempt else ""
    return replace(
        plan.request,
        request_id=plan.request.request_id + suffix,
        deadline_s=now + plan.request.deadline_s,
    )


async def store_client(number: int, ports: Ports, journal: RingJournal, seed: int) -> None:
    """Puts, gets and deletes a few responses of its own, as long as there is a store."""
    rng = Random(seed * 1000 + number)
    owner = f"owner{number}"
    for _ in range(rng.randint(3, 25)):
        await trio.sleep(rng.choice((0.0, rng.uniform(0.0, 0.2))))
        key = f"{owner}/{rng.randrange(4)}"
        try:
            await _store_call(rng, key, owner, ports, journal)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the server is gone
        status = ports.status()
        journal.record(NAME, "probe", "store_size", (status.store_entries, status.store_bytes))


async def _store_call(
    rng: Random, key: str, owner: str, ports: Ports, journal: RingJournal
) -> None:
    match rng.choice(("put", "put", "get", "get", "delete")):
        case "put":
            body = b"x" * rng.choice((1, 10, 300, 900, 3000))
            put_tx, put_rx = trio.open_memory_channel[bool](1)
            put = PutResponse(response_id=key, owner=owner, body=body, reply_tx=put_tx)
            await ports.store.send(put)
            stored = await _answer(put_rx)
            journal.record(NAME, "probe", "store_put", (key, len(body), int(bool(stored))))
        case "get":
            get_tx, get_rx = trio.open_memory_channel[bytes | None](1)
            await ports.store.send(GetResponse(response_id=key, owner=owner, reply_tx=get_tx))
            found = await _answer(get_rx)
            size = -1 if found is None else len(found)
            journal.record(NAME, "probe", "store_get", (key, size))
        case _:
            del_tx, del_rx = trio.open_memory_channel[bool](1)
            await ports.store.send(DeleteResponse(response_id=key, owner=owner, reply_tx=del_tx))
            there = await _answer(del_rx)
            journal.record(NAME, "probe", "store_delete", (key, int(bool(there))))


async def _answer(rx: trio.MemoryReceiveChannel[T]) -> T | None:
    """None when the store crashed with the request in hand."""
    try:
        return await rx.receive()
    except trio.EndOfChannel:
        return None
