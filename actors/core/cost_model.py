"""What steps cost, learnt from the steps that ran: decides how long an automatic chunk may be."""

from __future__ import annotations

from actors.limits import Limits

#: Weight of the newest measurement.  A few steps suffice to follow a change of load.
SMOOTHING = 0.25


class CostModel:
    """Moving averages of seconds per decode step and per prefilled token; None until measured."""

    def __init__(self) -> None:
        self.decode_step_s: float | None = None
        self.prefill_token_s: float | None = None

    def note_decode(self, seconds: float) -> None:
        """A step decoded at least one row in ``seconds``."""
        if seconds > 0:
            self.decode_step_s = _blend(self.decode_step_s, seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A step prefilled ``tokens`` in ``seconds``."""
        if tokens > 0 and seconds > 0:
            self.prefill_token_s = _blend(self.prefill_token_s, seconds / tokens)

    def chunk_tokens(self, limits: Limits, *, decoding: bool) -> int:
        """How many prompt tokens one step may prefill.

        A fixed ``prefill_chunk_tokens`` wins.  Otherwise, while rows decode, as many as take about
        ``prefill_chunk_steps`` decode steps, within the two bounds (the smallest until both costs
        are known); with nobody to hold up, the largest.
        """
        if limits.prefill_chunk_tokens is not None:
            return limits.prefill_chunk_tokens
        if not decoding:
            return limits.prefill_chunk_max_tokens
        if self.decode_step_s is None or self.prefill_token_s is None:
            return limits.prefill_chunk_min_tokens
        tokens = int(limits.prefill_chunk_steps * self.decode_step_s / self.prefill_token_s)
        return max(limits.prefill_chunk_min_tokens, min(tokens, limits.prefill_chunk_max_tokens))

    def snapshot(self) -> dict[str, float]:
        """The measured seconds by name; what has not been measured is left out."""
        values = {"decode_step_s": self.decode_step_s, "prefill_token_s": self.prefill_token_s}
        return {name: value for name, value in values.items() if value is not None}


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
