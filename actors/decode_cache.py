"""DecodeLoop's side of the cache: its talk with the CacheManager, and what of it goes into plans.

Nothing here awaits but ``settle``.  Every message that is answered has a reply channel of its own;
the answers are collected once per iteration.  Each answer may name handles to be forgotten, so
none is ever dropped, also if its sequence has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from actors.core.forks import ForkBook
from actors.decode_row import Row
from actors.kit.channels import PeerGone, ask, hand_over
from actors.messages import (
    BlocksExported,
    CacheGrown,
    CacheLease,
    CacheMessage,
    CacheRefused,
    CacheReleased,
    GrowCache,
    ReleaseCache,
    ShrinkCache,
)
from models.engine import KeepBlock, KeptPrefix, PrefixData

T = TypeVar("T")
Grown = CacheGrown | CacheRefused


class _Answer(Generic[T]):
    """An answer that is on its way.  Raises PeerGone when it will never come."""

    __slots__ = ("_answer", "_rx")

    def __init__(self, rx: trio.MemoryReceiveChannel[T]) -> None:
        self._rx = rx
        self._answer: T | None = None

    def poll(self) -> T | None:
        """None while it is not here yet."""
        if self._answer is None:
            try:
                self._answer = self._rx.receive_nowait()
            except trio.WouldBlock:
                return None
            except trio.EndOfChannel as error:
                raise PeerGone("an answer of the cache was lost") from error
            self._rx.close()
        return self._answer

    async def wait(self) -> None:
        """Until ``poll`` has it."""
        if self._answer is None:
            self._answer = await ask(self._rx)


@dataclass(slots=True)
class _Growing:
    row: Row
    answer: _Answer[Grown]


@dataclass(slots=True)
class _Leaving:
    """A released sequence that the engine holds until it is known what of it is to be kept."""

    sequence_id: int
    answer: _Answer[CacheReleased]
    lost: bool = False  # nothing of it can be kept
    freed: bool = False  # the engine has dropped it already


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWork:
    """What the next plan does before it computes anything."""

    forget: tuple[int, ...] = ()
    load: tuple[PrefixData, ...] = ()
    keep: tuple[KeepBlock, ...] = ()
    drop: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.forget or self.load or self.keep or self.drop)


class CacheLink:
    """``take_forget`` yields handles that the CacheManager wants forgotten on its own account."""

    def __init__(
        self,
        *,
        cache: trio.MemorySendChannel[CacheMessage],
        forks: ForkBook,
        take_forget: Callable[[], tuple[int, ...]],
    ) -> None:
        self._cache_tx = cache
        self._forks = forks
        self._take_forget = take_forget
        self._growing: list[_Growing] = []
        self._leaving: list[_Leaving] = []
        self._forget: list[int] = []
        self._load: dict[int, PrefixData] = {}
        self._keep: dict[int, KeepBlock] = {}
        self._drop: list[int] = []
        # Handles that the CacheManager counts on although the engine never got to keep them, with
        # the position where each would begin: its row was lost while the answer was on its way.
        self._void: dict[int, int] = {}

    # Leases --------------------------------------------------------------------------------------

    def take_over(self, lease: CacheLease) -> KeptPrefix | None:
        """A new sequence brings its lease; returns what of its prefix is really there."""
        self._poll_leaving()  # the lease may build upon what they left
        for data in lease.load:
            self._load[data.handle] = data
        self._forget += lease.forget
        prefix = lease.prefix
        for place, handle in enumerate(prefix.handles if prefix is not None else ()):
            if handle in self._void and prefix is not None:
                tokens = self._void[handle]
                return KeptPrefix(handles=prefix.handles[:place], tokens=tokens) if tokens else None
        return prefix

    def grow(self, row: Row, tokens: int) -> None:
        """Ask that the lease cover ``tokens``; the answer comes out of ``poll``."""
        assert not row.asked
        row.asked = True
        tx, rx = trio.open_memory_channel[Grown](1)
        self._growing.append(_Growing(row, _Answer(rx)))
        hand_over(
            self._cache_tx,
            GrowCache(
                request_id=row.seq.request_id,
                lease_id=row.lease.lease_id,
                tokens=tokens,
                reply_tx=tx,
            ),
        )

    def shrink(self, row: Row) -> None:
        """A preempted sequence holds nothing any more."""
        row.lease_tokens = 0
        hand_over(
            self._cache_tx,
            ShrinkCache(request_id=row.seq.request_id, lease_id=row.lease.lease_id),
        )

    def release(self, row: Row) -> None:
        """The end of a lease.  What the engine holds is offered, unless it is of no use."""
        seq = row.seq
        tokens: tuple[int, ...] = ()
        if row.donates and seq.in_engine:
            tokens = (*seq.prompt_ids, *seq.generated)[: seq.held]
        self._settle_snapshot(row, len(tokens))
        tx: trio.MemorySendChannel[CacheReleased] | None = None
        if tokens:
            tx, rx = trio.open_memory_channel[CacheReleased](1)
            self._leaving.append(_Leaving(seq.sequence_id, _Answer(rx)))
            seq.in_engine = False
        else:
            self.drop(row)
        hand_over(
            self._cache_tx,
            ReleaseCache(
                request_id=seq.request_id,
                lease_id=row.lease.lease_id,
                tokens=tokens,
                reply_tx=tx,
            ),
        )

    def _settle_snapshot(self, row: Row, donated: int) -> None:
        """The CacheManager takes a snapshot for kept exactly if the donation covers it."""
        handle = row.lease.snapshot
        if handle is None:
            return
        covered = donated > 0 and donated >= len(row.seq.prompt_ids) - 1
        if row.snapshot_kept and not covered:
            self._forget.append(handle)
        elif covered and not row.snapshot_kept:
            self._void[handle] = 0

    def drop(self, row: Row) -> None:
        """The engine frees the row's cache in the next step, before anything is computed."""
        if row.seq.in_engine:
            row.seq.in_engine = False
            self._drop.append(row.seq.sequence_id)

    def lost(self, sequence_id: int, *, freed: bool) -> None:
        """A step went wrong for a sequence that was released while it ran."""
        for one in self._leaving:
            if one.sequence_id == sequence_id:
                one.lost = True
                one.freed = freed
        if freed and sequence_id in self._drop:
            self._drop.remove(sequence_id)

    def exported(self, blocks: tuple[PrefixData, ...]) -> None:
        if blocks:
            hand_over(self._cache_tx, BlocksExported(blocks=blocks))

    # Answers -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._growing or self._leaving)

    def poll(self) -> list[tuple[Row, Grown]]:
        """Collect the answers that are here; returns those about growth."""
        self._poll_leaving()
        grown: list[tuple[Row, Grown]] = []
        growing, self._growing = self._growing, []
        for asked in growing:
            answer = asked.answer.poll()
            if answer is None:
                self._growing.append(asked)
                continue
            if isinstance(answer, CacheGrown):
                self._forget += answer.forget
            asked.row.asked = False
            grown.append((asked.row, answer))
        return grown

    async def settle(self) -> None:
        """Wait for one of the answers; the CacheManager never keeps anybody waiting for long."""
        if self._leaving:
            await self._leaving[0].answer.wait()
        else:
            await self._growing[0].answer.wait()

    def _poll_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for one in leaving:
            released = one.answer.poll()
            if released is None:
                self._leaving.append(one)
            else:
                self._note_released(one, released)

    def _note_released(self, one: _Leaving, released: CacheReleased) -> None:
        for block in released.keep:
            if one.lost:
                self._void[block.handle] = block.start
                continue
            self._keep[block.handle] = KeepBlock(
                sequence_id=one.sequence_id,
                handle=block.handle,
                start=block.start,
                end=block.end,
                export=block.export,
            )
        if not one.freed:
            self._drop.append(one.sequence_id)
        self._forget += released.forget

    def _still_to_forget(self) -> list[int]:
        """Without what has not reached the engine yet, and so never will.

        Sorted out only now, since answers on different channels are not read in their order: a
        handle may be forgotten by one that was read before the one which introduced it.
        """
        found: list[int] = []
        for handle in self._forget:
            if self._void.pop(handle, None) is not None:
                continue
            if self._load.pop(handle, None) is None and self._keep.pop(handle, None) is None:
                found.append(handle)
        return found

    # Plans ---------------------------------------------------------------------------------------

    def take_work(self) -> CacheWork:
        """What the next plan has to do; a snapshot that choices still wait for is not forgotten."""
        self._forget += self._take_forget()
        self._forget += self._forks.unneeded()
        pinned = self._forks.pinned
        forget = self._still_to_forget()
        self._forget = [handle for handle in forget if handle in pinned]
        work = CacheWork(
            forget=tuple(handle for handle in forget if handle not in pinned),
            load=tuple(self._load.values()),
            keep=tuple(self._keep.values()),
            drop=tuple(self._drop),
        )
        self._load.clear()
        self._keep.clear()
        self._drop.clear()
        return work
