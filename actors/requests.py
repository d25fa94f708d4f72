"""What a caller asks for, independent of the HTTP protocol it came through."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.sampling import SamplingParams


class Priority(enum.IntEnum):
    """Lane of the prefill queue; lower values go first.  Header ``X-Priority``."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages for the chat template: plain dicts as templates expect them, never mutated."""

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    text: str
    add_special: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    ``max_tokens`` None means until an end token or a full context.  ``deadline_s`` is an absolute
    trio time.  ``stop`` strings end the text before their first match.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    lane: Priority = Priority.NORMAL
    deadline_s: float = math.inf
