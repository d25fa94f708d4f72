"""An engine without a model: deterministic tokens, virtual step costs, planned faults.

It checks every plan strictly, so that a wrong plan fails the test that made it.  It needs no
thread, so it runs under trio's mock clock.  The matching text model is in ``models.scripted_text``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import trio

from models.engine import (
    EngineDead,
    EngineError,
    EngineInfo,
    PrefillChunk,
    PrefixData,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from models.sampling import GREEDY, SamplingParams
from models.scripted_cache import KeptCaches, unobserved
from models.scripted_text import EOS_ID, VOCAB_SIZE, ids_to_text

#: What a scripted text is made of; some characters take several bytes, so tokens split them.
ALPHABET = "etaoin shrdlu cmfwyp.\n" + "é漢🙂"

Tokens = Sequence[int]
Scripts = Mapping[str, str | Tokens] | Callable[[tuple[int, ...], SamplingParams], Tokens | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Virtual seconds: ``base_s`` per step that computes anything, plus rows and prompt tokens."""

    base_s: float = 0.004
    decode_row_s: float = 0.001
    prefill_token_s: float = 0.0001

    def decode_s(self, plan: StepPlan) -> float:
        if not plan.decode:
            return 0.0
        return self.base_s + self.decode_row_s * len(plan.decode)

    def prefill_s(self, plan: StepPlan) -> float:
        tokens = sum(len(chunk.tokens) for chunk in plan.prefill)
        if not tokens:
            return 0.0
        return self.prefill_token_s * tokens + (0.0 if plan.decode else self.base_s)


@dataclass(slots=True, kw_only=True)
class EngineFaults:
    """What goes wrong in which step (by ``StepPlan.step``).  May be changed while the engine runs.

    ``slow`` adds virtual seconds; ``failing`` raises EngineError at the end of the step; ``dead``
    raises EngineDead then and for ever; ``hanging`` never ends.  ``failing_rows`` lose the n-th
    sequence of the step (decode rows first, then finished prompts, modulo their number).
    """

    slow: dict[int, float] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    dead: int | None = None
    hanging: int | None = None
    failing_rows: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    tokens: list[int] = field(default_factory=list)  # what its cache holds
    sampling: SamplingParams = GREEDY
    script: Tokens = ()
    position: int | None = None  # of the next token; None while prefilling
    latest: int = -1  # the token drawn last, the input of the next decode
    lost: bool = False  # it was in a step that was given up


def default_script(
    prompt_ids: tuple[int, ...], sampling: SamplingParams, max_length: int
) -> list[int]:
    """Up to ``max_length`` bytes of text: a function of the prompt and, if it samples, the seed."""
    seed = 0 if sampling.greedy else sampling.seed
    rng = Random(f"{seed}:{','.join(map(str, prompt_ids))}")
    length = rng.randint(1, max_length)
    text = "".join(rng.choice(ALPHABET) for _ in range(length))
    while len(text.encode()) > max_length and len(text) > 1:
        text = text[:-1]
    return list(text.encode())


