from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.block_hash import chain, hash_by_name, sha256, token_bytes
from actors.core.prefix_index import Match, PrefixIndex
from actors.limits import PromptCacheLimits

ROOT, OTHER = b"root", b"other"
PLENTY = 10**9


def index(*, hash_of: Callable[[bytes], bytes] | None = None, **limits: object) -> PrefixIndex:
    settings_of = {"block_tokens": 4, "min_prefix": 4, "ttl_s": 100.0, **limits}
    handles = count(1)
    return PrefixIndex(
        limits=PromptCacheLimits(**settings_of),  # type: ignore[arg-type]
        bytes_per_token=10,
        new_handle=lambda: next(handles),
        hash_of=hash_of,
    )


def donate(
    one: PrefixIndex, tokens: range | list[int], now: float = 0.0, room: int = PLENTY
) -> list[int]:
    return [block.handle for block in one.donate(ROOT, list(tokens), now, lambda: room)]


def match(one: PrefixIndex, tokens: range | list[int], now: float = 0.0) -> tuple[list[int], int]:
    found = one.match(ROOT, list(tokens), now)
    return ([], 0) if found is None else ([b.handle for b in found.blocks], found.tokens)


def test_hashes_are_chained_over_little_endian_tokens() -> None:
    first, second = chain(ROOT, [1, 2, 3, 4, 5], 2, sha256)
    assert first == (hashlib.sha256(ROOT + b"\1\0\0\0\2\0\0\0").digest(), (1, 2))
    assert second == (hashlib.sha256(first[0] + token_bytes([3, 4])).digest(), (3, 4))


def test_an_unknown_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        hash_by_name("md5")


def test_the_longest_shared_prefix_is_found_and_blocks_are_kept_once() -> None:
    one = index()
    assert donate(one, range(10)) == [1, 2]
    assert donate(one, [*range(8), 50, 51, 52, 53, 54]) == [3]  # the shared blocks are there
    assert match(one, range(20)) == ([1, 2], 8)
    assert match(one, [*range(8), 50, 51, 52, 53, 9]) == ([1, 2, 3], 12)
    assert match(one, [*range(6), 99, 99, 99]) == ([1], 4)
    assert match(one, [7, *range(8)]) == ([], 0)
    assert one.kept_bytes == 3 * 4 * 10


def test_one_token_of_the_prompt_is_always_left() -> None:
    one = index()
    donate(one, range(8))
    assert match(one, range(8)) == ([1, 2], 7)
    assert match(one, range(5)) == ([1], 4)
    assert match(one, range(4)) == ([], 0)  # three tokens are below the shortest prefix


def test_roots_share_nothing() -> None:
    one = index()
    donate(one, range(8))
    assert one.match(OTHER, list(range(12)), 0.0) is None


def test_without_block_sharing_only_whole_entries_serve() -> None:
    one = index(apc=False)
    donate(one, range(8))
    assert match(one, [*range(4), 9, 9, 9]) == ([], 0)
    assert match(one, range(9)) == ([1, 2], 8)
    assert match(one, range(8)) == ([], 0)
    donate(one, range(4))
    assert match(one, range(8)) == ([1], 4)


def test_entries_live_as_long_as_they_are_hit() -> None:
    one = index()
    donate(one, range(8), 0.0)
    assert match(one, range(9), 99.0)[1] == 8
    assert match(one, range(9), 198.0)[1] == 8
    assert match(one, range(9), 298.5) == ([], 0)
    assert sorted(one.forgotten) == [1, 2]
    assert one.counters.evictions_ttl == 1


def test_the_least_recently_hit_entry_makes_room() -> None:
    one = index(capacity_bytes=4 * 4 * 10)
    donate(one, range(8), 0.0)
    donate(one, range(100, 108), 1.0)
    match(one, range(9), 2.0)
    assert donate(one, range(200, 208), 3.0) == [5, 6]
    assert sorted(one.forgotten) == [3, 4]
    assert one.counters.evictions_lru == 1


def test_what_is_larger_than_all_is_rejected() -> None:
    one = index(capacity_bytes=100)
    assert donate(one, range(12)) == []
    assert one.counters.rejections_oversized == 1


