"""A finished generation -> the body of a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.events import Chances, Finished, FinishReason, Usage
from httpapi.errors import dump_json
from httpapi.protocols.shared.logprobs import chat_logprobs

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LOOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHead:
    """What the answer and every chunk of a stream carry; ``created`` is in whole seconds.

    ``tell_cached``: the usage says how much of the prompt came from the prompt cache.
    """

    id: str
    created: int
    model: str
    tell_cached: bool = False


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one choice said.

    ``chances`` and ``lengths`` (characters that each token added) stay empty unless
    log-probabilities were asked for.
    """

    text: str
    finished: Finished
    chances: Sequence[Chances] = field(default_factory=tuple)
    lengths: Sequence[int] = field(default_factory=tuple)


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Of the choices of one prompt, which is counted once."""
    return Usage(
        prompt_tokens=usages[0].prompt_tokens,
        completion_tokens=sum(one.completion_tokens for one in usages),
        cached_tokens=usages[0].cached_tokens,
    )


def usage_json(usage: Usage, *, tell_cached: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if tell_cached:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return body


def chat_completion(head: ChatHead, answers: Sequence[Answer], *, logprobs: bool) -> bytes:
    """The choices in their order; each text is whole, the tail in ``finished`` included."""
    usage = sum_usage([one.finished.usage for one in answers])
    return dump_json(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": one.text},
                    "finish_reason": FINISH_REASONS[one.finished.reason],
                    "logprobs": chat_logprobs(one.chances) if logprobs else None,
                }
                for index, one in enumerate(answers)
            ],
            "usage": usage_json(usage, tell_cached=head.tell_cached),
        }
    )
