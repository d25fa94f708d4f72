"""Everything the HTTP layer can be told; frozen, built once by the runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.requests import LoopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a request gets for the fields that it leaves out.

    ``seed`` None draws one per request; ``n_predict`` -1 means until an end token or a full
    context.  Windows count tokens, -1 is the whole context, 0 none.  ``template_kwargs`` reach the
    chat template unless the request overrides a key.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    penalty_window: int = 64
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = 64
    ignore_eos: bool = False
    thinking_budget: int | None = None
    loop: LoopRule | None = None
    seed: int | None = None
    n_predict: int = -1
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError("temperature must be finite and not negative")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1")
        if self.n_predict < -1:
            raise ValueError("n_predict must be -1 or a non-negative integer")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Units are in the names: ``_s`` seconds, ``_bytes`` bytes.

    ``sse_ping_interval_s``: a silent stream gets an SSE comment after so long; -1 switches it off.
    Common SDKs and proxies drop a stream that is silent for 15 s, hence the default.
    ``request_timeout_s``: the deadline of a whole request, counted from its head.
    ``json_thread_bytes``: longer bodies are parsed on a worker thread, so that no request holds
    the event loop for more than a few milliseconds.
    ``graceful_timeout_s``: open exchanges may go on for so long once the server stops; it has to
    exceed the drain time of the runtime.
    ``tcp_user_timeout_s``: a peer that takes no data for so long is cut off (where the platform
    can do so); without it such a peer could hold up the end of the process.
    """

    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    alias: str | None = None  # the served model id, when it differs from the model's own name
    slots_endpoint: bool = True
    sse_ping_interval_s: float = 10.0
    request_timeout_s: float = 3600.0
    body_timeout_s: float = 60.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_header_bytes: int = 32 * 1024  # request line and header lines together
    max_headers: int = 100
    json_thread_bytes: int = 256 * 1024
    json_threads: int = 2
    keep_alive_timeout_s: float = 75.0
    graceful_timeout_s: float = 35.0
    tcp_user_timeout_s: float = 30.0
    backlog: int = 512

    def __post_init__(self) -> None:
        positive = (
            "request_timeout_s body_timeout_s max_body_bytes max_header_bytes max_headers "
            "json_thread_bytes json_threads keep_alive_timeout_s graceful_timeout_s "
            "tcp_user_timeout_s backlog"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if self.sse_ping_interval_s != -1 and self.sse_ping_interval_s <= 0:
            raise ValueError("sse_ping_interval_s must be positive, or -1 for no pings")