def test_the_number_of_entries_is_bounded() -> None:
    one = index(max_entries=2)
    for start in (0, 100, 200):
        donate(one, range(start, start + 8), start / 100)
    assert one.entries == 2
    assert sorted(one.forgotten) == [1, 2]


def test_a_longer_entry_replaces_its_own_beginning() -> None:
    one = index()
    donate(one, range(8))
    assert donate(one, range(12)) == [3]
    assert one.entries == 1
    assert one.forgotten == []
    assert donate(one, range(8)) == []
    assert one.entries == 1


def test_pinned_blocks_stay_until_they_are_let_go() -> None:
    one = index()
    donate(one, range(8))
    found = one.match(ROOT, list(range(9)), 0.0)
    assert isinstance(found, Match)
    one.pin(found.blocks)
    assert one.evictable_tokens == 0
    assert one.clear() == (0, 1)
    assert one.forgotten == []
    one.unpin(found.blocks)
    assert sorted(one.forgotten) == [1, 2]
    assert one.kept_tokens == 0


def test_no_room_keeps_nothing_and_forgets_no_pinned_one() -> None:
    one = index()
    donate(one, range(8))
    found = one.match(ROOT, list(range(9)), 0.0)
    assert found is not None
    one.pin(found.blocks)
    assert donate(one, range(100, 108), room=7) == []
    assert one.forgotten == []
    assert one.blocks == 2


def test_colliding_hashes_never_give_a_wrong_match() -> None:
    one = index(hash_of=lambda data: bytes([len(data) % 7]))
    donate(one, range(16))
    donate(one, range(100, 116))
    for start in (0, 100):
        found = one.match(ROOT, list(range(start, start + 20)), 0.0)
        tokens = [] if found is None else [t for b in found.blocks for t in b.tokens]
        assert tokens == list(range(start, start + len(tokens)))


class IndexMachine(RuleBasedStateMachine):
    """Against a list of donated sequences: what is matched was donated and has not been forgotten,
    and every handle is forgotten exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.one = index(capacity_bytes=9 * 40, max_entries=4, ttl_s=20.0)
        self.live: dict[int, tuple[int, ...]] = {}  # handle -> all tokens up to the block's end
        self.gone: set[int] = set()
        self.pins: list[Match] = []

    def collect(self) -> None:
        for handle in self.one.forgotten:
            assert handle not in self.gone
            assert all(handle != block.handle for one in self.pins for block in one.blocks)
            self.gone.add(handle)
            del self.live[handle]
        self.one.forgotten.clear()

    TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)

    @rule(tokens=TOKENS, room=st.integers(0, 40))
    def donate(self, tokens: list[int], room: int) -> None:
        free = room + 36 - self.one.kept_tokens
        for new in self.one.donate(ROOT, tokens, self.now, lambda: free):
            assert new.handle not in self.live
            assert new.handle not in self.gone
            self.live[new.handle] = tuple(tokens[: new.end])
        self.collect()

    @rule(tokens=TOKENS, pin=st.booleans())
    def match(self, tokens: list[int], pin: bool) -> None:
        found = self.one.match(ROOT, tokens, self.now)
        self.collect()
        if found is None:
            return
        assert 4 <= found.tokens < len(tokens)
        for number, block in enumerate(found.blocks):
            assert self.live[block.handle] == tuple(
                t for b in found.blocks[: number + 1] for t in b.tokens
            )
        assert self.live[found.blocks[-1].handle][: found.tokens] == tuple(tokens[: found.tokens])
        if pin:
            self.one.pin(found.blocks)
            self.pins.append(found)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        one = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.one.unpin(one.blocks)
        self.collect()

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens: int) -> None:
        possible = self.one.evictable_tokens
        assert self.one.evict_tokens(tokens) >= min(tokens, possible)
        self.collect()

    @rule(seconds=st.floats(0.0, 15.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def clear(self) -> None:
        self.one.clear()
        self.collect()

    @invariant()
    def bounds(self) -> None:
        pinned = {block.handle for one in self.pins for block in one.blocks}
        assert self.one.blocks == len(self.live)
        assert self.one.entries <= 4
        assert self.one.evictable_tokens == 4 * (len(self.live) - len(pinned))
        assert self.one.kept_bytes <= 9 * 40 + 40 * len(pinned)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
