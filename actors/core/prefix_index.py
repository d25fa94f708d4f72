"""Which prefixes are kept, as blocks of tokens in hash chains shared by all entries.

An entry is one donated sequence, cut to whole blocks.  A block is kept once, however many entries
run through it, and as long as an entry uses it or a lease pins it.  Entries are evicted least
recently hit first; what they alone used is then forgotten.

A hash only finds a candidate.  A block also has to hold the very tokens and to follow the very
block that was matched before it, so a collision costs a hit and never gives a wrong one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.core.block_hash import Hash, chain, hash_by_name
from actors.core.cache_stats import PrefixCounters
from actors.limits import PromptCacheLimits


@dataclass(slots=True)
class Block:
    """``parent`` is the handle of the block before it, 0 for the first one."""

    key: bytes
    handle: int
    parent: int
    tokens: tuple[int, ...]
    entries: dict[int, None] = field(default_factory=dict)  # insertion order: the newest is last
    pins: int = 0


@dataclass(slots=True)
class _Entry:
    blocks: tuple[Block, ...]
    hit_s: float


@dataclass(frozen=True, slots=True)
class Match:
    """``tokens`` of the prompt are covered; the last block perhaps only in part."""

    blocks: tuple[Block, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class NewBlock:
    """Tokens [start, end) of the donated sequence become the block ``handle``."""

    handle: int
    start: int
    end: int
    key: bytes
    parent: bytes


class PrefixIndex:
    """``forgotten`` collects the handles that the engine has to free; whoever reads it clears it.

    ``new_handle`` gives handles that were never used before, from 1 on.
    """

    def __init__(
        self,
        *,
        limits: PromptCacheLimits,
        bytes_per_token: int,
        new_handle: Callable[[], int],
        counters: PrefixCounters | None = None,
        hash_of: Hash | None = None,
    ) -> None:
        self._limits = limits
        self._size = limits.block_tokens
        self._block_bytes = limits.block_tokens * bytes_per_token
        self._new_handle = new_handle
        self._hash = hash_of or hash_by_name(limits.hash_name)
        self._blocks: dict[bytes, Block] = {}
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently hit first
        self._ends: dict[int, int] = {}  # handle of an entry's last block -> entry
        self._next_entry = 1
        self._pinned = 0  # blocks with pins
        self.counters = counters or PrefixCounters()
        self.forgotten: list[int] = []

    # Sizes ---------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    @property
    def kept_bytes(self) -> int:
        return len(self._blocks) * self._block_bytes

    @property
    def kept_tokens(self) -> int:
        return len(self._blocks) * self._size

    @property
    def evictable_tokens(self) -> int:
        return (len(self._blocks) - self._pinned) * self._size

    @property
    def stored_blocks(self) -> int:
        """Blocks counted once per entry through them."""
        return sum(len(entry.blocks) for entry in self._entries.values())

    # Finding -------------------------------------------------------------------------------------

    def keys(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """The hash chain of all whole blocks of ``tokens``."""
        return [key for key, _ in chain(root, tokens, self._size, self._hash)]

    def match(self, root: bytes, prompt: Sequence[int], now: float) -> Match | None:
        """The longest kept prefix; at least one token of the prompt stays to be evaluated."""
        self.expire(now)
        walked = self._walk(root, prompt)
        if not self._limits.apc:
            while walked and (
                walked[-1].handle not in self._ends or len(walked) * self._size >= len(prompt)
            ):
                walked.pop()
        tokens = min(len(walked) * self._size, len(prompt) - 1)
        if not walked or tokens < self._limits.min_prefix:
            return None
        blocks = tuple(walked[: -(-tokens // self._size)])
        self._touch(blocks[-1], now)
        return Match(blocks, tokens)

    def _walk(self, root: bytes, tokens: Sequence[int]) -> list[Block]:
        walked: list[Block] = []
        parent = 0
        for key, part in chain(root, tokens, self._size, self._hash):
            block = self._blocks.get(key)
            if block is None or block.parent != parent or block.tokens != part:
                break
            walked.append(block)
            parent = block.handle
        return walked

    def _touch(self, block: Block, now: float) -> None:
        for entry_id in reversed(block.entries):
            self._entries[entry_id].hit_s = now
            self._entries.move_to_end(entry_id)
            return

    # Pins ----------------------------------------------------------------------------------------

    def pin(self, blocks: Sequence[Block]) -> None:
        """A lease uses these: they stay until it lets go."""
        for block in blocks:
            self._pinned += block.pins == 0
            block.pins += 1

    def unpin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.pins > 0, "unpinned once too often"
            block.pins -= 1
            if block.pins == 0:
                self._pinned -= 1
                self._free_if_unused(block)

    # Keeping -------------------------------------------------------------------------------------

    def donate(
        self, root: bytes, tokens: Sequence[int], now: float, room: Callable[[], int]
    ) -> list[NewBlock]:
        """Keep a sequence; returns the blocks that are not there yet.

        ``room`` tells how many tokens may still be kept; older entries make room, pinned ones not.
        """
        self.expire(now)
        count = len(tokens) // self._size
        if count * self._size < self._limits.min_prefix:
            return []
        if count * self._block_bytes > self._limits.capacity_bytes:
            self.counters.rejections_oversized += 1
            return []
        walked = self._walk(root, tokens)
        if len(walked) == count and (self._limits.apc or walked[-1].handle in self._ends):
            self._touch(walked[-1], now)
            return []
        entry_id = self._next_entry
        self._next_entry += 1
        for block in walked:
            block.entries[entry_id] = None
        missing = count - len(walked)
        if not self._make_room(missing, entry_id, room):
            self._leave(walked, entry_id)
            return []
        fresh = self._create(root, tokens, walked, entry_id)
        if not walked:
            return []  # its first block collides with another one
        replaced = [self._ends[one.handle] for one in walked[:-1] if one.handle in self._ends]
        self._entries[entry_id] = _Entry(tuple(walked), now)
        self._ends[walked[-1].handle] = entry_id
        for old in replaced:
            self._drop_entry(old)
        self.counters.inserts += 1
        return fresh

    def _create(
        self, root: bytes, tokens: Sequence[int], walked: list[Block], entry_id: int
    ) -> list[NewBlock]:
        """Add what is missing to ``walked``, up to the first collision."""
        fresh: list[NewBlock] = []
        parent_key = root
        for number, (key, part) in enumerate(chain(root, tokens, self._size, self._hash)):
            if number >= len(walked):
                if key in self._blocks:
                    break
                parent = walked[-1].handle if walked else 0
                block = Block(key, self._new_handle(), parent, part, {entry_id: None})
                self._blocks[key] = block
                walked.append(block)
                start = number * self._size
                fresh.append(NewBlock(block.handle, start, start + self._size, key, parent_key))
            parent_key = key
        return fresh

    def _make_room(self, missing: int, entry_id: int, room: Callable[[], int]) -> bool:
        limits = self._limits
        while (
            room() < missing * self._size
            or (len(self._blocks) + missing) * self._block_bytes > limits.capacity_bytes
            or len(self._entries) >= limits.max_entries
        ):
            if not self._evict_one():
                return False
        return True

    def _leave(self, blocks: Sequence[Block], entry_id: int) -> None:
        for block in reversed(blocks):
            block.entries.pop(entry_id, None)
            self._free_if_unused(block)

    # Forgetting ----------------------------------------------------------------------------------

    def evict_tokens(self, tokens: int) -> int:
        """Forget the least recently hit entries until ``tokens`` are free; how many really are."""
        before = self.kept_tokens
        while before - self.kept_tokens < tokens and self._evict_one():
            pass
        return before - self.kept_tokens

    def _evict_one(self) -> bool:
        for entry_id in self._entries:
            self.counters.evictions_lru += 1
            self._drop_entry(entry_id)
            return True
        return False

    def expire(self, now: float) -> None:
        """Forget what was not hit for too long."""
        while self._entries:
            entry_id, entry = next(iter(self._entries.items()))
            if now - entry.hit_s < self._limits.ttl_s:
                return
            self.counters.evictions_ttl += 1
            self._drop_entry(entry_id)

    def clear(self) -> tuple[int, int]:
        """Forget everything that is not pinned; (bytes, entries) freed."""
        entries, before = len(self._entries), self.kept_bytes
        for entry_id in list(self._entries):
            self._drop_entry(entry_id)
        return before - self.kept_bytes, entries

    def _drop_entry(self, entry_id: int) -> None:
        entry = self._entries.pop(entry_id)
        last = entry.blocks[-1].handle
        if self._ends.get(last) == entry_id:
            del self._ends[last]
        self._leave(entry.blocks, entry_id)

    def _free_if_unused(self, block: Block) -> None:
        if block.entries or block.pins or self._blocks.get(block.key) is not block:
            return
        del self._blocks[block.key]
        self.forgotten.append(block.handle)
