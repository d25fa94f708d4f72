"""``python -m runtime.serve``: read the settings, open the socket, load the model, serve, drain."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence

import trio

from actors.kit.journal import NullJournal
from actors.kit.seams import Seams
from actors.kit.supervise import SupervisionFailed
from actors.phase import Phase, PhaseCell
from actors.requests import loop_rule
from httpapi.app import create_app
from httpapi.server import BindError, bind_sockets, serve_http
from httpapi.settings import GenerationDefaults, HttpSettings
from models.compute_thread import ComputeThread
from models.engine import EngineDead
from models.errors import ModelLoadError
from runtime.config import PROG, ConfigError, ServerConfig, load_config
from runtime.lifecycle import (
    EXIT_FORCED,
    EXIT_GAVE_UP,
    EXIT_OK,
    EXIT_USAGE,
    Lifecycle,
    arm_last_resort,
)
from runtime.loading import load
from runtime.logs import configure_logging
from runtime.loop_monitor import LoopMonitor
from runtime.tree import Loaded, Tree

log = logging.getLogger("mlxcel.serve")

#: How long open responses may take to be written once everything has ended.
HTTP_CLOSE_S = 3.0
#: How long the whole process may take to end after that.
EXIT_GRACE_S = 5.0


def main(argv: Sequence[str] | None = None) -> None:
    """Console script.  Exit codes: docs/settings.md."""
    sys.exit(run(sys.argv[1:] if argv is None else argv, os.environ))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        config = load_config(argv, environ)
        configure_logging(config.log_level, config.log_format)
        settings = http_settings(config)
        sockets = bind_sockets(config.host, config.port, settings)
    except (ConfigError, BindError) as error:
        return refuse(str(error))
    try:
        return trio.run(Server(config, settings).run, sockets)
    except KeyboardInterrupt:  # before the signal handler was installed
        return EXIT_FORCED


def refuse(reason: str) -> int:
    """Bad settings, model or address: one line, no traceback."""
    print(f"{PROG}: error: {' '.join(reason.split())}", file=sys.stderr, flush=True)  # noqa: T201
    return EXIT_USAGE


def http_settings(config: ServerConfig) -> HttpSettings:
    ping = config.sse_ping_interval_s
    return HttpSettings(
        defaults=GenerationDefaults(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            typical_p=config.typical_p,
            top_n_sigma=max(config.top_n_sigma, 0.0),
            xtc_probability=config.xtc_probability,
            xtc_threshold=config.xtc_threshold,
            penalty_window=config.repeat_last_n,
            repetition_penalty=config.repeat_penalty,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            dry_multiplier=config.dry_multiplier,
            dry_base=config.dry_base,
            dry_allowed_length=config.dry_allowed_length,
            dry_window=config.dry_penalty_last_n,
            ignore_eos=config.ignore_eos,
            thinking_budget=None if config.reasoning_budget == -1 else config.reasoning_budget,
            loop=loop_rule(*(config.loop_detection or (0, 0, 0))),
            seed=config.seed,
            n_predict=config.n_predict,
        ),
        alias=config.alias,
        slots_endpoint=config.slots_endpoint,
        sse_ping_interval_s=-1.0 if ping is None else ping,
        request_timeout_s=config.timeout_s,
        body_timeout_s=config.body_timeout_s,
        max_body_bytes=config.max_body_bytes,
        graceful_timeout_s=config.drain_s + HTTP_CLOSE_S,
        tcp_user_timeout_s=config.stall_s,
    )


class Server:
    """One run of the server, from an open socket to an exit code."""

    def __init__(self, config: ServerConfig, settings: HttpSettings) -> None:
        self._config = config
        self._settings = settings
        self._phase = PhaseCell()
        journal = NullJournal()
        self._lifecycle = Lifecycle(self._phase, journal)
        self._monitor = LoopMonitor()
        self._seams = Seams()
        self._tree = Tree(
            limits=config.boot_limits(),
            seams=self._seams,
            journal=journal,
            phase=self._phase,
            loop_lag=self._monitor.snapshot,
        )

    async def run(self, sockets: Sequence[socket.socket]) -> int:
        stop_http, http_ended = trio.Event(), trio.Event()

        async def http(*, task_status: trio.TaskStatus[list[str]]) -> None:
            app = create_app(self._tree.ports, self._settings)
            await serve_http(
                app,
                sockets,
                shutdown=stop_http,
                settings=self._settings,
                task_status=task_status,
            )
            http_ended.set()

        async with trio.open_nursery() as root:
            await root.start(self._lifecycle.watch_signals)
            if self._config.loop_monitor:
                root.start_soon(self._monitor.run)
            urls: list[str] = await root.start(http)
            log.info("listening on %s", " ".join(urls))
            code = await self._live()
            self._lifecycle.enter(Phase.STOPPED)
            arm_last_resort(code, HTTP_CLOSE_S + EXIT_GRACE_S)
            stop_http.set()
            with trio.move_on_after(HTTP_CLOSE_S):
                await http_ended.wait()
            root.cancel_scope.cancel()
        log.info("stopped")
        return code

    async def _live(self) -> int:
        """Load, serve and drain; every request inside has ended when this returns."""
        code = EXIT_OK
        try:
            async with trio.open_nursery() as core:
                thread = ComputeThread()
                await core.start(thread.run)
                loaded = await self._load(thread)
                if loaded is not None:
                    code = await self._serve(loaded)
                core.cancel_scope.cancel()
        except* ModelLoadError as group:
            code = refuse(_first(group))
        except* ConfigError as group:
            code = refuse(_first(group))
        except* (SupervisionFailed, EngineDead) as group:
            log.critical("giving up: %s", _first(group))
            code = EXIT_GAVE_UP
        return code

    async def _load(self, thread: ComputeThread) -> Loaded | None:
        """None when a signal came first."""
        loaded: Loaded | None = None
        async with trio.open_nursery() as nursery:

            async def leave_early() -> None:
                await self._lifecycle.drain_requested.wait()
                # A load cannot be interrupted; the process need not wait for it.
                arm_last_resort(EXIT_OK, EXIT_GRACE_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(leave_early)
            loaded = await load(self._config, thread, self._seams)
            nursery.cancel_scope.cancel()
        return loaded

    async def _serve(self, loaded: Loaded) -> int:
        self._tree.attach(loaded)
        async with trio.open_nursery() as actors:
            await actors.start(self._run_tree)
            # The heap is large now and stays: full collections would only stall the event loop.
            gc.collect()
            gc.freeze()
            self._monitor.reset()
            self._lifecycle.enter(Phase.READY)
            log.info("ready", extra={"fields": _summary(loaded)})
            await self._lifecycle.drain_requested.wait()
            left = await self._lifecycle.drain(self._tree.ports.places, loaded.limits.drain_s)
            forced = self._lifecycle.stop_requested.is_set()
            code = EXIT_FORCED if forced else EXIT_OK
            if left:
                log.warning("ending %d requests that are still inside", left)
            # The DecodeLoop waits for the step in flight, and that one may never end.
            arm_last_resort(code, HTTP_CLOSE_S + EXIT_GRACE_S)
            actors.cancel_scope.cancel()
        return code

    async def _run_tree(self, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            await self._tree.run(task_status=task_status)
        except Exception:
            self._lifecycle.enter(Phase.STOPPED)
            # The compute thread may hang for good; the clients are told meanwhile.
            arm_last_resort(EXIT_GAVE_UP, HTTP_CLOSE_S + EXIT_GRACE_S)
            raise


def _summary(loaded: Loaded) -> dict[str, object]:
    return {
        "model": loaded.model.name,
        "slots": loaded.limits.max_slots,
        "context": loaded.limits.slot_context_tokens,
        "kv_tokens": loaded.limits.cache_budget_tokens,
        **{key: value for key, value in loaded.model.notes.items() if value not in (None, "")},
    }


def _first(group: BaseExceptionGroup[BaseException]) -> str:
    """The message of the first real exception inside."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


if __name__ == "__main__":
    main()
