"""An engine without a model: deterministic tokens, virtual step costs, planned faults.

It checks every plan strictly, so that a wrong plan fails the test that made it.  It needs no
thread, so it runs under trio's mock clock.  The matching text model is in ``models.scripted_text``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import trio

from models.engine import EngineDead, EngineError, EngineInfo, StepPlan, StepResult
from models.sampling import GREEDY, SamplingParams
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
    prompt: tuple[int, ...] = ()
    sampling: SamplingParams = GREEDY
    script: Tokens = ()
    position: int | None = None  # of the next token; None while prefilling


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
    """

    def __init__(
        self,
        *,
        info: EngineInfo | None = None,
        cost: StepCost | None = None,
        faults: EngineFaults | None = None,
        scripts: Scripts | None = None,
        max_length: int = 40,
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
        assert plan.drop or plan.decode or plan.prefill, "an empty step"
        assert len(set(plan.drop)) == len(plan.drop), plan.drop
        assert set(plan.drop) <= set(self._rows), (plan.drop, self.sequences)
        chunks = [chunk.sequence_id for chunk in plan.prefill]
        ids = [*plan.drop, *plan.decode, *chunks]
        assert len(set(ids)) == len(ids), f"a sequence is twice in step {plan.step}: {ids}"
        for sid in plan.decode:
            assert self._rows[sid].position is not None, f"{sid} decodes before its prompt ended"
        if self._info.max_batch is not None:
            assert len(plan.decode) <= self._info.max_batch
        for chunk in plan.prefill:
            row = self._rows.get(chunk.sequence_id)
            assert chunk.tokens
            assert chunk.start == (0 if row is None else len(row.prompt)), chunk
            assert row is None or row.position is None, "a prompt goes on after its end"

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
        """Nothing is drawn; the rows wait for being dropped."""
        for sid in plan.drop:
            del self._rows[sid]
        for chunk in plan.prefill:
            self._rows.setdefault(chunk.sequence_id, _Row())
        return StepResult(step=plan.step, tokens={}, abandoned=True)

    def _run(self, plan: StepPlan) -> StepResult:
        for sid in plan.drop:
            del self._rows[sid]
        drawing = list(plan.decode)
        for chunk in plan.prefill:
            row = self._rows.setdefault(chunk.sequence_id, _Row())
            row.prompt += chunk.tokens
            if chunk.sampling is not None:
                row.sampling = chunk.sampling
                row.script = self.script_for(row.prompt, chunk.sampling)
                row.position = 0
                drawing.append(chunk.sequence_id)
        failed: dict[int, str] = {}
        if plan.step in self.faults.failing_rows and drawing:
            lost = drawing.pop(self.faults.failing_rows[plan.step] % len(drawing))
            del self._rows[lost]
            failed[lost] = "scripted failure of one row"
        return StepResult(
            step=plan.step,
            tokens={sid: self._draw(self._rows[sid]) for sid in drawing},
            failed=failed,
            decode_s=self._cost.decode_s(plan),
            prefill_s=self._cost.prefill_s(plan),
        )

    def _draw(self, row: _Row) -> int:
        assert row.position is not None
        position = row.position
        row.position += 1
        return row.script[position] if position < len(row.script) else EOS_ID

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
        self.resets += 1
