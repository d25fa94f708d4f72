"""The response reader and the event scanner give the same however their input is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.wire import EventScanner, ResponseReader, WireError, event_data, parse_head


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def chunk_event(delta: dict[str, object], **more: object) -> str:
    return json.dumps({"choices": [{"delta": delta, **more}]})


texts = st.text(min_size=1, max_size=8)
events = st.lists(
    st.one_of(
        texts.map(lambda t: ("content", chunk_event({"content": t}))),
        texts.map(lambda t: ("content", chunk_event({"reasoning_content": t}))),
        texts.map(lambda t: ("plain", chunk_event({"role": "assistant", "x": t}))),
        st.just(("plain", chunk_event({"content": ""}))),
        st.just(("plain", chunk_event({"content": None}))),
        st.just(("plain", chunk_event({"x": '"content": "escaped"'}))),
        st.just(("comment", "")),
    ),
    max_size=12,
)
places = st.lists(st.integers(min_value=0, max_value=100_000), max_size=20)


def stream_of(found: list[tuple[str, str]], newline: str) -> bytes:
    out = ""
    for kind, text in found:
        line = ": ping" if kind == "comment" else f"data: {text}"
        out += line + newline + newline
    return (out + "data: [DONE]" + newline + newline).encode()


@given(events, places, st.sampled_from(["\n", "\r\n", "\r"]))
def test_scanner_counts_the_same_for_every_cut(
    found: list[tuple[str, str]], where: list[int], newline: str
) -> None:
    scanner = EventScanner()
    counted = sum(scanner.feed(part) for part in cut(stream_of(found, newline), where))
    kinds = [kind for kind, _ in found]
    # A single carriage return at the very end may still become half of a line end.
    assert scanner.finished or newline == "\r"
    assert counted == scanner.content_events == kinds.count("content")
    assert scanner.events == len(kinds) - kinds.count("comment")
    assert scanner.comments == kinds.count("comment")
    data = [text for kind, text in found if kind != "comment"]
    assert [event_data(e).decode() for e in scanner.last] == data[-4:]


def encode(body: bytes, framing: str, sizes: list[int]) -> bytes:
    if framing == "length":
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    if framing == "close":
        return b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n" + body
    out = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for part in cut(body, sizes):
        if part:
            out += b"%x;note=1\r\n%b\r\n" % (len(part), part)
    return out + b"0\r\nX-Trailer: yes\r\n\r\n"


@given(st.binary(max_size=200), st.sampled_from(["length", "chunked", "close"]), places, places)
def test_reader_gives_the_body_for_every_cut(
    body: bytes, framing: str, sizes: list[int], where: list[int]
) -> None:
    reader = ResponseReader()
    parts = cut(encode(body, framing, sizes), where)
    assert b"".join(reader.feed(part) for part in parts) == body
    assert reader.done == (framing != "close")
    reader.eof()
    assert reader.done
    assert reader.head is not None
    assert reader.head.status == 200
    assert reader.head.keep_alive == (framing != "close")


@given(st.binary(min_size=1, max_size=60), st.sampled_from(["length", "chunked"]), st.data())
def test_a_connection_that_ends_early_is_an_error(
    body: bytes, framing: str, data: st.DataObject
) -> None:
    whole = encode(body, framing, [])
    reader = ResponseReader()
    reader.feed(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(WireError):
        reader.eof()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_malformed_responses_are_named(raw: bytes) -> None:
    with pytest.raises(WireError):
        ResponseReader().feed(raw)


def test_an_endless_head_is_cut_off() -> None:
    reader = ResponseReader()
    for _ in range(64):
        reader.feed(b"x" * 1024)
    with pytest.raises(WireError):
        reader.feed(b"x")


def test_connection_header_decides_reuse() -> None:
    assert parse_head(b"HTTP/1.1 200 OK").keep_alive
    assert not parse_head(b"HTTP/1.1 200 OK\r\nConnection: close").keep_alive
    assert not parse_head(b"HTTP/1.0 200 OK").keep_alive
    assert parse_head(b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive").keep_alive
