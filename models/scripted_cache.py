"""What a scripted engine keeps of caches: the tokens themselves, so that a wrong prefix is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from models.engine import KeptPrefix, PrefixData, StepPlan


@dataclass(frozen=True, slots=True)
class Kept:
    """``tokens`` of a sequence from position ``start`` on."""

    start: int
    tokens: tuple[int, ...]
    snapshot: bool


def unobserved(event: str, *fields: object) -> None:
    del event, fields


class KeptCaches:
    """Blocks and snapshots by handle.  Everything that is not allowed is an AssertionError."""

    def __init__(self, observe: Callable[..., None] = unobserved) -> None:
        self._kept: dict[int, Kept] = {}
        self._observe = observe

    @property
    def handles(self) -> tuple[int, ...]:
        return tuple(self._kept)

    def check(self, plan: StepPlan) -> None:
        """Whether all handles of ``plan`` are known or new when their turn comes."""
        kept = {handle: self._size(handle) for handle in self._kept}
        for handle in plan.forget:
            assert handle in kept, f"forgets {handle}, which is not kept"
            del kept[handle]
        new = [(data.handle, len(data.arrays["tokens"])) for data in plan.load]
        new += [(block.handle, block.end - block.start) for block in plan.keep]
        for handle, size in new:
            assert handle not in kept, f"{handle} is kept already"
            kept[handle] = size
        for chunk in plan.prefill:
            if chunk.prefix is not None:
                sizes = [kept[handle] for handle in chunk.prefix.handles]
                assert 0 < chunk.prefix.tokens <= sum(sizes), chunk.prefix
                assert sum(sizes[:-1]) < chunk.prefix.tokens, "a handle that is not needed"
        snapshots = [chunk.keep_as for chunk in plan.prefill if chunk.keep_as is not None]
        assert len(set(snapshots)) == len(snapshots), snapshots
        assert not kept.keys() & set(snapshots), snapshots

    def _size(self, handle: int) -> int:
        return len(self._kept[handle].tokens)

    def apply(self, plan: StepPlan, rows: Mapping[int, Sequence[int]]) -> tuple[PrefixData, ...]:
        """Forget, load, keep.  ``rows`` are the tokens of all sequences; returns the exports."""
        for handle in plan.forget:
            del self._kept[handle]
            self._observe("forgot", handle)
        for data in plan.load:
            start, loaded = data.arrays["start"], data.arrays["tokens"]
            self._keep(data.handle, Kept(start, tuple(loaded), snapshot=False))
        exported = []
        for block in plan.keep:
            tokens = tuple(rows[block.sequence_id][block.start : block.end])
            self._keep(block.handle, Kept(block.start, tokens, snapshot=False))
            if block.export:
                arrays = {"start": block.start, "tokens": tokens}
                exported.append(PrefixData(handle=block.handle, arrays=arrays))
        return tuple(exported)

    def snapshot(self, handle: int, tokens: Sequence[int]) -> None:
        self._keep(handle, Kept(0, tuple(tokens), snapshot=True))

    def _keep(self, handle: int, kept: Kept) -> None:
        self._kept[handle] = kept
        self._observe("kept", handle, kept.tokens)

    def open(self, prefix: KeptPrefix) -> tuple[int, ...]:
        """The tokens that a sequence begins with."""
        tokens: tuple[int, ...] = ()
        for handle in prefix.handles:
            kept = self._kept[handle]
            assert kept.start == len(tokens), "blocks out of order"
            assert not kept.snapshot or len(kept.tokens) == prefix.tokens, "part of a snapshot"
            tokens += kept.tokens
        return tokens[: prefix.tokens]
