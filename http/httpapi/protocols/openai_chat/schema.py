"""The typed fields of a chat completion body.  Types only; meaning is decided in request.py."""

from __future__ import annotations

from typing import Any

from httpapi.protocols.shared.fields import GenerationFields, read_body

__all__ = ["ChatBody", "read_body"]


class ChatBody(GenerationFields):
    messages: list[Any]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # tools and structured output
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    # template and reasoning
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_control: bool | None = None