class ScriptedEngine:
    """``script_for`` tells what it will draw for a prompt, so tests know the expected text.

    ``scripts``: a mapping from a piece of the prompt's text to what is drawn for it (text, or token
    ids; the first piece contained in the prompt wins), or a function of (prompt ids, sampling).
    Whatever it does not cover gets ``default_script``.  After a script's end comes EOS for ever.
    What is drawn depends on the prompt, the sampling and the position alone, so a sequence that is
    computed anew goes on with its script.

    ``observe`` is told what happens to kept caches: ("kept", handle, tokens), ("forgot", handle),
    ("opened", sequence id, handles, tokens).
    """

    def __init__(
        self,
        *,
        info: EngineInfo | None = None,
        cost: StepCost | None = None,
        faults: EngineFaults | None = None,
        scripts: Scripts | None = None,
        max_length: int = 40,
        observe: Callable[..., None] = unobserved,
    ) -> None:
        self._info = info or EngineInfo(
            model_type="scripted",
            vocab_size=VOCAB_SIZE,
            context_length=8192,
            kv_bytes_per_token=1024,
        )
        self._cost = cost or StepCost()
        self._scripts = scripts if scripts is not None else {}
        self._max_length = max_length
        self._rows: dict[int, _Row] = {}
        self._observe = observe
        self._caches = KeptCaches(observe)
        self._in_flight: tuple[StepPlan, float] | None = None
        self._abandoned = False
        self._dead = False
        self.faults = faults or EngineFaults()
        self.last_step = 0
        self.resets = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return not self._dead

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids that the engine holds a cache for."""
        return tuple(self._rows)

    @property
    def kept(self) -> tuple[int, ...]:
        """Handles under which something is kept."""
        return self._caches.handles

    def held(self, sequence_id: int) -> int:
        """Tokens that the cache of this sequence holds; 0 if there is none."""
        row = self._rows.get(sequence_id)
        return 0 if row is None else len(row.tokens)

    def script_for(self, prompt_ids: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Tokens:
        """The tokens drawn for this prompt, without the EOS that follows them."""
        found: str | Tokens | None
        if callable(self._scripts):
            found = self._scripts(prompt_ids, sampling)
        else:
            text = ids_to_text(prompt_ids)
            found = next((out for key, out in self._scripts.items() if key in text), None)
        if found is None:
            return default_script(prompt_ids, sampling, self._max_length)
        return list(found.encode()) if isinstance(found, str) else found

    def start_step(self, plan: StepPlan) -> None:
        assert self._in_flight is None, "a step is in flight"
        assert plan.step > self.last_step, (plan.step, self.last_step)
        self.last_step = plan.step
        self._check(plan)
        cost_s = self._cost.decode_s(plan) + self._cost.prefill_s(plan)
        ends_s = trio.current_time() + cost_s + self.faults.slow.get(plan.step, 0.0)
        self._in_flight = (plan, ends_s)

    def _check(self, plan: StepPlan) -> None:
        work = (plan.forget, plan.load, plan.keep, plan.drop, plan.decode, plan.prefill)
        assert any(work), "an empty step"
        assert len(set(plan.drop)) == len(plan.drop), plan.drop
        assert set(plan.drop) <= set(self._rows), (plan.drop, self.sequences)
        chunks = [chunk.sequence_id for chunk in plan.prefill]
        ids = [*plan.drop, *plan.decode, *chunks]
        assert len(set(ids)) == len(ids), f"a sequence is twice in step {plan.step}: {ids}"
        self._caches.check(plan)
        for block in plan.keep:
            kept = self._rows[block.sequence_id]
            assert self._info.prefix == "blocks", "this model keeps no blocks"
            assert not kept.lost, "its cache is half computed"
            assert 0 <= block.start < block.end <= len(kept.tokens), block
        for sid in plan.decode:
            row = self._rows[sid]
            assert row.position is not None, f"{sid} decodes before its prompt ended"
            assert not row.lost, f"{sid} was in a step that was given up"
        if self._info.max_batch is not None:
            assert len(plan.decode) <= self._info.max_batch
        for chunk in plan.prefill:
            self._check_chunk(chunk)
        drawing = {c.sequence_id for c in plan.prefill if c.sampling is not None}
        assert set(plan.force) <= drawing | set(plan.decode), plan.force

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        row = self._rows.get(chunk.sequence_id)
        assert chunk.tokens
        if row is None:
            assert chunk.start == (0 if chunk.prefix is None else chunk.prefix.tokens), chunk
        else:
            assert chunk.prefix is None, "it was opened before"
            assert chunk.start == len(row.tokens), chunk
            assert row.position is None, "a prompt goes on after its end"
            assert not row.lost, "it was in a step that was given up"
        end = chunk.start + len(chunk.tokens)
        assert 0 <= chunk.generated < end, chunk
        if chunk.sampling is None:
            assert chunk.generated == len(chunk.history) == 0, chunk
        else:
            assert len(chunk.history) == (end if chunk.sampling.reads_history else 0), chunk

    def abandon_step(self) -> None:
        """The scripted step ends now."""
        assert self._in_flight is not None, "no step is in flight"
        self._in_flight = (self._in_flight[0], trio.current_time())
        self._abandoned = True

    async def wait_step(self) -> StepResult:
        assert self._in_flight is not None, "no step is in flight"
        plan, ends_s = self._in_flight
        if plan.step == self.faults.hanging:
            await trio.sleep_forever()
        await trio.sleep_until(ends_s)
        self._in_flight = None
        abandoned, self._abandoned = self._abandoned, False
        if self._dead or (self.faults.dead is not None and plan.step >= self.faults.dead):
            self._dead = True
            raise EngineDead(f"scripted death in step {plan.step}")
        if plan.step in self.faults.failing:
            raise EngineError(f"scripted failure of step {plan.step}")
        if abandoned:
            return self._give_up(plan)
        return self._run(plan)

    def _give_up(self, plan: StepPlan) -> StepResult:
        """Nothing is drawn and no snapshot taken; the rows wait for being dropped."""
        exported = self._change_caches(plan)
        for chunk in plan.prefill:
            self._rows.setdefault(chunk.sequence_id, _Row()).lost = True
        for sid in plan.decode:
            self._rows[sid].lost = True
        return StepResult(step=plan.step, tokens={}, abandoned=True, exported=exported)

    def _change_caches(self, plan: StepPlan) -> tuple[PrefixData, ...]:
        """What comes first in a step: forget, load, keep, drop."""
        rows = {sid: row.tokens for sid, row in self._rows.items()}
        exported = self._caches.apply(plan, rows)
        for sid in plan.drop:
            del self._rows[sid]
        return exported

    def _run(self, plan: StepPlan) -> StepResult:
        exported = self._change_caches(plan)
        drawing = list(plan.decode)
        for sid in plan.decode:
            self._rows[sid].tokens.append(self._rows[sid].latest)
        for chunk in plan.prefill:
            self._prefill(chunk)
            if chunk.sampling is not None:
                drawing.append(chunk.sequence_id)
        failed: dict[int, str] = {}
        if plan.step in self.faults.failing_rows and drawing:
            lost = drawing.pop(self.faults.failing_rows[plan.step] % len(drawing))
            del self._rows[lost]
            failed[lost] = "scripted failure of one row"
        logprobs = {sid: self._logprobs(self._rows[sid], plan.force.get(sid)) for sid in drawing}
        return StepResult(
            step=plan.step,
            tokens={sid: self._draw(self._rows[sid], plan.force.get(sid)) for sid in drawing},
            logprobs={sid: found for sid, found in logprobs.items() if found is not None},
            failed=failed,
            exported=exported,
            decode_s=self._cost.decode_s(plan),
            prefill_s=self._cost.prefill_s(plan),
        )

    def _prefill(self, chunk: PrefillChunk) -> None:
        row = self._rows.get(chunk.sequence_id)
        if row is None:
            row = self._rows[chunk.sequence_id] = _Row()
            if chunk.prefix is not None:
                row.tokens += self._caches.open(chunk.prefix)
                opened = tuple(row.tokens)
                self._observe("opened", chunk.sequence_id, chunk.prefix.handles, opened)
        row.tokens += chunk.tokens
        if chunk.keep_as is not None:
            self._caches.snapshot(chunk.keep_as, row.tokens)
        if chunk.sampling is not None:
            assert not chunk.history or list(chunk.history) == row.tokens, chunk
            prompt = tuple(row.tokens[: len(row.tokens) - chunk.generated])
            row.sampling = chunk.sampling
            row.script = self.script_for(prompt, chunk.sampling)
            row.position = chunk.generated

    def _next(self, row: _Row, forced: int | None) -> int:
        assert row.position is not None
        if forced is not None:
            return forced
        return row.script[row.position] if row.position < len(row.script) else EOS_ID

    def _draw(self, row: _Row, forced: int | None) -> int:
        row.latest = self._next(row, forced)
        assert row.position is not None
        row.position += 1
        return row.latest

    def _logprobs(self, row: _Row, forced: int | None) -> TokenLogprobs | None:
        """The drawn token is always the likeliest; each further one has half of its chance."""
        count = row.sampling.logprobs
        if count is None:
            return None
        token_id = self._next(row, forced)
        drawn = -0.7 - 0.1 * ((row.position or 0) % 5)
        size = self._info.vocab_size
        top = ((token_id + place) % size for place in range(min(count, size)))
        return TokenLogprobs(
            logprob=drawn, top=tuple((one, drawn - 0.7 * place) for place, one in enumerate(top))
        )

    async def reset(self) -> None:
        if self._dead:
            await trio.lowlevel.checkpoint()
            raise EngineDead("the scripted engine is dead")
        if self._in_flight is not None:
            plan, ends_s = self._in_flight
            if plan.step == self.faults.hanging:
                await trio.sleep_forever()
            await trio.sleep_until(ends_s)
            self._in_flight = None
        await trio.lowlevel.checkpoint()
        self._rows.clear()
        self._caches = KeptCaches(self._observe)
        self.resets += 1
