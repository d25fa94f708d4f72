"""Prompt chunks: one by one, or several whole short prompts as one padded batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from models.engine import PrefillChunk, TokenLogprobs
from models.mlx.batching import Caches, DecodeBatch, arrays_of, share_offsets
from models.mlx.head import LastPositionHead
from models.mlx.heap import return_freed_memory
from models.mlx.lm import mlx_lm_utils
from models.mlx.prefixes import PrefixStore, copy_state
from models.mlx.sampler import BatchSampler, Draw, check_params
from models.mlx.sequences import NOT_FINITE, Sequences, checked, evaluate, host_values
from models.mlx.sequences import Sequence as Seq

mlx_lm_utils()

from mlx_lm.models.cache import BatchKVCache, KVCache  # noqa: E402

# Prompts share a forward pass while at most this share of its tokens is real ones' padding.
MAX_PADDING: Final = 0.25
# The activations of fewer tokens leave too little free memory to bother.
WORTH_TOKENS: Final = 128


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One forward pass: one chunk, or several whole prompts.

    ``drawn`` [n] is there when the chunks end their prompts; -1 for a failed one.
    """

    chunks: list[PrefillChunk]
    caches: Caches
    lengths: list[int]
    drawn: mx.array | None = None
    draw: Draw | None = None
    kept: Caches | None = None  # a copy of the state after the chunk

    @property
    def outputs(self) -> list[mx.array]:
        outputs = arrays_of(self.caches)
        if self.drawn is not None and self.draw is not None:
            outputs.append(self.drawn)
            if self.draw.logprobs is not None:
                outputs += self.draw.logprobs.arrays
        return outputs


def takes_padding(caches: Caches) -> bool:
    """Whether prompts of different lengths may share a pass: every layer has a plain cache."""
    return all(type(cache) is KVCache for cache in caches)


