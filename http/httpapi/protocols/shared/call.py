"""Typed fields -> how to generate and how to answer.  Pure: no clock, no randomness."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from actors.requests import (
    CachePolicy,
    GenerationRequest,
    LoopRule,
    Priority,
    Prompt,
    loop_rule,
)
from httpapi.json_body import invalid
from httpapi.protocols.shared.fields import GenerationFields
from httpapi.settings import GenerationDefaults
from models.sampling import WHOLE, SamplingParams

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_BIASES = 4096
MAX_BREAKERS = 1024
MAX_PATTERN = 4096
MAX_SEED = 2**64 - 1
#: Larger counts and top_k values mean the same as this one: more than any context or vocabulary.
MAX_COUNT = 2**31 - 1
#: Below this a draw is the argmax in float32 anyway, and the division could overflow.
GREEDY_BELOW = 1e-5
#: Above this every distribution is flat in float32, and penalties leave nothing else to say.
MAX_TEMPERATURE = 1e6
MAX_PENALTY = 1e6

_BUDGETS = (
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
    "thinking_token_budget",
    "thinking_budget",
)
_LANES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """``seed`` None asks for a random one; ``sampling.seed`` is not used before it is known."""

    sampling: SamplingParams
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    loop: LoopRule | None
    thinking_budget: int | None
    cache: CachePolicy
    choices: int
    stream: bool
    include_usage: bool

    def generation_request(
        self, prompt: Prompt, *, request_id: str, seed: int, lane: Priority, deadline_s: float
    ) -> GenerationRequest:
        """``seed`` is the one drawn for this request; a seed of the request's own wins."""
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=replace(self.sampling, seed=seed if self.seed is None else self.seed),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            loop=self.loop,
            thinking_budget=self.thinking_budget,
            cache=self.cache,
            lane=lane,
            deadline_s=deadline_s,
        )


def lane_of(header: str | None) -> Priority:
    """Lane for an ``X-Priority`` header; anything unknown is normal."""
    return _LANES.get((header or "").strip().lower(), Priority.NORMAL)


def read_call(
    typed: GenerationFields, defaults: GenerationDefaults, *, logprobs: int | None
) -> Call:
    """Raises RequestError.  The checks of checks.py have been made."""
    options = typed.stream_options
    stream = bool(typed.stream)
    return Call(
        sampling=_sampling(typed, defaults, logprobs),
        seed=_seed(typed.seed, defaults.seed),
        max_tokens=max_tokens(typed, defaults),
        min_tokens=min(typed.min_tokens or 0, MAX_COUNT),
        stop=_stops(typed.stop),
        ignore_eos=defaults.ignore_eos if typed.ignore_eos is None else typed.ignore_eos,
        loop=_loop(typed, defaults),
        thinking_budget=_thinking_budget(typed, defaults),
        cache=_cache(typed),
        choices=_choices(typed.n),
        stream=stream,
        include_usage=stream and options is not None and bool(options.include_usage),
    )


def max_tokens(typed: GenerationFields, defaults: GenerationDefaults) -> int | None:
    """The newest name wins: max_completion_tokens, max_tokens, n_predict.  None: no bound."""
    for value in (typed.max_completion_tokens, typed.max_tokens, typed.n_predict):
        if value is not None:
            return None if value == -1 else min(value, MAX_COUNT)
    return None if defaults.n_predict == -1 else defaults.n_predict


def thinking_budget_field(typed: GenerationFields) -> tuple[str, int] | None:
    """The budget that counts, and the name that it came under."""
    for name in _BUDGETS:
        value = getattr(typed, name)
        if value is not None:
            return name, value
    return None


def check_ranges(typed: GenerationFields) -> None:
    """Raises RequestError for the first value out of its range."""
    threshold, probability = typed.xtc_threshold, typed.xtc_probability
    if threshold is not None and not 0 <= threshold <= 0.5:
        raise invalid("xtc_threshold must be between 0.0 and 0.5", "xtc_threshold")
    if probability is not None and not 0 <= probability <= 1:
        raise invalid("xtc_probability must be between 0.0 and 1.0", "xtc_probability")
    if typed.top_n_sigma is not None and typed.top_n_sigma < 0:
        raise invalid("top_n_sigma must be >= 0.0", "top_n_sigma")
    if typed.typical_p is not None and not 0 < typed.typical_p <= 1:
        raise invalid("typical_p must be in (0.0, 1.0]", "typical_p")


def check_thinking_budget(typed: GenerationFields, limit: int | None) -> None:
    """``limit`` is max_tokens.  Raises RequestError."""
    found = thinking_budget_field(typed)
    if found is None:
        return
    field, budget = found
    if budget < -1:
        raise invalid(
            f"thinking_budget_tokens must be >= -1 (got {budget}); use -1 for unlimited, "
            "0 for immediate end, or a positive cap",
            field,
        )
    if limit is not None and budget > limit:
        raise invalid(f"thinking_budget_tokens ({budget}) must be <= max_tokens ({limit})", field)


