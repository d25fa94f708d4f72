"""CacheManager: the one owner of the KV cache's token budget.

Owns a ``CacheBook``.  Receives ``ReserveCache`` (answered at once on its reply channel) and
``ReleaseCache``.  Lives and ends with one incarnation of the pipeline.
"""

from __future__ import annotations

from typing import assert_never

import trio

from actors.closing import ENGINE_ERROR
from actors.core.cache_book import CacheBook
from actors.kit.channels import fail_message, fail_pending, reply
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.messages import (
    BlocksExported,
    CacheGrown,
    CacheLease,
    CacheMessage,
    CacheRefused,
    CacheReleased,
    GrowCache,
    ReleaseCache,
    ReserveCache,
    ShrinkCache,
)

NAME = "cache"


class CacheManager:
    def __init__(
        self,
        *,
        inbox: trio.MemoryReceiveChannel[CacheMessage],
        budget_tokens: int,
        journal: Journal,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._inbox = inbox
        self._journal = journal
        self._faults = faults
        self.book = CacheBook(budget_tokens=budget_tokens)

    async def run(self) -> None:
        try:
            async for message in self._inbox:
                self._handle(message)
        finally:
            fail_pending(self._inbox, ENGINE_ERROR)

    def _handle(self, message: CacheMessage) -> None:
        try:
            match message:
                case ReserveCache():
                    self._reserve(message)
                case ReleaseCache():
                    self._release(message)
                case GrowCache():
                    reply(message.reply_tx, CacheGrown(tokens=message.tokens))
                case ShrinkCache() | BlocksExported():
                    pass
                case other:
                    assert_never(other)
        finally:
            fail_message(message, ENGINE_ERROR)  # closes the reply channel, answered or not

    def _reserve(self, message: ReserveCache) -> None:
        self._faults.hit("cache.reserve")
        lease_id = self.book.reserve(message.total_tokens)
        if lease_id is None:
            free = self.book.free_tokens
            self._journal.record(
                NAME, "lease_refused", message.request_id, message.total_tokens, free
            )
            reply(message.reply_tx, CacheRefused(free_tokens=free))
            return
        self._note("leased", message.request_id, lease_id, message.total_tokens)
        lease = CacheLease(lease_id=lease_id, tokens=message.total_tokens)
        if not reply(message.reply_tx, lease):
            self.book.release(lease_id)
            self._note("lease_released", message.request_id, lease_id)

    def _release(self, message: ReleaseCache) -> None:
        self._faults.hit("cache.release")
        self.book.release(message.lease_id)
        self._note("lease_released", message.request_id, message.lease_id)
        if message.reply_tx is not None:
            reply(message.reply_tx, CacheReleased())

    def _note(self, event: str, *fields: object) -> None:
        self._journal.record(NAME, event, *fields, self.book.leased_tokens)
