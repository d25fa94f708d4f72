"""The text side of a model as the actors see it: template, tokenizer, detokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from models.thinking import ThinkingMarkers


class TemplateError(ValueError):
    """The chat template cannot render these messages.  ``str()`` is safe to show to the client."""


class IncrementalDecoder(Protocol):
    """Token ids in, text out; one object per sequence."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Text still held back at the end.  Bytes of an unfinished character are dropped."""
        ...


class TextModel(Protocol):
    """Thread-safe and immutable: rendering and encoding run on worker threads."""

    @property
    def name(self) -> str:
        """The id under which the model is served."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens that the model was made for."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    @property
    def newline_ids(self) -> frozenset[int]:
        """Tokens that are exactly one newline."""
        ...

    @property
    def thinking(self) -> ThinkingMarkers | None:
        """The tokens around a reasoning block; None if the vocabulary has none."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template reads ``tools``."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text.  Raises TemplateError."""
        ...

    def template_signature(self, kwargs: Mapping[str, Any]) -> str:
        """Equal for equal templates with equal ``kwargs``."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids; special tokens inside ``text`` are parsed; ``add_special`` adds BOS."""
        ...

    def decoder(self) -> IncrementalDecoder: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; special tokens by their name.

        Tokens outside the vocabulary of the tokenizer have none.
        """
        ...
