"""A wake-up that is never lost.

Read ``version``, decide, then ``await since(version)``: a beat in between returns at once.
Replacing a shared ``trio.Event`` instead loses wake-ups as soon as two tasks wait or an ``await``
sits between.
"""

from __future__ import annotations

import trio
from trio.lowlevel import ParkingLot


class Pulse:
    """A version counter plus the tasks that wait for it to move."""

    __slots__ = ("_lot", "_version")

    def __init__(self) -> None:
        self._lot = ParkingLot()
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def beat(self) -> None:
        """Something changed.  Never awaits."""
        self._version += 1
        self._lot.unpark_all()

    async def since(self, version: int) -> int:
        """Wait until the version differs from ``version``; returns the new one.  A checkpoint."""
        if self._version != version:
            await trio.lowlevel.checkpoint()
        while self._version == version:
            await self._lot.park()
        return self._version
