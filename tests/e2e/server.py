"""Starts a real server process for end-to-end tests and talks to it with the standard library."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class Server:
    """A running `python -m runtime.serve`; ``lines`` collects what it logged."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'http'}", **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runtime.serve", "--port", "0", *flags],
            cwd=ROOT,
            env=environ,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait_for_line(r"listening.*:(\d+)").group(1))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._fresh.put(self.lines[-1])
        self._fresh.put(None)

    def wait_for_line(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._fresh.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r} in {self.lines}") from None
            if line is None:
                raise AssertionError(f"the server ended: {self.lines}")
            if found := re.search(pattern, line):
                return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> Server:
        self.wait_until(lambda: self.get("/health")[0] == 200, "ready", START_TIMEOUT_S)
        return self

    def wait_until(self, condition: Any, what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not {what}: {self.lines[-5:]}"
            time.sleep(0.02)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict | list) else body
            connection.request(method, path, body=data, headers=headers or {})
            response = connection.getresponse()
            return (
                response.status,
                {k.lower(): v for k, v in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, data = self.request("GET", path)
        return status, json.loads(data)

    def chat(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]} | fields
        status, _, data = self.request("POST", "/v1/chat/completions", body)
        return status, json.loads(data)

    def open_stream(self, **fields: Any) -> socket.socket:
        """A raw socket with a streaming chat request already sent."""
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]} | fields
        data = json.dumps({"stream": True} | body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        return sock

    def busy_slots(self) -> int:
        return sum(1 for slot in self.get("/slots")[1] if slot["state"] != "idle")

    def idle(self) -> bool:
        batch = self.get("/health")[1]["batch"]
        return bool(batch["active_sequences"] == 0 and batch["queue_depth"] == 0)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)


def read_until(sock: socket.socket, marker: bytes, count: int = 1) -> bytes:
    data = b""
    while data.count(marker) < count:
        piece = sock.recv(65536)
        if not piece:
            raise AssertionError(f"closed after {data[-300:]!r}")
        data += piece
    return data


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@contextmanager
def running(*flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(*flags, env=env)
    try:
        yield server
    finally:
        server.stop()


def run_to_end(
    *flags: str, env: dict[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """For starts that must fail."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'http'}", **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "runtime.serve", *flags],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
