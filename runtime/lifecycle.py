"""The server's phases and how it ends: signals, drain, and a last resort.

starting -> ready -> draining -> stopped.  The first SIGTERM or SIGINT drains; a second one stops at
once.  Only this module changes the phase.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable

import trio

from actors.kit.journal import Journal
from actors.phase import Phase, PhaseCell
from actors.ports import Places

log = logging.getLogger("mlxcel.lifecycle")

EXIT_OK = 0
EXIT_FORCED = 1
EXIT_USAGE = 2
EXIT_GAVE_UP = 70

#: How often a drain looks whether the last request has left.
DRAIN_POLL_S = 0.05


class Lifecycle:
    """Phase, the two stop events, and the drain."""

    def __init__(self, cell: PhaseCell, journal: Journal) -> None:
        self.cell = cell
        self.drain_requested = trio.Event()
        self.stop_requested = trio.Event()
        self._journal = journal

    @property
    def phase(self) -> Phase:
        return self.cell.phase

    def enter(self, phase: Phase) -> None:
        if self.cell.phase is phase:
            return
        self.cell.phase = phase
        self._journal.record("lifecycle", "phase", phase.value)

    def request_stop(self) -> None:
        """First call: drain.  Second call: stop at once."""
        if self.drain_requested.is_set():
            self.stop_requested.set()
        self.drain_requested.set()

    async def watch_signals(
        self,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with trio.open_signal_receiver(*signals) as received:
            task_status.started()
            async for number in received:
                name = signal.Signals(number).name
                if self.drain_requested.is_set():
                    log.warning("%s again: stopping at once", name)
                else:
                    log.info("%s: draining, a second signal stops at once", name)
                self.request_stop()

    async def drain(self, places: Places, drain_s: float) -> int:
        """Refuse new requests and wait for those inside.  Returns how many are left.

        Ends early when a stop is requested.
        """
        self.enter(Phase.DRAINING)
        with trio.move_on_after(drain_s):
            # Places has no waiters on purpose: nothing on the hot path pays for the drain.
            while places.free < places.count and not self.stop_requested.is_set():  # noqa: ASYNC110
                await trio.sleep(DRAIN_POLL_S)
        return places.count - places.free


def arm_last_resort(code: int, after_s: float) -> None:
    """End the process with ``code`` if it still runs after ``after_s`` seconds.

    A compute thread that hangs inside the engine cannot be interrupted, and the interpreter waits
    for it; a server that was told to stop must stop all the same.
    """

    def leave() -> None:
        log.error("still running %g s after the stop: leaving the hard way", after_s)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)

    timer = threading.Timer(after_s, leave)
    timer.daemon = True
    timer.start()
