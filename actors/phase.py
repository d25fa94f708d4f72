"""The server's phase of life, readable by every layer; only runtime/lifecycle.py changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.Enum):
    STARTING = "starting"  # the socket is open, the model is loading
    READY = "ready"
    DRAINING = "draining"  # no new requests; running ones continue
    STOPPED = "stopped"


@dataclass(slots=True)
class PhaseCell:
    """One mutable cell shared by reference.

    ``engine_dead`` is set once, by the pipeline, just before it gives up for good.
    """

    phase: Phase = Phase.STARTING
    engine_dead: bool = False
