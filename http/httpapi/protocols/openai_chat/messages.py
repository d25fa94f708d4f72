"""Messages of a chat request -> the plain dicts that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from httpapi.json_body import invalid

#: Role on the wire -> role for the template.  ``developer`` is the newer name of ``system``.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

#: Content part type -> modality, as named in the answer to a model that cannot take it.
MEDIA_PARTS = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}


@dataclass(slots=True)
class Conversation:
    """``effective``: there is something to answer.  ``media``: the first medium met, as
    (modality, path of its part)."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    effective: bool = False
    media: tuple[str, str] | None = None


def read_messages(raw: Sequence[Any]) -> Conversation:
    """Raises RequestError that names the message and field at fault."""
    conversation = Conversation()
    for index, message in enumerate(raw):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(f"{path} must be an object.", path)
        conversation.messages.append(_read_message(message, path, conversation))
    return conversation


def _read_message(message: dict[str, Any], path: str, into: Conversation) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": _read_role(message, path),
        "content": _read_content(message.get("content"), f"{path}.content", into),
    }
    for key in ("name", "tool_call_id"):
        value = _optional_text(message, key, path)
        if value is not None:
            result[key] = value
    reasoning = _optional_text(message, "reasoning_content", path)
    if reasoning is None:
        reasoning = _optional_text(message, "reasoning", path)
    if reasoning is not None:
        # Templates read either name.
        result["reasoning_content"] = result["reasoning"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = _read_tool_calls(calls, f"{path}.tool_calls")
    if result["content"].strip() or (reasoning or "").strip() or calls:
        into.effective = True
    return result


def _read_role(message: dict[str, Any], path: str) -> str:
    param = f"{path}.role"
    if "role" not in message:
        raise invalid(f"The field {param} is required.", param)
    role = message["role"]
    if not isinstance(role, str):
        raise invalid(f"{param} must be a string.", param)
    known = ROLES.get(role)
    if known is None:
        raise invalid(f"{param}: unknown role '{role[:64]}'; use one of {', '.join(ROLES)}.", param)
    return known


def _read_content(content: Any, path: str, into: Conversation) -> str:
    """Null or absent is empty text, as in assistant turns that only call tools."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{path} must be a string, an array of content parts, or null.", path)
    texts = [_read_part(part, f"{path}[{index}]", into) for index, part in enumerate(content)]
    return "".join(texts)


def _read_part(part: Any, path: str, into: Conversation) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object.", path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{path}.type must be a string.", f"{path}.type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid(f"{path}.text must be a string.", f"{path}.text")
        return text
    modality = MEDIA_PARTS.get(kind)
    if modality is None:
        raise invalid(f"{path}.type: unknown content part '{kind[:64]}'.", f"{path}.type")
    if into.media is None:
        into.media = (modality, path)
    into.effective = True
    return ""


def _optional_text(message: dict[str, Any], key: str, path: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}.{key} must be a string.", f"{path}.{key}")
    return value


def _read_tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(f"{path} must be an array.", path)
    return [_read_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid(f"{path} must be an object.", path)
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function must be an object.", f"{path}.function")
    for key in ("name", "arguments"):
        if not isinstance(function.get(key), str):
            param = f"{path}.function.{key}"
            raise invalid(f"{param} must be a string.", param)
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }
    identifier = _optional_text(call, "id", path)
    if identifier is not None:
        result["id"] = identifier
    return result
