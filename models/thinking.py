"""How a model marks its reasoning: the tokens that open and close a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Pairs of markers, each one token in the vocabularies that have them; the first pair found counts.
PAIRS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<|channel>", "<channel|>"),
    ("<|content_thinking|>", "<|end_message|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    newline_ids: frozenset[int] = frozenset()

    def opened_by(self, prompt_ids: tuple[int, ...]) -> bool:
        """Whether the prompt ends inside a block: with its opening marker, and perhaps a newline,
        as chat templates write it."""
        end = len(prompt_ids)
        if end and prompt_ids[-1] in self.newline_ids:
            end -= 1
        return prompt_ids[max(0, end - len(self.open_ids)) : end] == self.open_ids


def find_markers(
    token_id: Callable[[str], int | None], newline_ids: frozenset[int]
) -> ThinkingMarkers | None:
    """``token_id`` is the id of a special token by its text, None if there is no such token."""
    for opening, closing in PAIRS:
        open_id, close_id = token_id(opening), token_id(closing)
        if open_id is not None and close_id is not None:
            return ThinkingMarkers(
                open_ids=(open_id,), close_ids=(close_id,), newline_ids=newline_ids
            )
    return None
