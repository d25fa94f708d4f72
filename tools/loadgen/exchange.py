"""One request in flight: what its packets say, without any socket."""

from __future__ import annotations

import trio

from tools.loadgen.outcome import (
    Call,
    Outcome,
    read_error_body,
    read_plain_body,
    read_stream_end,
)
from tools.loadgen.wire import EventScanner, ResponseReader, WireError

MAX_BODY_BYTES = 16 * 1024 * 1024


class Exchange:
    """One request in flight on a connection."""

    __slots__ = ("_body", "_body_bytes", "_notify", "call", "done", "outcome", "reader", "scanner")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.outcome = Outcome(label=call.label)
        self.done = trio.Event()
        self.reader = ResponseReader()
        self.scanner: EventScanner | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._notify = call.on_events

    def feed(self, data: bytes, now: float) -> bool:
        """True when the request ended or its caller was told of its progress."""
        outcome = self.outcome
        if outcome.first_byte is None:
            outcome.first_byte = now
        body = self.reader.feed(data)
        if outcome.status == 0 and self.reader.head is not None:
            self._start_body()
        if self.scanner is not None:
            for _ in range(self.scanner.feed(body)):
                outcome.stamps.append(now)
        elif body:
            self._body.append(body)
            self._body_bytes += len(body)
            if self._body_bytes > MAX_BODY_BYTES:
                raise WireError("response body too large")
        notified = False
        if self._notify is not None and len(outcome.stamps) >= self.call.events_wanted:
            self._notify()
            self._notify = None
            notified = True
        if self.reader.done:
            self.finish(now)
        elif self._has_enough():
            outcome.left = True
            self.finish(now)
        return notified or self.done.is_set()

    def finish(self, now: float, error: str | None = None) -> None:
        if self.done.is_set():
            return
        outcome = self.outcome
        outcome.ended = now
        outcome.error = error
        outcome.body = b"".join(self._body)
        if error is None and not outcome.left:
            if outcome.status != 200:
                read_error_body(outcome)
            elif self.scanner is not None:
                read_stream_end(outcome, self.scanner)
            elif self.call.method == "POST":
                read_plain_body(outcome)
        self.done.set()

    def _start_body(self) -> None:
        head = self.reader.head
        assert head is not None
        self.outcome.status = head.status
        self.outcome.retry_after = head.headers.get("retry-after")
        if head.headers.get("content-type", "").lower().startswith("text/event-stream"):
            self.scanner = EventScanner()

    def _has_enough(self) -> bool:
        limit = self.call.leave_after_events
        return limit is not None and len(self.outcome.stamps) >= limit > 0
