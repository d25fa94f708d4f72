"""Events of a generation -> SSE frames of a chat completion.  A plain state machine per choice.

Order of frames: role, content*, finish; after the last choice usage (when asked for) and
``[DONE]``.  A failure ends its choice with a chunk whose finish_reason is "error"; at the end comes
an event with the error itself, which is what makes SDKs raise.

``delta`` runs once per token, so everything but the text is prepared: it costs one JSON escape and
one concatenation.
"""

from __future__ import annotations

from json.encoder import encode_basestring  # type: ignore[attr-defined, unused-ignore]
from typing import Any

from actors.events import Failed, Finished, TextDelta, Usage
from httpapi.errors import code_envelope
from httpapi.protocols.openai_chat.response import FINISH_REASONS, ChatHead, usage_json
from httpapi.protocols.shared.logprobs import chat_logprobs
from httpapi.sse import DONE, data_frame


class ChatStream:
    """One per choice.  Every returned ``bytes`` is one SSE event, complete with its blank line."""

    __slots__ = ("_head", "_include_usage", "_index", "_prefix", "_suffix")

    def __init__(self, head: ChatHead, *, include_usage: bool, index: int = 0) -> None:
        self._head = head
        self._include_usage = include_usage
        self._index = index
        # The text goes where the mark is; the mark cannot occur elsewhere, since control
        # characters are escaped in JSON.
        frame = data_frame(self._chunk(self._choice({"content": "\x00"}, None)))
        prefix, _, suffix = frame.partition(b'"\\u0000"')
        self._prefix = prefix.decode()
        self._suffix = suffix.decode()

    def start(self) -> list[bytes]:
        return [data_frame(self._chunk(self._choice({"role": "assistant"}, None)))]

    def delta(self, text: str) -> bytes:
        return f"{self._prefix}{encode_basestring(text)}{self._suffix}".encode("utf-8", "replace")

    def token(self, event: TextDelta) -> bytes:
        """A token with its log-probabilities; its text may be empty while it is held back."""
        assert event.chances is not None
        choice = self._choice({"content": event.text}, None)
        choice["logprobs"] = chat_logprobs([event.chances])
        return data_frame(self._chunk(choice))

    def finish(self, finished: Finished) -> list[bytes]:
        frames = [self.delta(finished.text)] if finished.text else []
        reason = FINISH_REASONS[finished.reason]
        frames.append(data_frame(self._chunk(self._choice({}, reason))))
        return frames

    def fail(self, failed: Failed) -> list[bytes]:
        return [data_frame(self._chunk(self._choice({}, "error")))]

    def done(self, usage: Usage) -> list[bytes]:
        """After the last choice."""
        frames = []
        if self._include_usage:
            chunk = self._chunk(None)
            chunk["usage"] = usage_json(usage, tell_cached=self._head.tell_cached)
            frames.append(data_frame(chunk))
        frames.append(DONE)
        return frames

    def failed(self, failed: Failed) -> list[bytes]:
        """After the last choice, if one of them failed."""
        error = code_envelope(failed.code, failed.message, failed.param, failed.details)
        return [data_frame(error), DONE]

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": None,
            "choices": [] if choice is None else [choice],
        }

    def _choice(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": None,
        }
