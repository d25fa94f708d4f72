"""Log-probabilities as JSON: the chat form and the legacy form of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.events import Chances, TokenChance


def chat_logprobs(tokens: Sequence[Chances]) -> dict[str, Any]:
    """The ``logprobs`` of a choice; one entry per generated token."""
    return {"content": [_entry(one) for one in tokens], "refusal": None}


def _entry(one: Chances) -> dict[str, Any]:
    return {**_chance(one.drawn), "top_logprobs": [_chance(other) for other in one.top]}


def _chance(one: TokenChance) -> dict[str, Any]:
    return {"token": token_text(one), "logprob": one.logprob, "bytes": list(one.data)}


def token_text(one: TokenChance) -> str:
    """Bytes that are not whole characters show as U+FFFD; ``bytes`` has them exactly."""
    return one.data.decode("utf-8", "replace")


def legacy_logprobs(tokens: Sequence[tuple[int, Chances]]) -> dict[str, Any]:
    """``tokens`` as (offset in the completion's text, chances)."""
    return {
        "tokens": [token_text(one.drawn) for _, one in tokens],
        "token_logprobs": [one.drawn.logprob for _, one in tokens],
        "top_logprobs": [
            {token_text(other): other.logprob for other in one.top} if one.top else None
            for _, one in tokens
        ],
        "text_offset": [offset for offset, _ in tokens],
    }
