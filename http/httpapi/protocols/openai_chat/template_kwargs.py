"""Which variables a request gives to the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from httpapi.json_body import invalid
from httpapi.protocols.openai_chat.schema import ChatBody

#: Names that the renderer itself sets; a request that could replace them could replace the prompt.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

_REASONING_OFF = frozenset({"none", "off", "disabled", "false", "0"})


def template_kwargs(
    typed: ChatBody, body: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Server defaults, then what reasoning_effort implies, then the request's own; per key.

    Of the shapes in which a request can carry its own, the first one present counts as a whole.
    """
    own, param = _own_kwargs(typed, body)
    for name in own:
        if name in RESERVED:
            raise invalid(f"{param} must not set '{name}'.", param)
    return {**defaults, **_reasoning(typed), **own}


def _own_kwargs(typed: ChatBody, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if typed.chat_template_kwargs is not None:
        return typed.chat_template_kwargs, "chat_template_kwargs"
    extra = typed.extra_body or {}
    nested = extra.get("chat_template_kwargs")
    if isinstance(nested, dict):
        return nested, "extra_body.chat_template_kwargs"
    for source in (body, extra):  # SDKs flatten extra_body into the root
        preserve = source.get("preserve_thinking")
        if isinstance(preserve, bool):
            return {"preserve_thinking": preserve}, "preserve_thinking"
    return {}, "chat_template_kwargs"


def _reasoning(typed: ChatBody) -> dict[str, Any]:
    effort: Any = typed.reasoning_effort
    if effort is None:
        effort = (typed.extra_body or {}).get("reasoning_effort")
    if not isinstance(effort, str):
        return {}
    if effort.strip().lower() in _REASONING_OFF:
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort}
