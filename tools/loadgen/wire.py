"""Reading HTTP/1.1 responses and server-sent events with little CPU per token.

The client shares its cores with the server under test, so the hot path does no JSON, no header
objects and no copies beyond the split of a packet into events.  Both parsers accept their input
cut at any byte.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 1024

# A non-empty string under one of the keys that carry generated text.  Inside a JSON string the
# quotes are escaped, so generated text that looks like such a key does not match.
_CONTENT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)":\s*"(?!")')


class WireError(ValueError):
    """The peer does not speak HTTP/1.x as expected."""


@dataclass(slots=True)
class Head:
    """Status line and headers of a response; header names are lower case."""

    status: int
    headers: dict[str, str]
    keep_alive: bool


def parse_head(raw: bytes) -> Head:
    """Parse everything before the blank line.  Raises WireError."""
    lines = raw.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise WireError(f"not an HTTP/1.x response: {lines[0][:60]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise WireError(f"malformed header line: {line[:60]!r}")
        headers[name.strip().lower()] = value.strip()
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection and (
        parts[0] != "HTTP/1.0" or "keep-alive" in connection
    )
    return Head(int(parts[1]), headers, keep_alive)


class ResponseReader:
    """One response: feed packets, get body bytes.

    After each ``feed``, ``head`` is set once the headers are complete and ``done`` once the body
    is.  A body without length and without chunks ends with the connection: call ``eof``.
    """

    __slots__ = ("_buffer", "_chunked", "_left", "_trailers", "_until_eof", "done", "head")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.done = False
        self._buffer = b""
        self._chunked = False
        self._trailers = False
        self._until_eof = False
        self._left = 0  # body bytes still to come; for chunks: of this chunk, with its CRLF

    def feed(self, data: bytes) -> bytes:
        """Body bytes in ``data``.  Raises WireError."""
        if self.head is None:
            rest = self._feed_head(data)
            if rest is None:
                return b""
            data = rest
        if self.done:
            return b""
        if self._chunked:
            return self._feed_chunks(data)
        if self._until_eof:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.done = self._left == 0
        return body

    def eof(self) -> None:
        """The connection ended.  Raises WireError when the response was not complete."""
        if self.done:
            return
        if not self._until_eof:
            raise WireError("connection closed in the middle of a response")
        self.done = True

    def _feed_head(self, data: bytes) -> bytes | None:
        buffer = self._buffer + data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise WireError("response head too large")
            self._buffer = buffer
            return None
        head = parse_head(buffer[:end])
        rest = buffer[end + 4 :]
        self._buffer = b""
        if 100 <= head.status < 200:
            return self._feed_head(rest)
        self.head = head
        self._choose_framing(head)
        return rest

    def _choose_framing(self, head: Head) -> None:
        length = head.headers.get("content-length")
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            self._chunked = True
        elif head.status in (204, 304):
            self.done = True
        elif length is not None:
            if not length.isdigit():
                raise WireError(f"malformed Content-Length: {length[:30]!r}")
            self._left = int(length)
            self.done = self._left == 0
        else:
            self._until_eof = True
            head.keep_alive = False

    def _feed_chunks(self, data: bytes) -> bytes:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        pieces: list[bytes] = []
        position, size = 0, len(data)
        while position < size:
            if self._left:
                # The payload is all but the last two bytes (CRLF) of what is left.
                payload = min(self._left - 2, size - position)
                if payload > 0:
                    pieces.append(data[position : position + payload])
                step = min(self._left, size - position)
                position += step
                self._left -= step
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                if size - position > MAX_CHUNK_LINE_BYTES:
                    raise WireError("chunk header too long")
                self._buffer = data[position:]
                break
            if self._trailers:  # up to the empty line
                self.done = end == position
                position = end + 2
                if self.done:
                    break
                continue
            position = self._chunk_header(data, position, end)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _chunk_header(self, data: bytes, start: int, end: int) -> int:
        try:
            length = int(data[start:end].split(b";", 1)[0], 16)
        except ValueError:
            raise WireError(f"malformed chunk size: {data[start:end][:30]!r}") from None
        if length:
            self._left = length + 2
        else:
            self._trailers = True  # that was the last chunk
        return end + 2


@dataclass(slots=True)
class EventScanner:
    """Counts server-sent events and finds the ones with content, without parsing JSON.

    ``events`` counts ``data:`` events except ``[DONE]``, ``content_events`` those with generated
    text, ``comments`` events without data.  The last few data events are kept in ``last`` for the
    finish reason, the usage and errors.
    """

    events: int = 0
    content_events: int = 0
    comments: int = 0
    finished: bool = False
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=4))
    _rest: bytes = b""

    def feed(self, data: bytes) -> int:
        """The number of content events that ``data`` completed."""
        buffer = self._rest + data if self._rest else data
        if b"\r" in buffer:  # JSON escapes carriage returns, so these are line ends
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        end = buffer.rfind(b"\n\n")
        if end < 0:
            self._rest = buffer + held
            return 0
        self._rest = buffer[end + 2 :] + held
        found = 0
        for event in buffer[:end].split(b"\n\n"):
            if event.startswith(b"data:") or b"\ndata:" in event:
                found += self._data_event(event)
            elif event.strip(b"\n"):
                self.comments += 1
        self.content_events += found
        return found

    def _data_event(self, event: bytes) -> int:
        if event.endswith(b"[DONE]") and event_data(event) == b"[DONE]":
            self.finished = True
            return 0
        self.events += 1
        self.last.append(event)
        return 1 if _CONTENT.search(event) else 0


def event_data(event: bytes) -> bytes:
    """The joined ``data:`` lines of one event."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines)
