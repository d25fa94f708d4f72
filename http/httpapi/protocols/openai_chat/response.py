"""A finished generation -> the body of a chat completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.events import Finished, FinishReason, Usage
from httpapi.errors import dump_json

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHead:
    """What the answer and every chunk of a stream carry; ``created`` is in whole seconds."""

    id: str
    created: int
    model: str


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def chat_completion(head: ChatHead, text: str, finished: Finished) -> bytes:
    """``text`` is the whole answer, the tail in ``finished`` included."""
    return dump_json(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": FINISH_REASONS[finished.reason],
                    "logprobs": None,
                }
            ],
            "usage": usage_json(finished.usage),
        }
    )
