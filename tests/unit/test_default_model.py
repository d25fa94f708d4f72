"""The embedded default model, for real: token ids and one greedy step."""

from __future__ import annotations

import mlx.core as mx
import pytest

from models.mlx.weights import LoadedModel, load_model
from models.source import resolve_source

pytestmark = [pytest.mark.mlx, pytest.mark.real_model]


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load_model(resolve_source(None), cpu_dtype="float32")


def test_token_ids_are_those_of_the_published_tokenizer(default: LoadedModel) -> None:
    text = default.text
    assert text.name == "SmolLM2-135M-Instruct"
    assert (text.vocab_size, text.context_length) == (49152, 8192)
    assert 2 in text.eos_ids
    assert text.encode("<|im_start|>user\n", add_special=True) == [1, 4093, 198]
    ids = text.encode("In 2024, 日本語 🙂 …", add_special=False)
    decoder = text.decoder()
    assert "".join(map(decoder.push, ids)) == "In 2024, 日本語 🙂 …"


def test_the_first_token_of_an_answer(default: LoadedModel) -> None:
    text = default.text
    prompt = text.render_chat(
        [{"role": "user", "content": "What is the capital of France?"}], kwargs={}
    )
    ids = text.encode(prompt, add_special=False)
    logits = default.model(mx.array([ids]))[0, -1]
    assert text.decoder().push(int(mx.argmax(logits))) == "The"
    assert default.notes["parameters"] == 134_515_008
