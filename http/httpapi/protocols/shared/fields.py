"""The typed fields that all text-generating routes share.  Types only.

Strict: a number in quotes, ``true`` for a number or ``20.5`` for an integer is an error.  Null is
the same as absent for every optional field, and unknown keys are accepted, since clients send
many that concern other servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from httpapi.json_body import invalid

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
CountOrUnlimited = Annotated[int, Field(ge=-1)]  # -1: no bound


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationFields(Body):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    # length
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    n_predict: CountOrUnlimited | None = None
    min_tokens: Count | None = None
    stop: Any = None
    ignore_eos: bool | None = None
    # sampling
    temperature: NotNegative | None = None
    top_p: Fraction | None = None
    top_k: int | None = None
    min_p: Fraction | None = None
    seed: int | None = None
    p_less: bool | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    repetition_penalty: Positive | None = None
    repeat_penalty: Positive | None = None
    repetition_context_size: CountOrUnlimited | None = None
    repeat_last_n: CountOrUnlimited | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: NotNegative | None = None
    dry_base: Positive | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: CountOrUnlimited | None = None
    dry_sequence_breakers: list[Count] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    max_pattern_size: Count | None = None
    min_pattern_size: Count | None = None
    min_count: Count | None = None
    logit_bias: dict[str, float] | None = None
    # reasoning
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    # prompt cache
    extra_body: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


_Model = TypeVar("_Model", bound=BaseModel)


def read_body(model: type[_Model], body: Mapping[str, Any]) -> _Model:
    """``body`` as ``model``.  Raises RequestError that names the first field at fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _path(first["loc"])
        if first["type"] == "missing":
            raise invalid(f"The field {param} is required.", param) from None
        raise invalid(f"{param}: {first['msg']}.", param) from None


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` -> ``messages[0].role``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":  # marks the key of a dict entry itself
            path += f".{part}" if path else part
    return path
