"""Neighbours for actors that are tested alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from actors.events import Event
from actors.kit.supervise import contains
from actors.limits import Limits
from actors.messages import Queued
from actors.requests import GenerationRequest, LoopRule, Priority, TokenPrompt
from actors.token_sender import TokenSender
from models.sampling import GREEDY, SamplingParams
from models.scripted_text import text_to_ids


class Requester:
    """The client's end of one request."""

    def __init__(
        self,
        rid: str,
        limits: Limits,
        *,
        prompt: str = "hello",
        max_tokens: int = 8,
        lane: Priority = Priority.NORMAL,
        stop: tuple[str, ...] = (),
        deadline_s: float = float("inf"),
        sampling: SamplingParams = GREEDY,
        thinking_budget: int | None = None,
        loop: LoopRule | None = None,
        cache_root: bytes | None = None,
    ) -> None:
        tx, self.rx = trio.open_memory_channel[Event](limits.token_channel)
        self.places_freed = 0
        self.sender = TokenSender(rid, tx, limits.token_channel, self._free_place)
        prompt_ids = tuple(text_to_ids(prompt))
        self.request = GenerationRequest(
            request_id=rid,
            prompt=TokenPrompt(token_ids=prompt_ids),
            sampling=sampling,
            thinking_budget=thinking_budget,
            loop=loop,
            max_tokens=max_tokens,
            stop=stop,
            lane=lane,
            deadline_s=deadline_s,
        )
        self.queued = Queued(
            request=self.request,
            sampling=self.request.sampling,
            lane=lane,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            total_tokens=len(prompt_ids) + max_tokens,
            arrived_s=0.0,
            deadline_s=deadline_s,
            sender=self.sender,
            cache_root=cache_root,
        )

    def _free_place(self) -> None:
        self.places_freed += 1

    def events(self) -> list[Event]:
        """What has arrived by now."""
        events: list[Event] = []
        while True:
            try:
                events.append(self.rx.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                return events

    def leave(self) -> None:
        self.rx.close()


@contextmanager
def crashes_with(kind: type[Exception]) -> Iterator[None]:
    """The body must end with a group that holds an exception of ``kind``."""
    try:
        yield
    except BaseExceptionGroup as group:
        if not contains(group, (kind,)):
            raise
    else:
        raise AssertionError(f"no {kind.__name__}")
