"""The whole engine: a tiny model on the compute thread, driven from trio."""

from __future__ import annotations

import json

import pytest
import trio
from tokenizers import Tokenizer

from models.compute_thread import ComputeThread
from models.engine import EngineDead, EngineError, PrefillChunk, StepPlan
from models.mlx.backend import MLXBackend
from models.sampling import GREEDY
from models.threaded_engine import ThreadedEngine
from tests.engine.tiny import load, make_backend, model_path, prompt_of, solo_tokens
from tools.tiny_model import END_ID, START_ID, VOCAB_SIZE, build_tiny_model

pytestmark = pytest.mark.mlx


def build() -> MLXBackend:
    return make_backend(load("plain"))


async def test_a_model_lives_on_the_compute_thread() -> None:
    thread = ComputeThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        engine = await ThreadedEngine.load(thread, build)
        prompt = prompt_of(1, 12)
        chunk = PrefillChunk(sequence_id=1, tokens=prompt, start=0, sampling=GREEDY)
        engine.start_step(StepPlan(step=0, prefill=(chunk,)))
        tokens = [(await engine.wait_step()).tokens[1]]
        for step in range(1, 10):
            engine.start_step(StepPlan(step=step, decode=(1,)))
            tokens.append((await engine.wait_step()).tokens[1])
        assert tokens == await thread.run_job(lambda: solo_tokens(load("plain"), prompt, 10))
        await engine.close()
        nursery.cancel_scope.cancel()


async def test_an_exception_in_a_step_and_the_reset_after_it() -> None:
    thread = ComputeThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        engine = await ThreadedEngine.load(thread, build)
        chunk = PrefillChunk(sequence_id=1, tokens=(1, 2, 3), start=0, sampling=GREEDY)
        engine.start_step(StepPlan(step=0, prefill=(chunk,)))
        first = (await engine.wait_step()).tokens
        engine.start_step(StepPlan(step=1, decode=(1, 42)))
        with pytest.raises(EngineError) as caught:
            await engine.wait_step()
        assert not isinstance(caught.value, EngineDead)
        assert isinstance(caught.value.__cause__, KeyError)
        await engine.reset()
        engine.start_step(StepPlan(step=2, prefill=(chunk,)))
        assert (await engine.wait_step()).tokens == first
        nursery.cancel_scope.cancel()


async def test_a_wait_cancelled_as_the_step_ends_can_be_repeated() -> None:
    thread = ComputeThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        engine = await ThreadedEngine.load(thread, build)
        chunk = PrefillChunk(sequence_id=1, tokens=(1, 2, 3), start=0, sampling=GREEDY)
        engine.start_step(StepPlan(step=0, prefill=(chunk,)))
        await thread.run_job(lambda: None)  # queued behind the step, which has ended now
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.wait_step()
        assert scope.cancelled_caught
        assert list((await engine.wait_step()).tokens) == [1]
        engine.start_step(StepPlan(step=1, decode=(1,)))
        assert list((await engine.wait_step()).tokens) == [1]
        nursery.cancel_scope.cancel()


def test_tiny_models_are_the_same_every_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    again = build_tiny_model(tmp_path_factory.mktemp("again"), layers=2)
    other = build_tiny_model(tmp_path_factory.mktemp("other"), layers=2, seed=1)
    for file in model_path("plain").iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    weights = "model.safetensors"
    assert (again / weights).read_bytes() != (other / weights).read_bytes()
    with pytest.raises(ValueError, match="variant"):
        build_tiny_model(tmp_path_factory.mktemp("none"), variant="cubic")


def test_tokens_of_a_tiny_model() -> None:
    """Every token id is a token, any text survives, and greedy output is not monotonous."""
    folder = model_path("plain")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "<|im_start|>user\nthe naïve 東京 😀\n<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids[0] == START_ID
    assert ids[-1] == END_ID
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(" the other one").ids) < len(" the other one")
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == END_ID
    tokens = solo_tokens(load("plain"), ids, 100)
    assert END_ID not in tokens
    assert len(set(tokens)) > 30
