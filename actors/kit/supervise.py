"""Restart policy: run a child, restart it when it crashes, give up when it crashes too often."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import trio

from actors.kit.journal import Journal
from actors.limits import Limits

log = logging.getLogger("mlxcel.supervise")


class SupervisionFailed(Exception):
    """A child crashed too often, or in a way that no restart can help (``__cause__`` says how)."""

    def __init__(self, child: str, why: str) -> None:
        super().__init__(f"{child}: {why}")
        self.child = child


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """More than ``max_restarts`` within ``window_s`` escalates; waits double from ``backoff_s``."""

    max_restarts: int
    window_s: float
    backoff_s: float
    backoff_max_s: float

    @classmethod
    def from_limits(cls, limits: Limits) -> RestartPolicy:
        return cls(
            max_restarts=limits.restart_max,
            window_s=limits.restart_window_s,
            backoff_s=limits.restart_backoff_s,
            backoff_max_s=limits.restart_backoff_max_s,
        )


class RestartWindow:
    """Pure: how many restarts are recent, whether one more is allowed, how long to wait first."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque()

    def crashed(self, now: float) -> float | None:
        """Seconds to wait before the restart, or None to give up."""
        while self._recent and self._recent[0] <= now - self._policy.window_s:
            self._recent.popleft()
        if len(self._recent) >= self._policy.max_restarts:
            return None
        wait_s = self._policy.backoff_s * 2.0 ** len(self._recent)
        self._recent.append(now)
        return min(wait_s, self._policy.backoff_max_s)


class Supervisor:
    """Runs children one for one.  ``restarts`` counts by child name, for the status."""

    def __init__(self, *, policy: RestartPolicy, journal: Journal) -> None:
        self._policy = policy
        self._journal = journal
        self._restarts: dict[str, int] = {}

    @property
    def restarts(self) -> Mapping[str, int]:
        return MappingProxyType(self._restarts)

    async def run(
        self,
        name: str,
        child: Callable[[], Awaitable[None]],
        *,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        """Run ``child`` until it returns.  A crash (any Exception) restarts it.

        Raises SupervisionFailed when it crashed too often, or at once when the crash contains an
        exception of a ``fatal`` type.  Cancellation and KeyboardInterrupt pass through, also when
        they come in one group with a crash: that crash is logged and, unless it is fatal, dropped.
        """
        window = RestartWindow(self._policy)
        self._restarts.setdefault(name, 0)
        while True:
            crash = await _run_once(name, child, fatal)
            if crash is None:
                return
            self._journal.record(name, "crashed", name)
            if contains(crash, fatal):
                self._give_up(name, "cannot be helped by a restart", crash)
            wait_s = window.crashed(trio.current_time())
            if wait_s is None:
                self._give_up(name, f"crashed more than {self._policy.max_restarts} times", crash)
            assert wait_s is not None
            log.warning("%s restarts in %.1f s", name, wait_s)
            await trio.sleep(wait_s)
            self._restarts[name] += 1
            self._journal.record(name, "restarted", name, self._restarts[name])

    def _give_up(self, name: str, why: str, crash: Exception) -> None:
        self._journal.record(name, "escalated", name)
        log.critical("%s %s; giving up", name, why)
        raise SupervisionFailed(name, why) from crash


async def _run_once(
    name: str, child: Callable[[], Awaitable[None]], fatal: tuple[type[BaseException], ...]
) -> Exception | None:
    """The crash that ended one run, or None if it ended by itself."""
    try:
        await child()
    except Exception as crash:
        log.error("%s crashed", name, exc_info=crash)
        return crash
    except BaseExceptionGroup as group:
        # Holds something that is not an Exception (Cancelled, KeyboardInterrupt): not ours to keep.
        crashes = group.subgroup(Exception)
        if crashes is not None:
            log.error("%s crashed while it was being stopped", name, exc_info=crashes)
        outlives = group.subgroup(lambda error: _outlives_a_stop(error, fatal))
        assert outlives is not None
        raise outlives from None
    return None


def _outlives_a_stop(error: BaseException, fatal: tuple[type[BaseException], ...]) -> bool:
    """Fatal crashes do: the process then has to end otherwise than it was going to."""
    if isinstance(error, BaseExceptionGroup):
        return False  # look inside
    return isinstance(error, fatal) or not isinstance(error, Exception)


def contains(error: BaseException, types: tuple[type[BaseException], ...]) -> bool:
    """Whether ``error`` is, or as a group holds at any depth, an exception of ``types``."""
    if isinstance(error, BaseExceptionGroup):
        return any(contains(inner, types) for inner in error.exceptions)
    return isinstance(error, types)
