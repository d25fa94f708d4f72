"""Checks that follow the types, in the order of the contract.

Features that this server does not have yet are refused by name, after their ranges were checked;
a request is never answered as if it had not asked.  Values that switch a feature off pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.errors import ErrorCode, RequestError
from httpapi.json_body import invalid
from httpapi.protocols.openai_chat.messages import Conversation
from httpapi.protocols.openai_chat.schema import ChatBody
from httpapi.protocols.shared.call import check_ranges, check_thinking_budget

MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
NO_INPUT = "Request must include at least one non-empty message content or media input."

_TOOL_CHOICES = ("none", "auto", "required")
#: field -> the values that leave it switched off (null always does)
_OFF: dict[str, tuple[object, ...]] = {
    "reasoning_control": (False,),
}

#: Fields of other servers that would change the answer, with the values that switch them off.
#: Keys that are in neither table are accepted, as clients send many that do not matter.
_FOREIGN: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "use_beam_search": (False,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "grammar": ("",),
    "json_schema": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "lora": ([],),
    "echo": (False,),
    "continue_final_message": (False,),
}


def unsupported(field: str) -> RequestError:
    return invalid(f"{field} is not supported by this server yet", field)


def check(typed: ChatBody, conversation: Conversation, max_tokens: int | None) -> None:
    """Raises RequestError for the first rule that the request breaks."""
    if not conversation.effective:
        raise invalid(NO_INPUT, "messages")
    _check_logprobs(typed)
    check_ranges(typed)
    _check_media(conversation)
    _check_tools(typed)
    check_thinking_budget(typed, max_tokens)
    _check_response_format(typed)
    for field, off in _OFF.items():
        value = getattr(typed, field)
        if value is not None and value not in off:
            raise unsupported(field)


def check_foreign(body: Mapping[str, Any]) -> None:
    """Raises RequestError for a field of another server that asks for what is not done here."""
    for field, off in _FOREIGN.items():
        value = body.get(field)
        if value is not None and value not in off:
            raise unsupported(field)


def _check_logprobs(typed: ChatBody) -> None:
    if typed.top_logprobs is None:
        return
    if not 0 <= typed.top_logprobs <= MAX_TOP_LOGPROBS:
        raise invalid(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}", "top_logprobs")
    if not typed.logprobs:
        raise invalid("top_logprobs requires logprobs to be set to true", "top_logprobs")


def _check_media(conversation: Conversation) -> None:
    """Decided before anything is fetched or read."""
    if conversation.media is not None:
        modality, path = conversation.media
        raise RequestError(
            ErrorCode.NOT_SUPPORTED,
            f"{modality} input is not supported by the loaded model",
            param=path,
        )


def _check_tools(typed: ChatBody) -> None:
    choice = typed.tool_choice
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES:
            raise invalid(f"tool_choice must be one of {', '.join(_TOOL_CHOICES)}", "tool_choice")
    elif choice is not None and not _names_function(choice):
        raise invalid("tool_choice must be a string or name a function", "tool_choice")
    tools = typed.tools or []
    if len(tools) > MAX_TOOLS:
        raise invalid(f"Too many tools: {len(tools)}. Maximum allowed is {MAX_TOOLS}.", "tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice asks for a tool call, but there are no tools", "tool_choice")
        return
    if choice != "none":
        raise unsupported("tools")


def _names_function(choice: Any) -> bool:
    return (
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and isinstance(choice.get("function"), dict)
        and isinstance(choice["function"].get("name"), str)
    )


def _check_response_format(typed: ChatBody) -> None:
    if typed.response_format is None:
        return
    kind = typed.response_format.get("type")
    if not isinstance(kind, str):
        raise invalid("response_format.type must be a string", "response_format")
    if kind != "text":
        raise unsupported("response_format")
