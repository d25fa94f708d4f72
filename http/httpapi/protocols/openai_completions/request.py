"""A text completion body -> what to generate and how to answer.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.requests import Prompt, TextPrompt, TokenPrompt
from httpapi.json_body import invalid, parse_object
from httpapi.protocols.openai_chat.checks import NO_INPUT, check_foreign, unsupported
from httpapi.protocols.shared.call import (
    Call,
    check_ranges,
    check_thinking_budget,
    max_tokens,
    read_call,
)
from httpapi.protocols.shared.fields import GenerationFields, read_body
from httpapi.settings import GenerationDefaults

MAX_LOGPROBS = 5
MAX_PROMPTS = 128


class CompletionBody(GenerationFields):
    prompt: Any = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """``echoes`` are the texts in front of each prompt's answers; empty without ``echo``."""

    prompts: tuple[Prompt, ...]
    echoes: tuple[str, ...]
    call: Call


def read_completion(raw: bytes, defaults: GenerationDefaults) -> CompletionCall:
    """Body bytes -> CompletionCall.  Raises RequestError."""
    return parse_completion(parse_object(raw), defaults)


def parse_completion(body: Mapping[str, Any], defaults: GenerationDefaults) -> CompletionCall:
    if "prompt" not in body:
        raise invalid("The field prompt is required.", "prompt")
    typed = read_body(CompletionBody, body)
    prompts = _prompts(typed.prompt)
    if typed.logprobs is not None and not 0 <= typed.logprobs <= MAX_LOGPROBS:
        raise invalid(f"logprobs must be between 0 and {MAX_LOGPROBS}", "logprobs")
    check_ranges(typed)
    check_thinking_budget(typed, max_tokens(typed, defaults))
    _check_format(typed.response_format)
    if typed.suffix:
        raise invalid("suffix is not supported; use /infill where the model can do it", "suffix")
    call = read_call(typed, defaults, logprobs=typed.logprobs)
    if typed.best_of is not None and typed.best_of != call.choices:
        raise invalid("best_of is only supported when it equals n", "best_of")
    check_foreign({key: value for key, value in body.items() if key not in ("echo", "best_of")})
    return CompletionCall(prompts=prompts, echoes=_echoes(typed, prompts), call=call)


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either."""
    if isinstance(prompt, list) and prompt and not _is_ids(prompt):
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"prompt must not hold more than {MAX_PROMPTS} prompts", "prompt")
        return tuple(_prompt(one, f"prompt[{place}]") for place, one in enumerate(prompt))
    return (_prompt(prompt, "prompt"),)


def _prompt(prompt: Any, param: str) -> Prompt:
    if isinstance(prompt, str):
        if prompt and not prompt.strip():
            raise invalid(NO_INPUT, param)
        return TextPrompt(text=prompt)
    if isinstance(prompt, list) and prompt and _is_ids(prompt):
        return TokenPrompt(token_ids=tuple(prompt))
    raise invalid("prompt must be a string, an array of token ids, or an array of these", param)


def _is_ids(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _echoes(typed: CompletionBody, prompts: tuple[Prompt, ...]) -> tuple[str, ...]:
    if not typed.echo:
        return ("",) * len(prompts)
    if typed.logprobs is not None:
        raise invalid("echo cannot be combined with logprobs", "echo")
    texts = []
    for prompt in prompts:
        if not isinstance(prompt, TextPrompt):
            raise invalid("echo needs prompts that are text", "echo")
        texts.append(prompt.text)
    return tuple(texts)


def _check_format(response_format: dict[str, Any] | None) -> None:
    if response_format is None:
        return
    kind = response_format.get("type")
    if not isinstance(kind, str):
        raise invalid("response_format.type must be a string", "response_format")
    if kind != "text":
        raise unsupported("response_format")
