"""A chat completion body -> what to generate and how to answer.  Pure: no clock, no randomness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.requests import ChatPrompt, GenerationRequest, Priority
from httpapi.json_body import invalid, parse_object
from httpapi.protocols.openai_chat.checks import check, check_foreign
from httpapi.protocols.openai_chat.messages import read_messages
from httpapi.protocols.openai_chat.schema import ChatBody, read_body
from httpapi.protocols.openai_chat.template_kwargs import template_kwargs
from httpapi.settings import GenerationDefaults
from models.sampling import SamplingParams

MAX_STOPS = 16
MAX_SEED = 2**64 - 1
#: Larger counts and top_k values mean the same as this one: more than any context or vocabulary.
MAX_COUNT = 2**31 - 1
#: Below this a draw is the argmax in float32 anyway, and the division could overflow.
GREEDY_BELOW = 1e-5
#: Above this every distribution is flat in float32.
MAX_TEMPERATURE = 1e6

_LANES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """``seed`` None asks for a random one; ``sampling.seed`` is not used before it is known."""

    prompt: ChatPrompt
    sampling: SamplingParams
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool

    def generation_request(
        self, *, request_id: str, seed: int, lane: Priority, deadline_s: float
    ) -> GenerationRequest:
        """``seed`` is the one drawn for this request; a seed of the request's own wins."""
        sampling = self.sampling
        return GenerationRequest(
            request_id=request_id,
            prompt=self.prompt,
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=seed if self.seed is None else self.seed,
            ),
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            lane=lane,
            deadline_s=deadline_s,
        )


def read_chat(raw: bytes, defaults: GenerationDefaults) -> ChatCall:
    """Body bytes -> ChatCall.  Raises RequestError."""
    return parse_chat(parse_object(raw), defaults)


def parse_chat(body: Mapping[str, Any], defaults: GenerationDefaults) -> ChatCall:
    """Types first, then messages, stops and seed, then the rules of checks.py in their order."""
    typed = read_body(ChatBody, body)
    conversation = read_messages(typed.messages)
    max_tokens = _max_tokens(typed, defaults)
    check(typed, conversation, max_tokens)
    check_foreign(body)
    stream = bool(typed.stream)
    options = typed.stream_options
    return ChatCall(
        prompt=ChatPrompt(
            messages=tuple(conversation.messages),
            template_kwargs=template_kwargs(typed, body, defaults.template_kwargs),
        ),
        sampling=_sampling(typed, defaults),
        seed=_seed(typed.seed, defaults.seed),
        max_tokens=max_tokens,
        stop=_stops(typed.stop),
        ignore_eos=bool(typed.ignore_eos),
        stream=stream,
        include_usage=stream and options is not None and bool(options.include_usage),
    )


def lane_of(header: str | None) -> Priority:
    """Lane for an ``X-Priority`` header; anything unknown is normal."""
    return _LANES.get((header or "").strip().lower(), Priority.NORMAL)


def _max_tokens(typed: ChatBody, defaults: GenerationDefaults) -> int | None:
    """The newest name wins: max_completion_tokens, max_tokens, n_predict."""
    for value in (typed.max_completion_tokens, typed.max_tokens, typed.n_predict):
        if value is not None:
            return min(value, MAX_COUNT)
    return None if defaults.n_predict == -1 else defaults.n_predict


def _sampling(typed: ChatBody, defaults: GenerationDefaults) -> SamplingParams:
    temperature = defaults.temperature if typed.temperature is None else typed.temperature
    top_k = defaults.top_k if typed.top_k is None else typed.top_k
    top_p = defaults.top_p if typed.top_p is None else typed.top_p
    min_p = defaults.min_p if typed.min_p is None else typed.min_p
    if top_p == 0:
        # It keeps the most likely token only, and that is what top_k 1 says.
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else min(temperature, MAX_TEMPERATURE),
        top_k=min(max(top_k, 0), MAX_COUNT),
        top_p=top_p,
        min_p=min_p,
    )


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
