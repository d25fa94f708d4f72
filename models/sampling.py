"""How one sequence draws its next token: parameters only, no arrays."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = -1  # a window over everything: prompt and generated tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence, already validated and resolved against the defaults.

    ``temperature`` 0 means greedy (argmax, every filter skipped); so does ``top_k`` 1.
    The stages run in the order of the fields below; each comment names the value that is off.
    ``seed`` is always a concrete 64-bit number: a request that names none gets one from the
    injected random source, so that every draw is a pure function of (seed, position).

    Windows count the latest tokens, prompt included; ``WHOLE`` takes all of them, 0 none.
    ``end_ids`` are suppressed for the first ``min_tokens`` generated tokens.
    ``xtc_protected`` are ids that XTC never drops (end tokens and newlines).
    ``logprobs`` asks for the log-probability of each drawn token and of that many likeliest ones
    (0 to 20); None for neither.
    """

    temperature: float = 0.8
    seed: int = 0
    # 1. added to the logits; -inf forbids a token
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    # 2. penalties over the history
    repetition_penalty: float = 1.0  # 1
    frequency_penalty: float = 0.0  # 0
    presence_penalty: float = 0.0  # 0
    penalty_window: int = 64
    dry_multiplier: float = 0.0  # 0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = WHOLE
    dry_breakers: tuple[int, ...] = ()
    # 3. to 9. filters
    top_n_sigma: float = 0.0  # 0
    p_less: bool = False
    typical_p: float = 1.0  # 1
    top_k: int = 40  # 0
    top_p: float = 0.95  # 1
    min_p: float = 0.05  # 0
    xtc_probability: float = 0.0  # 0
    xtc_threshold: float = 0.1
    xtc_protected: tuple[int, ...] = ()
    # what to report
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether repetition, frequency or presence penalties change anything."""
        changes = self.repetition_penalty != 1.0 or bool(
            self.frequency_penalty or self.presence_penalty
        )
        return changes and self.penalty_window != 0

    @property
    def dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_window != 0

    @property
    def reads_history(self) -> bool:
        """Whether the tokens before the drawn one matter to the draw."""
        return self.penalises or self.dry


GREEDY = SamplingParams(temperature=0.0)
