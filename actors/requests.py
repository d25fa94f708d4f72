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
class LoopRule:
    """Generation ends once a block of ``min_size`` to ``max_size`` tokens has come ``count`` times
    in a row."""

    min_size: int
    max_size: int
    count: int


def loop_rule(min_size: int, max_size: int, count: int) -> LoopRule | None:
    """None where the numbers switch it off: no sizes, or fewer than two in a row."""
    if max_size <= 0 or count < 2:
        return None
    return LoopRule(min_size=max(min_size, 1), max_size=max_size, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """``use`` False: neither look up nor donate.  Buckets never see each other's prefixes."""

    use: bool = True
    bucket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to go on from, in one or several choices.

    ``max_tokens`` None means until an end token or a full context.  ``deadline_s`` is an absolute
    trio time.  ``stop`` strings end the text before their first match.  Choice i of several draws
    with ``sampling.seed`` + i (modulo 2**64).  ``min_tokens`` generated tokens are no end tokens.
    ``thinking_budget`` is the most tokens inside a reasoning block; then its end is forced.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    loop: LoopRule | None = None
    thinking_budget: int | None = None
    cache: CachePolicy = CachePolicy()
    lane: Priority = Priority.NORMAL
    deadline_s: float = math.inf