def _sampling(
    typed: GenerationFields, defaults: GenerationDefaults, logprobs: int | None
) -> SamplingParams:
    temperature = _or(typed.temperature, defaults.temperature)
    top_k, top_p = _or(typed.top_k, defaults.top_k), _or(typed.top_p, defaults.top_p)
    if top_p == 0:
        # It keeps the most likely token only, and that is what top_k 1 says.
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else min(temperature, MAX_TEMPERATURE),
        logit_bias=_logit_bias(typed.logit_bias),
        repetition_penalty=_bounded(
            _or(typed.repetition_penalty, typed.repeat_penalty, defaults.repetition_penalty)
        ),
        frequency_penalty=_bounded(_or(typed.frequency_penalty, defaults.frequency_penalty)),
        presence_penalty=_bounded(_or(typed.presence_penalty, defaults.presence_penalty)),
        penalty_window=_or(
            typed.repetition_context_size, typed.repeat_last_n, defaults.penalty_window
        ),
        dry_multiplier=_bounded(_or(typed.dry_multiplier, defaults.dry_multiplier)),
        dry_base=_bounded(_or(typed.dry_base, defaults.dry_base)),
        dry_allowed_length=min(_or(typed.dry_allowed_length, defaults.dry_allowed_length), 10**6),
        dry_window=_dry_window(typed, defaults),
        dry_breakers=_breakers(typed.dry_sequence_breakers),
        top_n_sigma=_or(typed.top_n_sigma, defaults.top_n_sigma),
        p_less=bool(typed.p_less),
        typical_p=_or(typed.typical_p, defaults.typical_p),
        top_k=min(max(top_k, 0), MAX_COUNT),
        top_p=top_p,
        min_p=_or(typed.min_p, defaults.min_p),
        xtc_probability=_or(typed.xtc_probability, defaults.xtc_probability),
        xtc_threshold=_or(typed.xtc_threshold, defaults.xtc_threshold),
        logprobs=logprobs,
    )


def _or(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _bounded(value: float) -> float:
    return max(-MAX_PENALTY, min(value, MAX_PENALTY))


def _dry_window(typed: GenerationFields, defaults: GenerationDefaults) -> int:
    """In a request 0 is the whole context; the server's setting has -1 for that, and 0 is off."""
    if typed.dry_penalty_last_n is not None:
        return typed.dry_penalty_last_n or WHOLE
    if typed.dry_multiplier is not None:
        return WHOLE  # the field's own default
    return defaults.dry_window


def _breakers(ids: list[int] | None) -> tuple[int, ...]:
    if ids is not None and len(ids) > MAX_BREAKERS:
        raise invalid(
            f"dry_sequence_breakers must not hold more than {MAX_BREAKERS} ids",
            "dry_sequence_breakers",
        )
    return tuple(min(one, MAX_COUNT) for one in ids or ())


def _logit_bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Ids outside the vocabulary are ignored later, where it is known."""
    if not biases:
        return ()
    if len(biases) > MAX_BIASES:
        raise invalid(f"logit_bias must not hold more than {MAX_BIASES} tokens", "logit_bias")
    found: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise invalid("logit_bias: the keys must be token ids.", "logit_bias")
        found[int(key)] = _bounded(value)
    return tuple(sorted(found.items()))


def _seed(value: int | None, default: int | None) -> int | None:
    if value is None:
        return default
    if value < -1:
        raise invalid("seed must be -1 (random) or a non-negative integer", "seed")
    if value > MAX_SEED:
        raise invalid(f"seed must not be above {MAX_SEED}", "seed")
    return None if value == -1 else value


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid("stop must be a string or an array of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop must not hold more than {MAX_STOPS} strings", "stop")
    if not all(stops):
        raise invalid("stop must not hold an empty string", "stop")
    return tuple(stops)


def _loop(typed: GenerationFields, defaults: GenerationDefaults) -> LoopRule | None:
    """Any of the three fields makes the request's own rule; those that are missing are 0."""
    own = (typed.min_pattern_size, typed.max_pattern_size, typed.min_count)
    if all(value is None for value in own):
        return defaults.loop
    low, high, count = (value or 0 for value in own)
    if high > MAX_PATTERN:
        raise invalid(f"max_pattern_size must not be above {MAX_PATTERN}", "max_pattern_size")
    if high and low > high:
        raise invalid("min_pattern_size must not be above max_pattern_size", "min_pattern_size")
    return loop_rule(low, high, min(count, MAX_COUNT))


def _thinking_budget(typed: GenerationFields, defaults: GenerationDefaults) -> int | None:
    found = thinking_budget_field(typed)
    if found is None:
        return defaults.thinking_budget
    return None if found[1] == -1 else found[1]


def _cache(typed: GenerationFields) -> CachePolicy:
    """The request's own fields first, then those nested in extra_body, where types are optional."""
    extra = typed.extra_body or {}
    use: Any = typed.cache_prompt
    if use is None:
        use = extra.get("cache_prompt")
    bucket = ""
    for name in ("prompt_cache_key", "user"):
        for value in (getattr(typed, name), extra.get(name)):
            if isinstance(value, str) and value and not bucket:
                bucket = f"{name}:{value}"
    return CachePolicy(use=use is not False, bucket=bucket)


def _choices(n: int | None) -> int:
    if n is None:
        return 1
    if n < 1:
        raise invalid("n must be at least 1", "n")
    if n > MAX_CHOICES:
        raise invalid(f"n must not be above {MAX_CHOICES}", "n")
    return n
