"""Where ids and randomness come in, so that a seed decides everything."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Seams:
    """``rng`` feeds ids and the seeds of unseeded requests; ``wall_time`` only labels output.

    The default source is seeded by the operating system; tests pass ``random.Random(n)``.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(secrets.randbits(256)))
    wall_time: Callable[[], float] = time.time

    def new_id(self, prefix: str) -> str:
        """``prefix`` followed by 32 lower-case hexadecimal digits, e.g. ``chatcmpl-4f...``."""
        return f"{prefix}{self.rng.getrandbits(128):032x}"

    def sampling_seed(self) -> int:
        """A 63-bit seed for a request that names none."""
        return self.rng.getrandbits(63)
