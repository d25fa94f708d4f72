"""A CacheManager that does all that the DecodeLoop has to cope with, in the plainest way.

Leases start small and grow; what sequences leave behind is kept in blocks (or as snapshots) and
found again by comparing tokens; room is made by forgetting what is not in use, oldest first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trio

from actors.closing import ENGINE_ERROR
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
    KeptBlock,
    ReleaseCache,
    ReserveCache,
    ShrinkCache,
)
from models.engine import KeptPrefix, PrefixData

NAME = "cache"
Key = tuple[bytes, tuple[int, ...]]  # cache root, all tokens up to the end of what is kept


@dataclass
class Lease:
    tokens: int
    root: bytes | None
    prompt: tuple[int, ...]
    pinned: frozenset[int] = frozenset()
    snapshot: int | None = None


@dataclass
class FakeCache:
    """``quantum`` is what leases start with beyond the prompt; ``block`` 0 keeps nothing.

    With ``snapshots`` whole prompts are kept instead of blocks.  ``disk``: kept data is exported,
    and loaded again after it had been forgotten.
    """

    inbox: trio.MemoryReceiveChannel[CacheMessage]
    budget_tokens: int
    journal: Journal
    faults: Faults = NO_FAULTS
    quantum: int = 4
    block: int = 4
    snapshots: bool = False
    disk: bool = False
    leased: dict[int, Lease] = field(default_factory=dict)
    kept: dict[Key, tuple[int, int]] = field(default_factory=dict)  # handle, tokens; oldest first
    data: dict[Key, PrefixData] = field(default_factory=dict)
    exporting: dict[int, Key] = field(default_factory=dict)
    latest: int = 0  # lease or handle

    def take_forget(self) -> tuple[int, ...]:
        return ()  # answers carry them all

    @property
    def book(self) -> FakeCache:
        return self

    @property
    def leases(self) -> int:
        return len(self.leased)

    @property
    def leased_tokens(self) -> int:
        return sum(lease.tokens for lease in self.leased.values())

    async def run(self) -> None:
        try:
            async for message in self.inbox:
                try:
                    self.handle(message)
                finally:
                    fail_message(message, ENGINE_ERROR)
        finally:
            fail_pending(self.inbox, ENGINE_ERROR)

    def handle(self, message: CacheMessage) -> None:
        match message:
            case ReserveCache():
                self.faults.hit("cache.reserve")
                self.reserve(message)
            case ReleaseCache():
                self.faults.hit("cache.release")
                self.release(message)
            case GrowCache():
                self.grow(message)
            case ShrinkCache(request_id=rid, lease_id=lease_id):
                self.leased[lease_id].tokens = 0
                self.leased[lease_id].pinned = frozenset()
                self.note("lease_changed", rid, lease_id, 0)
            case BlocksExported(blocks=blocks):
                for one in blocks:
                    if one.handle in self.exporting:
                        self.data[self.exporting.pop(one.handle)] = one

    def note(self, event: str, *fields: Any) -> None:
        self.journal.record(NAME, event, *fields, self.leased_tokens)

    def new_id(self) -> int:
        self.latest += 1
        return self.latest

    def make_room(
        self, tokens: int, pinned: frozenset[int] = frozenset()
    ) -> tuple[int, ...] | None:
        """Handles to be forgotten so that ``tokens`` more fit; None if they cannot."""
        in_use = pinned.union(*(lease.pinned for lease in self.leased.values()))
        free = self.budget_tokens - self.leased_tokens - sum(n for _, n in self.kept.values())
        chosen: list[Key] = []
        for key, (handle, size) in self.kept.items():
            if free >= tokens:
                break
            if handle not in in_use:
                chosen.append(key)
                free += size
        if free < tokens:
            return None
        return tuple(self.kept.pop(key)[0] for key in chosen)

    def lookup(self, root: bytes | None, prompt: tuple[int, ...]) -> list[tuple[Key, int]]:
        """Keys that the prompt can begin with, and where each ends."""
        if root is None or not self.block:
            return []
        if self.snapshots:
            ends = range(len(prompt) - 1, 0, -1)
            found = next((end for end in ends if (root, prompt[:end]) in self.kept), None)
            return [] if found is None else [((root, prompt[:found]), found)]
        chain: list[tuple[Key, int]] = []
        for end in range(self.block, len(prompt) + 1, self.block):
            key = (root, prompt[:end])
            if end - self.block >= len(prompt) - 1 or not (key in self.kept or key in self.data):
                break
            chain.append((key, end))
        return chain

    def reserve(self, message: ReserveCache) -> None:
        prompt = message.prompt_ids
        tokens = min(message.total_tokens, len(prompt) + self.quantum)
        chain = self.lookup(message.cache_root, prompt)
        pinned = frozenset(self.kept[key][0] for key, _ in chain if key in self.kept)
        load = [key for key, _ in chain if key not in self.kept]
        forget = self.make_room(tokens + self.block * len(load), pinned)
        if forget is None and chain:  # its own prefix is in the way
            chain, load = [], []
            forget = self.make_room(tokens)
        if forget is None:
            free = self.budget_tokens - self.leased_tokens
            self.journal.record(NAME, "lease_refused", message.request_id, tokens, free)
            reply(message.reply_tx, CacheRefused(free_tokens=free))
            return
        loaded = []
        for key in load:
            self.kept[key] = (self.new_id(), self.block)
            loaded.append(PrefixData(handle=self.kept[key][0], arrays=self.data[key].arrays))
        prefix = None
        if chain:
            handles = tuple(self.kept[key][0] for key, _ in chain)
            prefix = KeptPrefix(handles=handles, tokens=min(chain[-1][1], len(prompt) - 1))
        snapshot = None
        wanted = message.cache_root is not None and len(prompt) > 1
        if self.snapshots and wanted and (prefix is None or prefix.tokens < len(prompt) - 1):
            snapshot = self.new_id()
        lease_id = self.new_id()
        in_use = frozenset(() if prefix is None else prefix.handles)
        self.leased[lease_id] = Lease(tokens, message.cache_root, prompt, in_use, snapshot)
        self.note("leased", message.request_id, lease_id, tokens)
        lease = CacheLease(
            lease_id=lease_id,
            tokens=tokens,
            prefix=prefix,
            load=tuple(loaded),
            snapshot=snapshot,
            forget=forget,
        )
        assert reply(message.reply_tx, lease)

    def grow(self, message: GrowCache) -> None:
        lease = self.leased[message.lease_id]
        assert message.tokens > lease.tokens
        lease.pinned = frozenset()  # it runs already, and whoever comes back begins anew
        forget = self.make_room(message.tokens - lease.tokens)
        if forget is None:
            reply(message.reply_tx, CacheRefused(free_tokens=0))
            return
        lease.tokens = message.tokens
        self.note("lease_changed", message.request_id, message.lease_id, lease.tokens)
        assert reply(message.reply_tx, CacheGrown(tokens=lease.tokens, forget=forget))

    def release(self, message: ReleaseCache) -> None:
        lease = self.leased.pop(message.lease_id)
        self.note("lease_released", message.request_id, message.lease_id)
        if message.reply_tx is None:
            return
        assert lease.root is not None
        keep: list[KeptBlock] = []
        forget: list[int] = []
        if self.snapshots:
            self.keep_snapshot(lease, message.tokens, forget)
        elif self.block:
            for start in range(0, len(message.tokens) - self.block + 1, self.block):
                key = (lease.root, message.tokens[: start + self.block])
                room = self.make_room(self.block, frozenset(one.handle for one in keep))
                if key in self.kept or room is None:
                    continue
                forget += room
                handle = self.new_id()
                self.kept[key] = (handle, self.block)
                export = self.disk and key not in self.data
                if export:
                    self.exporting[handle] = key
                keep.append(
                    KeptBlock(handle=handle, start=start, end=start + self.block, export=export)
                )
        reply(message.reply_tx, CacheReleased(keep=tuple(keep), forget=tuple(forget)))

    def keep_snapshot(self, lease: Lease, tokens: tuple[int, ...], forget: list[int]) -> None:
        size = len(lease.prompt) - 1
        if lease.snapshot is None or len(tokens) < size or lease.root is None:
            return
        key = (lease.root, lease.prompt[:size])
        room = None if key in self.kept else self.make_room(size)
        if room is None:
            forget.append(lease.snapshot)
            return
        forget += room
        self.kept[key] = (lease.snapshot, size)
