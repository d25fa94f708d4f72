from __future__ import annotations

import pytest

from actors.core.admission_rules import admit
from actors.errors import ErrorCode, RequestError
from actors.limits import Limits
from actors.requests import GenerationRequest, TokenPrompt
from models.sampling import GREEDY

LIMITS = Limits(slot_context_tokens=100, cache_budget_tokens=80)


def request(max_tokens: int | None) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompt=TokenPrompt(token_ids=()), sampling=GREEDY, max_tokens=max_tokens
    )


def test_max_tokens_is_clamped_to_the_context() -> None:
    limits = Limits(slot_context_tokens=100, cache_budget_tokens=1000)
    admitted = admit(request(5000), (1,) * 30, 10, limits)
    assert (admitted.max_tokens, admitted.total_tokens) == (70, 100)


def test_without_max_tokens_it_may_fill_what_there_is() -> None:
    assert admit(request(None), (1,) * 30, 10, LIMITS).max_tokens == 50


def test_zero_tokens_are_legal() -> None:
    assert admit(request(0), (1,), 10, LIMITS).max_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "parts"),
    [
        ((), 1, ErrorCode.INVALID_REQUEST, ["empty"]),
        ((1, 10), 1, ErrorCode.INVALID_REQUEST, ["10"]),
        ((-1,), 1, ErrorCode.INVALID_REQUEST, ["-1"]),
        ((1,) * 100, 1, ErrorCode.CONTEXT_LENGTH, ["100 tokens"]),
        ((1,) * 150, None, ErrorCode.CONTEXT_LENGTH, ["150 tokens", "100 tokens"]),
        ((1,) * 30, 60, ErrorCode.CONTEXT_LENGTH, ["90 tokens", "80 tokens"]),
        ((1,) * 80, None, ErrorCode.CONTEXT_LENGTH, ["81 tokens", "80 tokens"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(
    prompt: tuple[int, ...], max_tokens: int | None, code: ErrorCode, parts: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        admit(request(max_tokens), prompt, 10, LIMITS)
    assert caught.value.code is code
    assert all(part in caught.value.message for part in parts)