class Prefiller:
    """``together`` allows several prompts in one pass, where the model's caches do."""

    def __init__(
        self,
        model: Any,
        head: LastPositionHead,
        sequences: Sequences,
        store: PrefixStore,
        *,
        make_caches: Callable[[], Caches],
        vocab_size: int,
        context_length: int,
        together: bool,
        unwanted: Callable[[], bool],
    ) -> None:
        self._model = model
        self._head = head
        self._sequences = sequences
        self._store = store
        self._make_caches = make_caches
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._together = together
        self._unwanted = unwanted
        self._on_cpu = mx.default_device() == mx.Device(mx.cpu)

    def build(self, chunks: Sequence[PrefillChunk], failed: dict[int, str]) -> list[_Pass]:
        """Graphs of all chunks, not evaluated.  Chunks with unusable settings fail at once."""
        sound = [chunk for chunk in chunks if self._open(chunk, failed)]
        groups = _groups(sound) if self._together else [[chunk] for chunk in sound]
        return [
            self._build_one(group[0]) if len(group) == 1 else self._build_many(group)
            for group in groups
        ]

    def _open(self, chunk: PrefillChunk, failed: dict[int, str]) -> bool:
        sampling = chunk.sampling
        if sampling is not None and (fault := check_params(sampling, self._vocab_size)) is not None:
            self._sequences.pop(chunk.sequence_id, None)
            failed[chunk.sequence_id] = fault
            return False
        assert chunk.tokens, "a chunk must have tokens"
        opened = chunk.start if chunk.prefix is None else 0
        if opened == 0:
            assert chunk.sequence_id not in self._sequences, "the sequence exists already"
            caches = self._make_caches()
            if chunk.prefix is not None:
                assert chunk.prefix.tokens == chunk.start, "a prefix must end at the first chunk"
                caches = self._store.open(chunk.prefix, caches)
            self._sequences[chunk.sequence_id] = Seq(caches=caches, length=chunk.start)
        sequence = self._sequences[chunk.sequence_id]
        assert sequence.caches is not None
        assert sequence.sampling is None, "the prompt is complete already"
        assert sequence.length == chunk.start, "a chunk does not continue its sequence"
        sequence.length += len(chunk.tokens)
        assert sequence.length <= self._context_length, "a prompt outgrew the context"
        return True

    def _build_one(self, chunk: PrefillChunk) -> _Pass:
        sequence = self._sequences[chunk.sequence_id]
        assert sequence.caches is not None
        inputs = mx.array([chunk.tokens], dtype=mx.uint32)
        logits = self._head(self._model, inputs, sequence.caches)
        # A later chunk of the same step goes on with these very caches.
        kept = None if chunk.keep_as is None else copy_state(sequence.caches)
        # Without sampling the logits are never computed.
        built = self._with_draw([chunk], sequence.caches, logits)
        built.kept = kept
        return built

    def _build_many(self, chunks: list[PrefillChunk]) -> _Pass:
        """Whole prompts, padded on the left to the longest."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        width = max(lengths)
        padding = [width - length for length in lengths]
        rows = [(0,) * before + chunk.tokens for before, chunk in zip(padding, chunks, strict=True)]
        caches = [BatchKVCache(padding) for _ in self._make_caches()]
        logits = self._head(self._model, mx.array(rows, dtype=mx.uint32), caches)
        share_offsets(caches)
        return self._with_draw(chunks, caches, logits)

    def _with_draw(self, chunks: list[PrefillChunk], caches: Caches, logits: mx.array) -> _Pass:
        lengths = [self._sequences[chunk.sequence_id].length for chunk in chunks]
        settings = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
        if not settings:
            return _Pass(chunks=chunks, caches=caches, lengths=lengths)
        for chunk in chunks:
            sequence = self._sequences[chunk.sequence_id]
            sequence.sampling, sequence.generated = chunk.sampling, chunk.generated
            sequence.tokens = list(chunk.history)
        sampler = BatchSampler(
            settings,
            self._vocab_size,
            histories=[chunk.history for chunk in chunks],
            generated=[chunk.generated for chunk in chunks],
        )
        draw = sampler.draw(logits, lengths)
        drawn = checked(logits, draw.tokens)
        return _Pass(chunks=chunks, caches=caches, lengths=lengths, drawn=drawn, draw=draw)

    def finish(
        self,
        one: _Pass,
        tokens: dict[int, int],
        logprobs: dict[int, TokenLogprobs],
        failed: dict[int, str],
    ) -> None:
        """Evaluate a pass and hand out what it drew.  Raises Abandoned."""
        evaluate(one.caches, None, self._unwanted)
        mx.eval(one.outputs)
        if self._on_cpu and sum(len(chunk.tokens) for chunk in one.chunks) >= WORTH_TOKENS:
            return_freed_memory()
        if len(one.chunks) > 1:
            self._take_apart(one)
        first = one.chunks[0]
        if one.kept is not None and first.keep_as is not None:
            end = first.start + len(first.tokens)
            self._store.keep_snapshot(first.keep_as, one.kept, end)
        if one.drawn is None or one.draw is None:
            return
        extra = {} if one.draw.logprobs is None else one.draw.logprobs.values()
        for row, (chunk, token) in enumerate(zip(one.chunks, host_values(one.drawn), strict=True)):
            sid = chunk.sequence_id
            if token < 0:
                failed[sid] = NOT_FINITE
                del self._sequences[sid]
                continue
            sequence = self._sequences[sid]
            sequence.draw(token, None)
            sequence.waiting = None  # it is handed out here
            tokens[sid] = token
            if row in extra:
                logprobs[sid] = extra[row]

    def _take_apart(self, one: _Pass) -> None:
        """Give every prompt of a batch its own caches."""
        batch = DecodeBatch()
        batch.ids = [chunk.sequence_id for chunk in one.chunks]
        batch.lengths, batch.caches = one.lengths, one.caches
        for row in batch.take_out(batch.ids):
            self._sequences[row.sequence_id].caches = row.caches


def _groups(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Chunks that may share a pass: whole prompts of similar length; the others stay alone.

    The order of the plan decides the order of the passes (by their first chunk).
    """
    groups: list[list[PrefillChunk]] = []
    whole = [chunk for chunk in chunks if _is_whole(chunk)]
    for chunk in sorted(whole, key=lambda one: len(one.tokens), reverse=True):
        group = groups[-1] if groups else None
        if group is not None and _fits(group, chunk):
            group.append(chunk)
        else:
            groups.append([chunk])
    groups += [[chunk] for chunk in chunks if not _is_whole(chunk)]
    place = {id(chunk): number for number, chunk in enumerate(chunks)}
    for group in groups:
        group.sort(key=lambda one: place[id(one)])
    return sorted(groups, key=lambda group: place[id(group[0])])


def _is_whole(chunk: PrefillChunk) -> bool:
    return chunk.start == 0 and chunk.sampling is not None and chunk.keep_as is None


def _fits(group: list[PrefillChunk], chunk: PrefillChunk) -> bool:
    """``chunk`` is not longer than the first of ``group``."""
    width = len(group[0].tokens)
    real = sum(len(one.tokens) for one in group) + len(chunk.tokens)
    return real >= (1 - MAX_PADDING) * width * (len(group) + 1)
