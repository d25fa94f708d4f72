"""Text completions: the whole body, and the frames of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring  # type: ignore[attr-defined, unused-ignore]
from typing import Any

from actors.events import Chances, Failed, Finished, TextDelta, Usage
from httpapi.errors import code_envelope, dump_json
from httpapi.protocols.openai_chat.response import (
    FINISH_REASONS,
    Answer,
    ChatHead,
    sum_usage,
    usage_json,
)
from httpapi.protocols.shared.logprobs import legacy_logprobs
from httpapi.sse import DONE, data_frame


def total_usage(usages: Sequence[Usage], choices: int) -> Usage:
    """Of several prompts with ``choices`` answers each."""
    groups = [
        sum_usage(usages[start : start + choices]) for start in range(0, len(usages), choices)
    ]
    return Usage(
        prompt_tokens=sum(one.prompt_tokens for one in groups),
        completion_tokens=sum(one.completion_tokens for one in groups),
        cached_tokens=sum(one.cached_tokens for one in groups),
    )


def text_completion(
    head: ChatHead,
    answers: Sequence[Answer],
    echoes: Sequence[str],
    choices: int,
    *,
    logprobs: bool,
) -> bytes:
    """``choices`` answers per prompt, the prompts in their order."""
    usage = total_usage([one.finished.usage for one in answers], choices)
    return dump_json(
        {
            **_head(head),
            "choices": [
                {
                    "index": index,
                    "text": echoes[index // choices] + one.text,
                    "finish_reason": FINISH_REASONS[one.finished.reason],
                    "logprobs": legacy_logprobs(with_offsets(one)) if logprobs else None,
                }
                for index, one in enumerate(answers)
            ],
            "usage": usage_json(usage, tell_cached=head.tell_cached),
        }
    )


def with_offsets(answer: Answer) -> list[tuple[int, Chances]]:
    """Each token with the place of its text in the completion."""
    found = []
    offset = 0
    for length, chances in zip(answer.lengths, answer.chances, strict=True):
        found.append((offset, chances))
        offset += length
    return found


def _head(head: ChatHead) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
    }


class CompletionStream:
    """One per choice; see httpapi.body.StreamEncoder.  ``echo`` is sent first."""

    __slots__ = ("_echo", "_head", "_include_usage", "_index", "_offset", "_prefix", "_suffix")

    def __init__(
        self, head: ChatHead, *, include_usage: bool, index: int = 0, echo: str = ""
    ) -> None:
        self._head = head
        self._include_usage = include_usage
        self._index = index
        self._echo = echo
        self._offset = 0
        frame = data_frame(self._chunk(self._choice("\x00", None)))
        prefix, _, suffix = frame.partition(b'"\\u0000"')
        self._prefix = prefix.decode()
        self._suffix = suffix.decode()

    def start(self) -> list[bytes]:
        return [self.delta(self._echo)] if self._echo else []

    def delta(self, text: str) -> bytes:
        return f"{self._prefix}{encode_basestring(text)}{self._suffix}".encode("utf-8", "replace")

    def token(self, event: TextDelta) -> bytes:
        assert event.chances is not None
        choice = self._choice(event.text, None)
        choice["logprobs"] = legacy_logprobs([(self._offset, event.chances)])
        self._offset += len(event.text)
        return data_frame(self._chunk(choice))

    def finish(self, finished: Finished) -> list[bytes]:
        frames = [self.delta(finished.text)] if finished.text else []
        frames.append(data_frame(self._chunk(self._choice("", FINISH_REASONS[finished.reason]))))
        return frames

    def fail(self, failed: Failed) -> list[bytes]:
        return [data_frame(self._chunk(self._choice("", "error")))]

    def done(self, usage: Usage) -> list[bytes]:
        frames = []
        if self._include_usage:
            chunk = self._chunk(None)
            chunk["usage"] = usage_json(usage, tell_cached=self._head.tell_cached)
            frames.append(data_frame(chunk))
        frames.append(DONE)
        return frames

    def failed(self, failed: Failed) -> list[bytes]:
        error = code_envelope(failed.code, failed.message, failed.param, failed.details)
        return [data_frame(error), DONE]

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {**_head(self._head), "choices": [] if choice is None else [choice]}

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "finish_reason": finish_reason,
            "logprobs": None,
        }
