"""The choices of one request share the evaluation of their prompt: who leads, who waits for it.

The first choice that has a slot leads: it evaluates the prompt, and a snapshot of its cache without
the last token of the prompt is kept.  The others wait for that snapshot and begin with it.  If the
leader goes before, the next one leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Fork:
    handle: int
    owned: bool  # the snapshot was taken for the fork alone, so it is to be forgotten with it
    leader: int
    over: Mapping[str, Callable[[], bool]]  # by request id: whether that choice has ended
    cached_tokens: int
    ready: bool = False
    waiting: list[int] = field(default_factory=list)
    opened: set[str] = field(default_factory=set)  # these need the snapshot no more


class ForkBook:
    """Open forks by the id that their choices share; choices by their sequence ids."""

    def __init__(self) -> None:
        self._forks: dict[str, _Fork] = {}

    def __len__(self) -> int:
        return len(self._forks)

    @property
    def pinned(self) -> frozenset[int]:
        """Snapshots that somebody else owns and that are still needed here."""
        return frozenset(fork.handle for fork in self._forks.values() if not fork.owned)

    def knows(self, fork_id: str) -> bool:
        return fork_id in self._forks

    def lead(
        self,
        fork_id: str,
        sequence_id: int,
        *,
        handle: int,
        owned: bool,
        over: Mapping[str, Callable[[], bool]],
        cached_tokens: int,
    ) -> None:
        """The first choice is here; the snapshot will be kept under ``handle``."""
        assert fork_id not in self._forks
        self._forks[fork_id] = _Fork(handle, owned, sequence_id, over, cached_tokens)

    def cached_tokens(self, fork_id: str) -> int:
        """What the leader found in the prompt cache."""
        return self._forks[fork_id].cached_tokens

    def handle(self, fork_id: str) -> int | None:
        """The snapshot, once it is there."""
        fork = self._forks[fork_id]
        return fork.handle if fork.ready else None

    def wait(self, fork_id: str, sequence_id: int) -> None:
        fork = self._forks[fork_id]
        assert not fork.ready
        fork.waiting.append(sequence_id)

    def taken(self, fork_id: str, sequence_id: int) -> list[int]:
        """``sequence_id`` has the snapshot taken; returns those that waited for it."""
        fork = self._forks[fork_id]
        assert fork.leader == sequence_id, (fork.leader, sequence_id)
        assert not fork.ready
        fork.ready = True
        waiting, fork.waiting = fork.waiting, []
        return waiting

    def opened(self, fork_id: str, request_id: str) -> None:
        """This choice does without the snapshot from now on."""
        if fork_id in self._forks:
            self._forks[fork_id].opened.add(request_id)

    def leave(self, fork_id: str, sequence_id: int) -> list[int]:
        """A choice leaves its slot or loses its cache.

        When the leader goes too early the fork is closed; returns those that waited for it.
        """
        fork = self._forks.get(fork_id)
        if fork is None:
            return []
        if sequence_id in fork.waiting:
            fork.waiting.remove(sequence_id)
        if fork.ready or fork.leader != sequence_id:
            return []
        del self._forks[fork_id]
        return fork.waiting

    def unneeded(self) -> Iterator[int]:
        """Close forks whose snapshot nobody will open any more; yields those to be forgotten."""
        for fork_id, fork in list(self._forks.items()):
            if fork.ready and all(rid in fork.opened or over() for rid, over in fork.over.items()):
                del self._forks[fork_id]
                if fork.owned:
                    yield fork.handle
