"""CacheManager: the one owner of the KV cache's token budget and of what is kept in it.

Owns a ``CacheBook`` (leases) and a ``PrefixCache`` (kept prefixes).  Receives ``ReserveCache``,
``GrowCache``, ``ShrinkCache``, ``ReleaseCache`` and, on the control channel, ``ClearCache``; it
only ever answers.  The arrays live in the engine under handles: answers tell what to keep under
which handle and which handles to forget.  The engine has to hear of both in the next step, before
anything else, so that a handle is never used after it was forgotten.

Lives and ends with one incarnation of the pipeline; ``memory`` outlives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import trio

from actors.closing import ENGINE_ERROR
from actors.core.cache_book import CacheBook
from actors.core.prefix_cache import CacheMemory, Held, Mode, PrefixCache
from actors.kit.channels import fail_message, fail_pending, reply
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.limits import Limits
from actors.messages import (
    BlocksExported,
    CacheCleared,
    CacheControl,
    CacheGrown,
    CacheLease,
    CacheMessage,
    CacheRefused,
    CacheReleased,
    GrowCache,
    KeptBlock,
    ReleaseCache,
    ReserveCache,
    ShrinkCache,
)

NAME = "cache"


class CacheManager:
    """``on_forget`` is called when handles wait to be forgotten although nobody asked anything."""

    def __init__(
        self,
        *,
        inbox: trio.MemoryReceiveChannel[CacheMessage],
        control: trio.MemoryReceiveChannel[CacheControl] | None = None,
        limits: Limits,
        mode: Mode = "none",
        state_bytes: int = 0,
        memory: CacheMemory | None = None,
        on_forget: Callable[[], None] = lambda: None,
        journal: Journal,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._inbox = inbox
        self._control = control
        self._on_forget = on_forget
        self._journal = journal
        self._faults = faults
        self._held: dict[int, Held] = {}
        self.prefixes = PrefixCache(
            limits=limits.prompt_cache,
            mode=mode,
            bytes_per_token=limits.kv_bytes_per_token,
            state_bytes=state_bytes,
            memory=memory or CacheMemory(),
            room=lambda: self.book.free_tokens,
        )
        self.book = CacheBook(
            budget_tokens=limits.cache_budget_tokens,
            quantum_tokens=limits.lease_quantum_tokens,
            kept=self.prefixes.kept_tokens,
            evictable=self.prefixes.evictable_tokens,
            evict=self.prefixes.evict,
        )

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                if self._control is not None:
                    nursery.start_soon(self._serve_control, self._control)
                async for message in self._inbox:
                    self._handle(message)
                nursery.cancel_scope.cancel()
        finally:
            fail_pending(self._inbox, ENGINE_ERROR)
            if self._control is not None:
                self._control.close()  # a clone: what waits in it is for the next incarnation

    async def _serve_control(self, control: trio.MemoryReceiveChannel[CacheControl]) -> None:
        async for message in control:
            freed_bytes, freed_entries = self.prefixes.clear()
            self._journal.record(NAME, "cleared", freed_entries)
            reply(
                message.reply_tx,
                CacheCleared(freed_bytes=freed_bytes, freed_entries=freed_entries),
            )
            self._on_forget()

    def take_forget(self) -> tuple[int, ...]:
        """Handles that no answer has named yet; the caller gives them to the engine."""
        handles = self.prefixes.take_forgotten()
        if handles:
            self._journal.record(NAME, "forgotten", handles)
        return handles

    def _handle(self, message: CacheMessage) -> None:
        try:
            match message:
                case ReserveCache():
                    self._reserve(message)
                case GrowCache():
                    self._grow(message)
                case ShrinkCache():
                    self._shrink(message)
                case ReleaseCache():
                    self._release(message)
                case BlocksExported():
                    pass  # nothing is exported yet
                case other:
                    assert_never(other)
        finally:
            fail_message(message, ENGINE_ERROR)  # closes the reply channel, answered or not

    def _reserve(self, message: ReserveCache) -> None:
        self._faults.hit("cache.reserve")
        rid, prompt, most = message.request_id, message.prompt_ids, message.total_tokens
        prefix, held = self.prefixes.find(rid, message.cache_root, prompt, trio.current_time())
        lease_id = self.book.reserve(len(prompt), most)
        if lease_id is None and prefix is not None:
            # Its own prefix may be what takes the room that it needs.
            self.prefixes.drop(held)
            prefix = None
            lease_id = self.book.reserve(len(prompt), most)
        if lease_id is None:
            self.prefixes.drop(held)
            free = self.book.free_tokens
            self._journal.record(NAME, "lease_refused", rid, most, free)
            reply(message.reply_tx, CacheRefused(free_tokens=free))
            return
        tokens = self.book.tokens_of(lease_id)
        self._held[lease_id] = held
        self._note("leased", rid, lease_id, tokens)
        if prefix is not None:
            self._journal.record(NAME, "prefix_hit", rid, prefix.handles, prefix.tokens)
        lease = CacheLease(
            lease_id=lease_id,
            tokens=tokens,
            prefix=prefix,
            snapshot=self.prefixes.want_snapshot(held),
            forget=self.take_forget(),
        )
        if not reply(message.reply_tx, lease):
            self._end(rid, lease_id)
            self.prefixes.index.forgotten += lease.forget  # they still have to be told

    def _grow(self, message: GrowCache) -> None:
        # Whoever grows has long been opened from its prefix, and has a copy of its own.
        self.prefixes.drop(self._held[message.lease_id])
        tokens = self.book.grow(message.lease_id, message.tokens)
        if tokens is None:
            self._journal.record(NAME, "grow_refused", message.request_id, message.lease_id)
            reply(message.reply_tx, CacheRefused(free_tokens=self.book.free_tokens))
            return
        self._note("lease_changed", message.request_id, message.lease_id, tokens)
        grown = CacheGrown(tokens=tokens, forget=self.take_forget())
        if not reply(message.reply_tx, grown):
            self.prefixes.index.forgotten += grown.forget

    def _shrink(self, message: ShrinkCache) -> None:
        self.prefixes.drop(self._held[message.lease_id])
        self.book.shrink(message.lease_id)
        self._note("lease_changed", message.request_id, message.lease_id, 0)

    def _release(self, message: ReleaseCache) -> None:
        self._faults.hit("cache.release")
        held = self._end(message.request_id, message.lease_id)
        if message.reply_tx is None:
            return
        keep = self.prefixes.donate(held, message.tokens, trio.current_time())
        if keep:
            handles = tuple(block.handle for block in keep)
            self._journal.record(NAME, "kept", message.request_id, handles)
        released = CacheReleased(
            keep=tuple(
                KeptBlock(handle=block.handle, start=block.start, end=block.end) for block in keep
            ),
            forget=self.take_forget(),
        )
        reply(message.reply_tx, released)

    def _end(self, request_id: str, lease_id: int) -> Held:
        held = self._held.pop(lease_id)
        self.prefixes.drop(held)
        self.book.release(lease_id)
        self._note("lease_released", request_id, lease_id)
        return held

    def _note(self, event: str, *fields: object) -> None:
        self._journal.record(NAME, event, *fields, self.book.leased_tokens)
