"""A text model without files: every byte is a token, and chats look like ChatML."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.text_model import IncrementalDecoder, TemplateError
from models.thinking import ThinkingMarkers, find_markers

BOS_ID = 256
EOS_ID = 257
IM_START_ID = 258
IM_END_ID = 259
THINK_ID = 260
END_THINK_ID = 261
VOCAB_SIZE = 262

SPECIALS: Mapping[str, int] = {
    "<|bos|>": BOS_ID,
    "<|eos|>": EOS_ID,
    "<|im_start|>": IM_START_ID,
    "<|im_end|>": IM_END_ID,
    "<think>": THINK_ID,
    "</think>": END_THINK_ID,
}
_NAMES = {token_id: name for name, token_id in SPECIALS.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")

#: A message that holds this makes the template fail, as a template's own checks do.
TEMPLATE_ERROR_TRIGGER = "<|template-error|>"


def text_to_ids(text: str) -> list[int]:
    ids: list[int] = []
    for piece in _SPLIT.split(text):
        if piece in SPECIALS:
            ids.append(SPECIALS[piece])
        else:
            ids += piece.encode()
    return ids


def ids_to_text(ids: Sequence[int]) -> str:
    """The whole text, special tokens by name; broken characters are replaced."""
    data = b"".join(bytes([i]) if i < 256 else _NAMES[i].encode() for i in ids)
    return data.decode(errors="replace")


class ByteDecoder:
    """Emits a character once all its bytes are here; special tokens have no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        self._decoder.reset()
        return ""


class ScriptedTextModel:
    """Roles are system, user, assistant, tool; another one is a TemplateError."""

    def __init__(
        self,
        *,
        name: str = "scripted",
        context_length: int = 8192,
        has_chat_template: bool = True,
        supports_tools: bool = False,
    ) -> None:
        self.name = name
        self.vocab_size = VOCAB_SIZE
        self.context_length = context_length
        self.eos_ids = frozenset({EOS_ID, IM_END_ID})
        self.newline_ids = frozenset({10})
        self.thinking: ThinkingMarkers | None = find_markers(SPECIALS.get, self.newline_ids)
        self.has_chat_template = has_chat_template
        self.supports_tools = supports_tools

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        if not self.has_chat_template:
            raise TemplateError("this model has no chat template")
        parts = [_render(message) for message in messages]
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def template_signature(self, kwargs: Mapping[str, Any]) -> str:
        return json.dumps(dict(kwargs), sort_keys=True, default=str)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [BOS_ID, *text_to_ids(text)] if add_special else text_to_ids(text)

    def decoder(self) -> IncrementalDecoder:
        return ByteDecoder()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else _NAMES.get(token_id, "").encode()


def _render(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise TemplateError(f"unknown role: {role}")
    content = message.get("content") or ""
    text = content if isinstance(content, str) else _join(content)
    if TEMPLATE_ERROR_TRIGGER in text:
        raise TemplateError("the template refuses this message")
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _join(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(str(part.get("text", "")) for part in parts)
