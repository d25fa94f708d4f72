"""Servers as child processes of a benchmark."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tools.loadgen.client import Client, open_client
from tools.loadgen.target import Target, UsageError, resolve_target

ROOT = Path(__file__).resolve().parent.parent.parent
STOP_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How to start a server: ``argv`` without host and port, which are appended.

    The server is ready when ``ready_path`` answers 200.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that is ready.  ``start_s`` is the time from its start until then."""

    name: str
    pid: int
    target: Target
    start_s: float


def our_server(
    model: str | None, *, parallel: int, threads: int, extra: tuple[str, ...] = ()
) -> ServerSpec:
    """This project's server from this checkout."""
    argv = [sys.executable, "-m", "runtime.serve", "--parallel", str(parallel)]
    argv += ["--threads", str(threads), "--log-level", "warning"]
    argv += ["-m", model] if model else []
    return ServerSpec(name="ours", argv=(*argv, *extra), env=child_env(threads))


def peer_server(model: str, *, threads: int, extra: tuple[str, ...] = ()) -> ServerSpec:
    """mlx-lm's own server as installed, on a Hugging Face folder."""
    argv = (sys.executable, "-m", "mlx_lm", "server", "--model", model, "--log-level", "WARNING")
    return ServerSpec(name="mlx_lm server", argv=(*argv, *extra), env=child_env(threads))


def child_env(threads: int) -> dict[str, str]:
    """Our packages importable, the given number of BLAS threads, no downloads."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "http")])
    return {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def started(spec: ServerSpec, *, within_s: float = 120.0) -> AsyncIterator[Running]:
    """Run the server for the length of the block.

    Raises UsageError with the last line of its log when it does not become ready.
    """
    port = free_port()
    argv = [*spec.argv, "--host", "127.0.0.1", "--port", str(port)]
    target = resolve_target(f"http://127.0.0.1:{port}", api_key=None, allow_remote=False)
    with tempfile.TemporaryFile() as log:
        began = trio.current_time()
        process = await trio.lowlevel.open_process(
            argv,
            env={**os.environ, **spec.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            async with open_client(target, timeout_s=5.0) as client:
                with trio.move_on_after(within_s) as scope:
                    await _wait_ready(spec, process, client)
            if scope.cancelled_caught or process.poll() is not None:
                raise UsageError(f"{spec.name} did not start: {_tail(log.fileno())}")
            yield Running(
                name=spec.name,
                pid=process.pid,
                target=target,
                start_s=trio.current_time() - began,
            )
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process)


async def _wait_ready(spec: ServerSpec, process: trio.Process, client: Client) -> None:
    while process.poll() is None:
        outcome = await client.get(spec.ready_path)
        if outcome.status == 200:
            return
        await trio.sleep(POLL_S)


async def _stop(process: trio.Process) -> None:
    if process.poll() is None:
        process.terminate()
    with trio.move_on_after(STOP_S):
        await process.wait()
        return
    process.kill()
    await process.wait()


def _tail(descriptor: int, size: int = 1500) -> str:
    """The last line of a log."""
    length = os.fstat(descriptor).st_size
    text = os.pread(descriptor, size, max(0, length - size)).decode("utf-8", "replace").strip()
    return text.splitlines()[-1] if text else "it wrote nothing"
