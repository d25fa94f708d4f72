"""A chat completion body -> what to generate and how to answer.  Pure: no clock, no randomness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.requests import ChatPrompt
from httpapi.json_body import parse_object
from httpapi.protocols.openai_chat.checks import check, check_foreign
from httpapi.protocols.openai_chat.messages import read_messages
from httpapi.protocols.openai_chat.schema import ChatBody, read_body
from httpapi.protocols.openai_chat.template_kwargs import template_kwargs
from httpapi.protocols.shared.call import Call, max_tokens, read_call
from httpapi.settings import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    prompt: ChatPrompt
    call: Call


def read_chat(raw: bytes, defaults: GenerationDefaults) -> ChatCall:
    """Body bytes -> ChatCall.  Raises RequestError."""
    return parse_chat(parse_object(raw), defaults)


def parse_chat(body: Mapping[str, Any], defaults: GenerationDefaults) -> ChatCall:
    """Types first, then messages, then the rules of checks.py in their order, then the rest."""
    typed = read_body(ChatBody, body)
    conversation = read_messages(typed.messages)
    check(typed, conversation, max_tokens(typed, defaults))
    check_foreign(body)
    logprobs = (typed.top_logprobs or 0) if typed.logprobs else None
    return ChatCall(
        prompt=ChatPrompt(
            messages=tuple(conversation.messages),
            template_kwargs=template_kwargs(typed, body, defaults.template_kwargs),
        ),
        call=read_call(typed, defaults, logprobs=logprobs),
    )
