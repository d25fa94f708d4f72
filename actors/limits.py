"""Every capacity, bound and timeout of the runtime, and the relations between them.

No actor contains a number of its own; all of them read this frozen object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.requests import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCacheLimits:
    """Bounds of the prompt cache.  ``apc`` False: only entries wholly contained in a prompt."""

    enabled: bool = True
    capacity_bytes: int = 2 * 2**30
    max_entries: int = 1024
    ttl_s: float = 3600.0  # since the last hit
    min_prefix: int = 32  # tokens
    apc: bool = True
    block_tokens: int = 16
    hash_name: Literal["sha256", "blake3"] = "sha256"
    snapshot_capacity_bytes: int = 512 * 2**20
    snapshot_max_entries: int = 4096
    snapshot_ttl_s: float = 7200.0
    disk_dir: str | None = None
    disk_bytes: int = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Units are in the names: ``_s`` seconds, ``_tokens`` tokens, otherwise counts."""

    max_slots: int = 4  # sequences that prefill or decode at once (--parallel)
    max_queue_depth: int = 32  # requests that may wait beyond the slots (--max-queue-depth)
    token_buffer: int = 64  # undelivered tokens per request before it is parked
    priority_max_skips: int = 32  # picks that may pass a waiting lane; 0 = strict lanes
    slot_context_tokens: int = 8192  # prompt + completion of one sequence
    cache_budget_tokens: int = 32768  # leases and kept prefixes together
    lease_quantum_tokens: int = 256  # leases start at the prompt plus this and grow by it
    kv_bytes_per_token: int = 0  # of the loaded model
    enable_preemption: bool = False  # take the cache of a running sequence when another must grow
    preemption_policy: Literal["longest-first", "lowest-priority"] = "longest-first"
    request_memory_bytes: int | None = None  # most KV cache that one request may need
    prefill_chunk_tokens: int | None = None  # None = auto, from measured cost
    prefill_chunk_min_tokens: int = 16
    prefill_chunk_max_tokens: int = 512
    prefill_chunk_steps: float = 3.0  # auto: a chunk takes about this many decode steps
    prefill_grant_interval: int = 1  # decode steps per prefill chunk; 0 = only when none decode
    max_batch_prefill: int = 4  # prompts that share a step
    max_batch_prefill_tokens: int = 4096  # their padded tokens
    max_batch: int | None = None  # rows of one decode step (None: all slots)
    step_tokens: int = 2048  # decode rows + prefill tokens of one step, at most
    sweep_s: float = 0.25  # how often the waiting room looks for dead and late requests
    poll_s: float = 0.02  # how often an all-parked DecodeLoop looks for room
    stall_s: float = 30.0  # a client that reads nothing for so long is ended
    step_timeout_s: float = 600.0  # a step that takes longer means a dead engine (--decode-timeout)
    request_timeout_s: float = 3600.0  # deadline of a request (--timeout)
    drain_s: float = 30.0  # running requests may go on for so long after SIGTERM
    restart_max: int = 3  # restarts within restart_window_s before the process gives up
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.1  # doubles per restart
    restart_backoff_max_s: float = 5.0
    tokenize_workers: int = 2  # threads for templates and tokenizers
    prompt_cache: PromptCacheLimits = PromptCacheLimits()
    store_queue: int = 64
    store_max_entries: int = 1024
    store_max_bytes: int = 256 * 1024 * 1024
    store_ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        positive = (
            "max_slots token_buffer slot_context_tokens cache_budget_tokens "
            "prefill_chunk_min_tokens prefill_chunk_max_tokens step_tokens tokenize_workers "
            "store_queue sweep_s poll_s stall_s step_timeout_s request_timeout_s restart_window_s"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in ("max_queue_depth", "priority_max_skips", "drain_s", "restart_max"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.step_tokens < self.max_slots + self.prefill_chunk_min_tokens:
            raise ValueError("step_tokens must hold a full decode batch and the smallest chunk")
        if self.prefill_chunk_min_tokens > self.prefill_chunk_max_tokens:
            raise ValueError("prefill_chunk_min_tokens is above prefill_chunk_max_tokens")

    @property
    def places(self) -> int:
        """Requests inside the server at once: those that run and those that wait.

        A place is held from the HTTP layer's check until the request's terminal event, so a burst
        into an idle server gets slots + queue places, not just the queue's.
        """
        return self.max_slots + self.max_queue_depth

    @property
    def token_channel(self) -> int:
        """Accepted, Started and the terminal event always fit beside ``token_buffer`` deltas."""
        return self.token_buffer + 3

    @property
    def submit_channel(self) -> int:
        """Per lane; can never be full, since every submit holds a place."""
        return self.places

    @property
    def grants_channel(self) -> int:
        return self.max_slots

    @property
    def starts_channel(self) -> int:
        """Can never be full, since every start spends a grant."""
        return self.max_slots

    @property
    def cache_channel(self) -> int:
        """One reservation in flight, and per lease at most one growth, one shrinking, one release
        and the exported blocks of the one before."""
        return 4 * self.max_slots + 2


LANES: tuple[Priority, ...] = tuple(Priority)
