"""Whether a tokenised request can be served at all, and how much it may generate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from actors.errors import ErrorCode, RequestError
from actors.limits import Limits
from actors.requests import GenerationRequest
from models.sampling import SamplingParams
from models.text_model import TextModel

SEEDS = 2**64


def _to_generate(request: GenerationRequest, room: int) -> int:
    return room if request.max_tokens is None else min(request.max_tokens, room)


def _check_memory(tokens: int, limits: Limits) -> None:
    """Raises RequestError when one request alone needs more memory than one may have."""
    most = limits.request_memory_bytes
    needed = tokens * limits.kv_bytes_per_token
    if most is not None and needed > most:
        raise RequestError(
            ErrorCode.REQUEST_MEMORY,
            f"The request needs an estimated {needed} bytes of KV cache ({tokens} tokens), but "
            f"the limit for one request is {most} bytes. Send a shorter prompt or a smaller "
            "max_tokens.",
            details={"estimated_bytes": needed, "budget_bytes": most},
        )


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
    _check_memory(count + _to_generate(request, context - count), limits)
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


def complete_sampling(request: GenerationRequest, choice: int, text: TextModel) -> SamplingParams:
    """The sampling of one choice: its own seed, and the tokens that the settings refer to."""
    sampling = request.sampling
    if choice:
        sampling = replace(sampling, seed=(sampling.seed + choice) % SEEDS)
    if request.min_tokens > 0 and not request.ignore_eos:
        sampling = replace(
            sampling, min_tokens=request.min_tokens, end_ids=tuple(sorted(text.eos_ids))
        )
    if sampling.xtc_probability > 0:
        protected = text.eos_ids | text.newline_ids
        sampling = replace(sampling, xtc_protected=tuple(sorted(protected)))
    return sampling


def cache_root(fingerprint: str, signature: str, bucket: str) -> bytes:
    """The start of a prompt's hash chain: prompts with different roots share nothing."""
    parts = (fingerprint, signature, bucket)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
