"""What a requester receives on its token channel, in this order:

``Accepted`` -> ``Started`` -> ``TextDelta``* -> ``Finished``, or ``Failed`` at any point instead.
Exactly one terminal event (``Finished`` or ``Failed``) comes, then the channel is closed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from actors.errors import ErrorCode


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token
    STOP_STRING = "stop_string"
    LOOP = "loop"  # the loop rule of the request
    LENGTH = "length"  # max_tokens or a full context


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request is valid and queued: from here on a stream may write its headers."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A slot is taken and prefill begins; ``cached_tokens`` of the prompt came from a cache."""

    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token as bytes (empty for tokens without text) and its log-probability (natural)."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Chances:
    """The drawn token and the likeliest ones, best first."""

    drawn: TokenChance
    top: tuple[TokenChance, ...]


@dataclass(slots=True)
class TextDelta:
    """One generated token.  Not frozen, for speed of construction on the hot path; treat it so.

    ``position`` counts generated tokens from 0.  ``text`` is "" while a character or a possible
    stop string is held back; the joined texts are the answer.  ``chances`` is there when asked for.
    """

    position: int
    token_id: int
    text: str
    chances: Chances | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds spent waiting for a slot, in prefill (start to first token), in decode (the rest)."""

    queued_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """``text`` is the rest that was held back (a tail that turned out not to be a stop string)."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    text: str = ""
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    details: Mapping[str, int] | None = None


Event = Accepted | Started | TextDelta | Finished | Failed
Terminal = Finished | Failed
