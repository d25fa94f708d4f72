"""What is known of one request after it ended."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tools.loadgen.wire import EventScanner, event_data


class Leave(StrEnum):
    """How a client that gives up closes its connection."""

    FIN = "fin"
    RESET = "reset"
    HALF_CLOSE = "half_close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to make.

    The client leaves after ``leave_after_events`` content events or ``leave_after_s`` seconds
    (whichever is given) in the way of ``leave``.  ``on_events`` is called once when
    ``events_wanted`` content events have arrived.  ``label`` groups
    outcomes in a report.
    """

    body: bytes
    stream: bool = True
    method: str = "POST"
    path: str = "/v1/chat/completions"
    label: str = ""
    leave_after_events: int | None = None
    leave_after_s: float | None = None
    leave: Leave = Leave.FIN
    events_wanted: int = 0
    on_events: Callable[[], None] | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Times are seconds of ``time.perf_counter``; ``stamps`` has one per content event.

    ``status`` is 0 when no response arrived.  ``error`` is None for a complete 200 response and
    for a request that the client left on purpose (``left``).
    """

    label: str = ""
    status: int = 0
    error: str | None = None
    left: bool = False
    started: float = 0.0
    first_byte: float | None = None
    ended: float = 0.0
    stamps: array[float] = field(default_factory=lambda: array("d"))
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    retry_after: str | None = None
    body: bytes = b""

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None and not self.left

    @property
    def tokens(self) -> int:
        """From the usage block; else one per content event."""
        return len(self.stamps) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first content event."""
        return self.stamps[0] - self.started if self.stamps else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive content events."""
        stamps = self.stamps
        return [stamps[i] - stamps[i - 1] for i in range(1, len(stamps))]


def read_stream_end(outcome: Outcome, scanner: EventScanner) -> None:
    """Take finish reason, usage and a mid-stream error from the last events of a stream."""
    for event in scanner.last:
        _read_payload(outcome, event_data(event))
    if outcome.error is None and outcome.finish_reason is None and not outcome.left:
        outcome.error = "stream ended without a finish reason"


def read_plain_body(outcome: Outcome) -> None:
    """Take finish reason and usage from a non-streaming response."""
    _read_payload(outcome, outcome.body)


def read_error_body(outcome: Outcome) -> None:
    """Describe a response that is not 200 in one line."""
    message = error_message(_loads(outcome.body))
    text = message or outcome.body[:120].decode("utf-8", "replace").strip()
    outcome.error = f"HTTP {outcome.status}: {text}" if text else f"HTTP {outcome.status}"


def _read_payload(outcome: Outcome, raw: bytes) -> None:
    payload = _loads(raw)
    if not isinstance(payload, dict):
        outcome.error = outcome.error or "response is not a JSON object"
        return
    message = error_message(payload)
    if message is not None:
        outcome.error = f"error event: {message}"
    choices = payload.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
        if isinstance(reason, str):
            outcome.finish_reason = reason
            if reason == "error":
                outcome.error = outcome.error or "finish_reason is error"
    usage = payload.get("usage")
    if isinstance(usage, dict):
        outcome.usage_tokens = _count(usage.get("completion_tokens"))
        outcome.prompt_tokens = _count(usage.get("prompt_tokens"))


def error_message(payload: Any) -> str | None:
    """The text of an error envelope, whichever shape the server uses; None without one."""
    error = payload.get("error") if isinstance(payload, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error) if error else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _loads(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None
