"""Events of a generation -> SSE frames of a chat completion.  A plain state machine.

Order of frames: role, content*, finish, usage (when asked for), ``[DONE]``.  A failure ends the
stream with a chunk whose finish_reason is "error", then an event with the error itself, which is
what makes SDKs raise.

``delta`` runs once per token, so everything but the text is prepared: it costs one JSON escape and
one concatenation.
"""

from __future__ import annotations

from json.encoder import encode_basestring  # type: ignore[attr-defined, unused-ignore]
from typing import Any

from actors.events import Failed, Finished
from httpapi.errors import code_envelope
from httpapi.protocols.openai_chat.response import FINISH_REASONS, ChatHead, usage_json
from httpapi.sse import DONE, data_frame


class ChatStream:
    """One per stream.  Every returned ``bytes`` is one SSE event, complete with its blank line."""

    __slots__ = ("_head", "_include_usage", "_prefix", "_suffix")

    def __init__(self, head: ChatHead, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        # The text goes where the mark is; the mark cannot occur elsewhere, since control
        # characters are escaped in JSON.
        frame = data_frame(self._chunk(_choice({"content": "\x00"}, None)))
        prefix, _, suffix = frame.partition(b'"\\u0000"')
        self._prefix = prefix.decode()
        self._suffix = suffix.decode()

    def start(self) -> list[bytes]:
        return [data_frame(self._chunk(_choice({"role": "assistant"}, None)))]

    def delta(self, text: str) -> bytes:
        return f"{self._prefix}{encode_basestring(text)}{self._suffix}".encode("utf-8", "replace")

    def finish(self, finished: Finished) -> list[bytes]:
        frames = [self.delta(finished.text)] if finished.text else []
        reason = FINISH_REASONS[finished.reason]
        frames.append(data_frame(self._chunk(_choice({}, reason))))
        if self._include_usage:
            chunk = self._chunk(None)
            chunk["usage"] = usage_json(finished.usage)
            frames.append(data_frame(chunk))
        frames.append(DONE)
        return frames

    def fail(self, failed: Failed) -> list[bytes]:
        error = code_envelope(failed.code, failed.message, failed.param)
        return [
            data_frame(self._chunk(_choice({}, "error"))),
            data_frame(error),
            DONE,
        ]

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": None,
            "choices": [] if choice is None else [choice],
        }


def _choice(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
