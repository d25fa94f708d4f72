"""Whether a tokenised request can be served at all, and how much it may generate."""

from __future__ import annotations

from dataclasses import dataclass

from actors.errors import ErrorCode, RequestError
from actors.limits import Limits
from actors.requests import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """``total_tokens`` is what the sequence may occupy in the cache at most."""

    prompt_ids: tuple[int, ...]
    max_tokens: int

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_ids) + self.max_tokens


def admit(
    request: GenerationRequest, prompt_ids: tuple[int, ...], vocab_size: int, limits: Limits
) -> Admitted:
    """Clamp ``max_tokens`` to the slot's context.  Raises RequestError (a 400) for the rest."""
    count = len(prompt_ids)
    if count == 0:
        raise RequestError(ErrorCode.INVALID_REQUEST, "The prompt is empty.", param="prompt")
    bad = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"Token id {bad} is outside the vocabulary of {vocab_size} tokens.",
            param="prompt",
        )
    context = limits.slot_context_tokens
    if count >= context:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH,
            f"The prompt has {count} tokens, but the context of a request is {context} tokens; "
            "no room is left to generate.",
        )
    budget = limits.cache_budget_tokens
    if request.max_tokens is None:
        max_tokens = max(1, min(context, budget) - count)
    else:
        max_tokens = min(request.max_tokens, context - count)
    if count + max_tokens > budget:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH,
            f"The request needs {count + max_tokens} tokens ({count} in the prompt, {max_tokens} "
            f"to generate), but the KV cache holds {budget} tokens.",
        )
    return Admitted(prompt_ids=prompt_ids, max_tokens=max_tokens)
