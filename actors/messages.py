"""Every message between actors.  Frozen; fields are immutable values or a channel end."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from actors.requests import GenerationRequest, Priority
from actors.token_sender import TokenSender
from models.engine import KeptPrefix, PrefixData
from models.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """HTTP -> AdmissionActor, on the lane's channel; one sender per choice."""

    request: GenerationRequest
    senders: tuple[TokenSender, ...]
    arrived_s: float

    @property
    def sender(self) -> TokenSender:
        """That of the first choice."""
        return self.senders[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The choices of one request, which share one prefill.  Equal for all of them."""

    fork_id: str
    senders: tuple[TokenSender, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """AdmissionActor -> PrefillQueue: valid, tokenised, ``Accepted`` already sent.

    ``sampling`` is complete: the choice's own seed, end tokens, protected tokens.
    ``total_tokens`` = prompt + the most tokens it may generate (clamped to the slot's context).
    ``cache_root`` starts the hash chain of the prompt's blocks; None: no lookup and no donation.
    """

    request: GenerationRequest
    sampling: SamplingParams
    lane: Priority
    prompt_ids: tuple[int, ...]
    max_tokens: int
    total_tokens: int
    arrived_s: float
    deadline_s: float
    sender: TokenSender
    cache_root: bytes | None = None
    fork: Fork | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGrant:
    """DecodeLoop -> PrefillQueue: one free slot, worth one start."""

    slot: int


# CacheManager: every answer may name kept handles that the next step has to forget ----------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLease:
    """``tokens`` may be held so far (at least the prompt and one more); ask for more in time.

    ``prefix`` holds the first tokens of the prompt, fewer than all of them; ``load`` is what of it
    has to be taken in first.  ``snapshot``: keep one under this handle when all but the last
    token of the prompt are evaluated.
    """

    lease_id: int
    tokens: int
    prefix: KeptPrefix | None = None
    load: tuple[PrefixData, ...] = ()
    snapshot: int | None = None
    forget: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRefused:
    free_tokens: int


CacheReply = CacheLease | CacheRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveCache:
    """PrefillQueue -> CacheManager; the answer comes on ``reply_tx`` (capacity 1).

    ``total_tokens`` is the most that the sequence may ever hold; the lease starts smaller.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    total_tokens: int
    cache_root: bytes | None
    reply_tx: trio.MemorySendChannel[CacheReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGrown:
    """The lease covers ``tokens`` now."""

    tokens: int
    forget: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowCache:
    """DecodeLoop -> CacheManager: the lease should cover at least ``tokens`` in all.

    Also of a lease that was shrunk to nothing (a preempted sequence comes back).
    """

    request_id: str
    lease_id: int
    tokens: int
    reply_tx: trio.MemorySendChannel[CacheGrown | CacheRefused]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkCache:
    """DecodeLoop -> CacheManager: a preempted sequence holds nothing any more, but will be back."""

    request_id: str
    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """Keep the tokens [start, end) of the released sequence under ``handle``."""

    handle: int
    start: int
    end: int
    export: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReleased:
    keep: tuple[KeptBlock, ...] = ()
    forget: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCache:
    """DecodeLoop -> CacheManager.  ``tokens`` is all that the sequence holds in the engine.

    Without ``reply_tx`` nothing is donated.
    """

    request_id: str
    lease_id: int
    tokens: tuple[int, ...] = ()
    reply_tx: trio.MemorySendChannel[CacheReleased] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksExported:
    """DecodeLoop -> CacheManager: data of blocks that were kept with ``export``."""

    blocks: tuple[PrefixData, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared:
    freed_bytes: int
    freed_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCache:
    """HTTP -> CacheManager, on the control channel: forget all prefixes that nobody is using."""

    reply_tx: trio.MemorySendChannel[CacheCleared]


CacheMessage = ReserveCache | GrowCache | ShrinkCache | ReleaseCache | BlocksExported
CacheControl = ClearCache


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSequence:
    """PrefillQueue -> DecodeLoop: spends the grant of ``slot``."""

    slot: int
    queued: Queued
    lease: CacheLease


# ResponsesStore ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResponse:
    """Store or replace ``body`` (JSON bytes) under ``response_id`` for ``owner``."""

    response_id: str
    owner: str
    body: bytes
    reply_tx: trio.MemorySendChannel[bool]  # False: larger than the whole store


@dataclass(frozen=True, slots=True, kw_only=True)
class GetResponse:
    response_id: str
    owner: str
    reply_tx: trio.MemorySendChannel[bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResponse:
    response_id: str
    owner: str
    reply_tx: trio.MemorySendChannel[bool]  # whether it was there


StoreMessage = PutResponse | GetResponse | DeleteResponse
