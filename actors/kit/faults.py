"""Named points in the actors at which a simulation may raise.  Nothing happens in production."""

from __future__ import annotations

from typing import Protocol

#: Closed vocabulary: a simulation picks from it, and ``hit`` is only called with these.
CRASH_POINTS: tuple[str, ...] = (
    "admission.in_hand",  # a Submit was taken, nothing has been sent
    "admission.after_accept",  # Accepted was sent, the request is not in the room yet
    "prefill.after_pick",  # a request left its lane, no cache is reserved
    "prefill.after_reserve",  # its lease exists, the start has not been sent
    "cache.reserve",  # a reservation was taken in hand
    "cache.release",
    "decode.after_absorb",  # new sequences sit in their slots
    "decode.before_step",
    "decode.after_step",  # the result is here, nothing has been accounted
    "decode.deliver",  # the next step runs, the tokens have not been sent
    "store.request",
)


class Faults(Protocol):
    def hit(self, point: str) -> None:
        """Called at ``point``; may raise any exception."""
        ...


class NoFaults:
    def hit(self, point: str) -> None:
        del point


NO_FAULTS = NoFaults()
