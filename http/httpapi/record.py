"""What one HTTP request holds and how it went: its generations, deadline and log line."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import trio

from actors.generation import Generation
from actors.requests import Priority
from httpapi.asgi import Send

logger = logging.getLogger("mlxcel.http")

CLIENT_LEFT = "client left"


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One per request, made by RequestScope.  Times are trio times in seconds.

    ``outcome`` is how it ended: a finish reason, an error code, or that the client left.
    """

    request_id: str
    method: str
    target: str  # path only: a query could hold a key
    started_s: float
    deadline_s: float
    send: Send  # of the request's exchange, for what is written beside the response's body
    lane: Priority | None = None
    generation_id: str | None = None
    status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_s: float | None = None
    outcome: str | None = None
    _generations: list[Generation] = field(default_factory=list)

    def hold(self, generation: Generation) -> None:
        """From now on the request's end closes ``generation``, however that end comes."""
        self._generations.append(generation)

    def count_token(self, position: int) -> None:
        """A token of the answer came; ``position`` counts from 0."""
        if self.first_token_s is None:
            self.first_token_s = trio.current_time()
        self.completion_tokens = position + 1

    def close_generations(self) -> None:
        """Never awaits; cancels whatever still runs."""
        for generation in self._generations:
            generation.close()

    def log(self, now_s: float) -> None:
        """The request's one line.  No body, no header, no query: none of them is ours to keep."""
        parts = [
            self.request_id,
            self.method,
            self.target,
            "-" if self.status is None else str(self.status),
            f"end={(self.outcome or 'ok').replace(' ', '_')}",
        ]
        if self.lane is not None:
            parts.append(f"lane={self.lane.name.lower()}")
        if self.generation_id is not None:
            parts.append(f"generation={self.generation_id}")
        if self.prompt_tokens is not None:
            parts.append(f"prompt_tokens={self.prompt_tokens}")
        if self.completion_tokens is not None:
            parts.append(f"completion_tokens={self.completion_tokens}")
        if self.first_token_s is not None:
            parts.append(f"first_token_ms={(self.first_token_s - self.started_s) * 1e3:.1f}")
        parts.append(f"total_ms={(now_s - self.started_s) * 1e3:.1f}")
        logger.info(" ".join(parts))
