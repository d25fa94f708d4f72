"""Every message between actors.  Frozen; fields are immutable values or a channel end."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from actors.requests import GenerationRequest, Priority
from actors.token_sender import TokenSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """HTTP -> AdmissionActor, on the lane's channel."""

    request: GenerationRequest
    sender: TokenSender
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """AdmissionActor -> PrefillQueue: valid, tokenised, ``Accepted`` already sent.

    ``total_tokens`` = prompt + the most tokens it may generate (clamped to the slot's context).
    """

    request: GenerationRequest
    lane: Priority
    prompt_ids: tuple[int, ...]
    max_tokens: int
    total_tokens: int
    arrived_s: float
    deadline_s: float
    sender: TokenSender


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGrant:
    """DecodeLoop -> PrefillQueue: one free slot, worth one start."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLease:
    lease_id: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRefused:
    free_tokens: int


CacheReply = CacheLease | CacheRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveCache:
    """PrefillQueue -> CacheManager; the answer comes on ``reply_tx`` (capacity 1)."""

    request_id: str
    total_tokens: int
    reply_tx: trio.MemorySendChannel[CacheReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCache:
    """DecodeLoop -> CacheManager."""

    request_id: str
    lease_id: int


CacheMessage = ReserveCache | ReleaseCache


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
