"""A real process, real sockets, a tiny random-weight model."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, read_until, reset, running
from tools.tiny_model import build_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]

LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-llama"
    build_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with running("-m", str(tiny), "--parallel", "2", "--max-queue-depth", "2") as server:
        yield server.wait_ready()


def test_curl_gets_an_answer(server: Server) -> None:
    curl = shutil.which("curl")
    assert curl is not None
    body = json.dumps(
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    )
    out = subprocess.run(
        [curl, "-sS", f"{server.url}/v1/chat/completions", "-d", body],
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(out.stdout)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny-llama"
    assert answer["usage"]["completion_tokens"] <= 5


def test_the_openai_sdk_streams_and_does_not(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Tell me something"}]
    whole = client.chat.completions.create(
        model="tiny-llama", messages=messages, max_tokens=24, temperature=0
    )
    pieces, usage, reasons = [], None, []
    for chunk in client.chat.completions.create(
        model="tiny-llama",
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
            reasons.append(chunk.choices[0].finish_reason)
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert usage == whole.usage


def test_the_sdk_sees_a_typed_error(server: Server) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], temperature=-1
        )
    assert caught.value.param == "temperature"


def test_seeded_answers_are_equal_alone_and_together(server: Server) -> None:
    fields = {"temperature": 1.0, "seed": 7, "max_tokens": 16, "ignore_eos": True}
    alone = server.chat(**fields)[1]["choices"][0]["message"]["content"]
    answers: list[str] = []

    def ask() -> None:
        answers.append(server.chat(**fields)[1]["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [alone, alone]


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
def test_a_client_that_leaves_frees_its_slot(server: Server, how: str) -> None:
    for _ in range(3):
        sock = server.open_stream(**LONG)
        read_until(sock, b"data:", 5)
        assert server.busy_slots() == 1
        match how:
            case "fin":
                sock.close()
            case "rst":
                reset(sock)
            case _:
                sock.shutdown(socket.SHUT_WR)
        server.wait_until(server.idle, "idle", 5)
        sock.close()


def test_a_client_that_leaves_without_streaming_frees_its_slot(server: Server) -> None:
    sock = server.open_stream(**LONG, stream=False)
    server.wait_until(lambda: server.busy_slots() == 1, "busy")
    sock.close()
    server.wait_until(server.idle, "idle", 5)


def test_a_full_server_refuses_at_once_and_recovers(server: Server) -> None:
    held = [server.open_stream(**LONG) for _ in range(4)]  # two slots, two places in the queue
    server.wait_until(lambda: server.get("/health")[1]["batch"]["queue_depth"] == 2, "full")
    for stream in (False, True):
        status, headers, data = server.request(
            "POST",
            "/v1/chat/completions",
            {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "x"}]},
        )
        error = json.loads(data)["error"]
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert headers["content-type"].startswith("application/json")
        assert error["type"] == "server_busy"
    assert server.get("/health")[0] == 503
    for sock in held:
        sock.close()
    server.wait_until(server.idle, "idle", 5)
    assert server.chat(max_tokens=2)[0] == 200


def test_a_burst_gets_slots_and_queue_places(tiny: Path) -> None:
    with running("-m", str(tiny), "--parallel", "1", "--max-queue-depth", "2") as server:
        server.wait_ready()
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(server.chat(max_tokens=300, ignore_eos=True)[0])

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses.count(200) >= 3
        assert statuses.count(200) + statuses.count(503) == 12
        assert server.chat(max_tokens=2)[0] == 200


def test_the_socket_answers_while_the_model_loads(tiny: Path) -> None:
    with running("-m", str(tiny)) as server:
        status, body = server.get("/health")
        if status != 200:  # the tiny model may already be there
            assert (status, body) == (503, {"status": "loading model", "tool_call_parser": None})
            assert server.chat()[0] in (200, 503)
        server.wait_ready()


def test_sigterm_lets_a_stream_finish(tiny: Path) -> None:
    with running("-m", str(tiny)) as server:
        server.wait_ready()
        sock = server.open_stream(max_tokens=300, ignore_eos=True)
        read_until(sock, b"data:", 3)
        server.signal(signal.SIGTERM)
        server.wait_for_line("draining")
        rest = read_until(sock, b"[DONE]")
        assert b'"finish_reason":"length"' in rest
        assert server.wait_exit() == 0


def test_drain_ends_what_takes_too_long(tiny: Path) -> None:
    with running("-m", str(tiny), "--drain-timeout", "0.5") as server:
        server.wait_ready()
        sock = server.open_stream(**LONG)
        read_until(sock, b"data:", 3)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        rest = read_until(sock, b"[DONE]")
        assert b'"finish_reason":"error"' in rest
        assert server.wait_exit() == 0
        assert time.monotonic() - started < 10


def test_a_second_signal_stops_at_once(tiny: Path) -> None:
    with running("-m", str(tiny), "--drain-timeout", "60") as server:
        server.wait_ready()
        sock = server.open_stream(**LONG)
        read_until(sock, b"data:", 3)
        server.signal(signal.SIGTERM)
        server.wait_for_line("draining")
        server.signal(signal.SIGTERM)
        assert server.wait_exit(15) == 1
        sock.close()


def test_the_process_ends_with_an_idle_connection_open(tiny: Path) -> None:
    with running("-m", str(tiny)) as server:
        server.wait_ready()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            read_until(sock, b"}")
            server.signal(signal.SIGTERM)
            assert server.wait_exit(10) == 0
