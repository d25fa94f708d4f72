from __future__ import annotations

import pytest
import trio

from models.engine import EngineDead, EngineError, PrefillChunk, StepPlan
from models.sampling import GREEDY, SamplingParams
from models.scripted import EngineFaults, ScriptedEngine, StepCost
from models.scripted_text import (
    EOS_ID,
    TEMPLATE_ERROR_TRIGGER,
    ScriptedTextModel,
    ids_to_text,
    text_to_ids,
)
from models.text_model import TemplateError

PROMPT = tuple(b"hi")


def prefill(sid: int = 1, step: int = 1) -> StepPlan:
    return StepPlan(
        step=step,
        prefill=(PrefillChunk(sequence_id=sid, tokens=PROMPT, start=0, sampling=GREEDY),),
    )


def test_the_script_depends_on_the_prompt_and_on_the_seed_if_it_samples() -> None:
    engine = ScriptedEngine()
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert engine.script_for(PROMPT, one) == ScriptedEngine().script_for(PROMPT, one)
    assert engine.script_for(PROMPT, one) != engine.script_for(PROMPT, two)
    assert engine.script_for(PROMPT, one) != engine.script_for((*PROMPT, 1), one)
    assert engine.script_for(PROMPT) == engine.script_for(PROMPT, SamplingParams(temperature=0.0))
    text = ids_to_text(engine.script_for(PROMPT, one))
    assert "\ufffd" not in text


async def test_a_step_takes_its_virtual_cost(autojump_clock: trio.testing.MockClock) -> None:
    cost = StepCost(base_s=1.0, decode_row_s=0.5, prefill_token_s=0.25)
    engine = ScriptedEngine(scripts={"hi": "ab"}, cost=cost)
    engine.start_step(prefill())
    result = await engine.wait_step()
    assert (trio.current_time(), result.prefill_s, result.decode_s) == (1.5, 1.5, 0.0)
    drawn = [result.tokens[1]]
    for step in (2, 3):
        engine.start_step(StepPlan(step=step, decode=(1,)))
        drawn.append((await engine.wait_step()).tokens[1])
    assert trio.current_time() == 4.5
    assert drawn == [*b"ab", EOS_ID]


async def test_planned_faults(autojump_clock: trio.testing.MockClock) -> None:
    faults = EngineFaults(slow={1: 5.0}, failing={2}, dead=4, failing_rows={1: 0})
    engine = ScriptedEngine(faults=faults, cost=StepCost(base_s=1.0, prefill_token_s=0.0))
    engine.start_step(prefill())
    result = await engine.wait_step()
    assert trio.current_time() == 6.0
    assert (dict(result.tokens), list(result.failed), engine.sequences) == ({}, [1], ())
    engine.start_step(prefill(step=2))
    with pytest.raises(EngineError):
        await engine.wait_step()
    await engine.reset()
    engine.start_step(prefill(step=4))
    with pytest.raises(EngineDead):
        await engine.wait_step()
    assert not engine.alive
    with pytest.raises(EngineDead):
        await engine.reset()


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(step=2),
        StepPlan(step=1, decode=(1,)),
        StepPlan(step=2, decode=(1, 1)),
        StepPlan(step=2, decode=(1,), drop=(1,)),
        StepPlan(step=2, drop=(7,)),
        prefill(step=2),
        StepPlan(step=2, prefill=(PrefillChunk(sequence_id=2, tokens=(1,), start=4),)),
    ],
)
async def test_a_wrong_plan_is_refused(
    plan: StepPlan, autojump_clock: trio.testing.MockClock
) -> None:
    engine = ScriptedEngine()
    engine.start_step(prefill())
    await engine.wait_step()
    with pytest.raises(AssertionError):
        engine.start_step(plan)


def test_the_text_model_round_trips_and_splits_characters() -> None:
    text = ScriptedTextModel()
    assert ids_to_text(text.encode("<|im_start|>é", add_special=False)) == "<|im_start|>é"
    assert text.encode("a", add_special=True) == [256, 97]
    decoder = text.decoder()
    assert [decoder.push(byte) for byte in text_to_ids("é<|eos|>")] == ["", "é", ""]
    decoder.push(0xC3)
    assert decoder.flush() == ""


def test_the_chat_template_and_its_errors() -> None:
    text = ScriptedTextModel()
    rendered = text.render_chat([{"role": "user", "content": "hi"}], kwargs={})
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for bad in ({"role": "wizard"}, {"role": "user", "content": TEMPLATE_ERROR_TRIGGER}):
        with pytest.raises(TemplateError):
            text.render_chat([bad], kwargs={})
