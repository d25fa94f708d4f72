"""How one sequence draws its next token: parameters only, no arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence, already validated and resolved against the defaults.

    ``temperature`` 0 means greedy (argmax, every filter skipped); so does ``top_k`` 1.
    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch their filter off.
    ``seed`` is always a concrete 64-bit number: a request that names none gets one from the
    injected random source, so that every draw is a pure function of (seed, position).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


GREEDY = SamplingParams(temperature=0.0)
