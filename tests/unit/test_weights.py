"""Loading weights: GGUF and folders give the same model; failures are one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.errors import ModelLoadError
from models.gguf_blocks import read_bytes, to_float32
from models.gguf_file import read_gguf
from models.mlx.weights import load_model
from models.source import ModelSource
from tests.unit.gguf_writer import Raw, encode, write_gguf
from tests.unit.tiny_llama import (
    HEAD_DIM,
    Weights,
    metadata,
    random_weights,
    tensors,
    write_tiny_folder,
    write_tiny_gguf,
)

pytestmark = pytest.mark.mlx

TOKENS = [0, 70, 71, 280, 5, 260, 33, 1]


def source(path: Path) -> ModelSource:
    kind: Any = "folder" if path.is_dir() else "gguf"
    return ModelSource(kind=kind, path=path, name="tiny", origin=str(path))


def logits(model: Any) -> NDArray[np.float32]:
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))


def stored(path: Path) -> Weights:
    """What a GGUF file's tensors really hold after rounding."""
    file = read_gguf(path)
    return {
        name: to_float32(read_bytes(path, info), info).copy() for name, info in file.tensors.items()
    }


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", ["float32", "keep"])
def test_gguf_equals_the_folder_with_the_same_weights(
    tmp_path: Path, type_name: str, dtype: Any
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", random_weights(), type_name)
    from_gguf = load_model(source(path), cpu_dtype=dtype)
    folder = write_tiny_folder(tmp_path / "folder", stored(path))
    from_folder = load_model(source(folder), cpu_dtype="float32")
    np.testing.assert_allclose(
        logits(from_gguf.model), logits(from_folder.model), rtol=2e-4, atol=2e-4
    )
    if dtype == "float32":
        np.testing.assert_array_equal(logits(from_gguf.model), logits(from_folder.model))
    quantised = dtype == "keep" and type_name.startswith("Q")
    assert from_gguf.notes["dtype"] == ("quantised" if quantised else "float32")
    assert ("quantization" in from_gguf.config) == quantised


def test_both_text_sides_agree(tmp_path: Path) -> None:
    weights = random_weights()
    one = load_model(source(write_tiny_gguf(tmp_path / "a.gguf", weights))).text
    two = load_model(source(write_tiny_folder(tmp_path / "folder", weights))).text
    messages = [{"role": "user", "content": "the capital of 日本"}]
    for text in (one, two):
        assert (text.name, text.vocab_size, text.context_length) == ("tiny", 320, 128)
        assert text.eos_ids == {1}
        assert text.has_chat_template
    prompt = one.render_chat(messages, kwargs={})
    assert prompt == two.render_chat(messages, kwargs={})
    assert one.encode(prompt, add_special=False) == two.encode(prompt, add_special=False)


def test_notes_state_the_choices(tmp_path: Path) -> None:
    notes = load_model(source(write_tiny_gguf(tmp_path / "a.gguf", random_weights(), "Q8_0"))).notes
    count = sum(values.size for values in random_weights().values())
    assert notes["parameters"] == count
    assert notes["weight_bytes"] == 4 * count
    assert notes["dtype"] == "float32"
    assert notes["stored_as"] == "GGUF Q8_0"


def test_mixed_types_keep_a_width_per_module(tmp_path: Path) -> None:
    weights = random_weights()
    mixed = tensors(weights, "Q4_1")
    mixed["token_embd.weight"] = encode(weights["token_embd.weight"], "Q8_0")
    mixed["blk.1.ffn_up.weight"] = encode(weights["blk.1.ffn_up.weight"], "F16")
    path = write_gguf(tmp_path / "a.gguf", metadata(), mixed)
    kept = load_model(source(path), cpu_dtype="keep")
    settings = kept.config["quantization"]
    assert settings["bits"] == 4
    assert settings["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    wide = load_model(source(path), cpu_dtype="float32")
    np.testing.assert_allclose(logits(kept.model), logits(wide.model), rtol=2e-4, atol=2e-4)


def test_auto_widens_only_when_memory_allows(tmp_path: Path) -> None:
    path = source(write_tiny_gguf(tmp_path / "a.gguf", random_weights(), "Q4_0"))
    assert load_model(path, memory=lambda: 1 << 40).notes["dtype"] == "float32"
    assert load_model(path, memory=lambda: None).notes["dtype"] == "float32"
    assert load_model(path, memory=lambda: 1000).notes["dtype"] == "quantised"


def test_an_untied_output_and_query_biases(tmp_path: Path) -> None:
    weights = random_weights()
    extra = {
        "output.weight": random_weights(5)["token_embd.weight"],
        **{
            f"blk.{layer}.attn_{part}.bias": np.full(size, 0.25, np.float32)
            for layer in range(2)
            for part, size in (("q", 64), ("k", 32), ("v", 32), ("output", 64))
        },
    }
    path = write_gguf(tmp_path / "a.gguf", metadata(), tensors({**weights, **extra}))
    loaded = load_model(source(path))
    assert not loaded.config["tie_word_embeddings"]
    assert loaded.config["attention_bias"]
    assert logits(loaded.model).shape == (1, len(TOKENS), 320)


def test_rope_factors_stretch_the_wavelengths(tmp_path: Path) -> None:
    weights = random_weights()
    plain = logits(load_model(source(write_tiny_gguf(tmp_path / "a.gguf", weights))).model)

    def with_factors(value: float) -> NDArray[np.float32]:
        factors = encode(np.full(HEAD_DIM // 2, value, np.float32), "F32")
        entries = {**tensors(weights), "rope_freqs.weight": factors}
        return logits(
            load_model(source(write_gguf(tmp_path / "b.gguf", metadata(), entries))).model
        )

    np.testing.assert_allclose(with_factors(1.0), plain, rtol=1e-4, atol=1e-4)
    # A common factor on all wavelengths is linear scaling of the positions.
    linear = write_tiny_gguf(
        tmp_path / "c.gguf",
        weights,
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=2.0,
    )
    stretched = with_factors(2.0)
    np.testing.assert_allclose(
        stretched, logits(load_model(source(linear)).model), rtol=1e-3, atol=1e-3
    )
    assert np.abs(stretched - plain).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma3"}, "architecture 'gemma3'"),
        ({"general__architecture": None}, "architecture 'unknown'"),
        ({"llama__block_count": None}, r"lacks the metadata llama\.block_count"),
        ({"llama__block_count": 3}, "lacks the weights"),
        ({"llama__block_count": 1}, "does not belong"),
        ({"llama__attention__head_count": "x"}, "head_count is not a positive number"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__dimension_count": 8}, "8 of 16 dimensions"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn' is not supported"),
        ({"llama__feed_forward_length": 64}, "does not belong"),
        ({"tokenizer__ggml__tokens": None}, "no vocabulary"),
        ({"tokenizer__chat_template": "{% if %}"}, "chat template is not valid"),
    ],
)
def test_gguf_files_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", random_weights(), **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(source(path))
    assert "\n" not in str(caught.value)


def test_unknown_and_truncated_tensors(tmp_path: Path) -> None:
    entries = {**tensors(random_weights()), "blk.0.odd.weight": Raw(0, (1,), bytes(4))}
    path = write_gguf(tmp_path / "a.gguf", metadata(), entries)
    with pytest.raises(ModelLoadError, match=r"unknown tensor blk\.0\.odd\.weight"):
        load_model(source(path))
    path = write_tiny_gguf(tmp_path / "b.gguf", random_weights())
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelLoadError, match="is truncated"):
        load_model(source(path))


def quantised_folder(path: Path) -> Path:
    """An MLX checkpoint: 4 bits, groups of 32, bfloat16 scales."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    plain = load_model(source(write_tiny_folder(path, random_weights())), cpu_dtype="keep")
    plain.model.set_dtype(mx.bfloat16)
    nn.quantize(plain.model, group_size=32, bits=4)
    weights = dict(tree_flatten(plain.model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_quantised_folder_is_kept_or_widened(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path / "folder")
    kept = load_model(source(folder), cpu_dtype="keep")
    wide = load_model(source(folder), cpu_dtype="float32")
    assert kept.notes["dtype"] == "quantised"
    assert wide.notes["dtype"] == "float32"
    assert wide.notes["stored_as"] == "4 bits, groups of 32"
    assert wide.notes["weight_bytes"] == 4 * int(wide.notes["parameters"] or 0)
    packed = kept.model.layers[1].mlp.up_proj
    expected = mx.dequantize(
        packed.weight,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        group_size=32,
        bits=4,
    )
    widened = wide.model.layers[1].mlp.up_proj.weight
    np.testing.assert_array_equal(np.array(widened), np.array(expected))
    assert logits(wide.model).shape == (1, len(TOKENS), 320)


def test_folders_that_cannot_be_served(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", random_weights())

    def expect(message: str) -> None:
        with pytest.raises(ModelLoadError, match=message) as caught:
            load_model(source(folder))
        assert "\n" not in str(caught.value)

    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-500])
    expect("model.safetensors is truncated")
    for damaged in (b"", b"x" * 100, whole[:8] + b"?" * 200):
        weights.write_bytes(damaged)
        expect("model.safetensors is not a valid safetensors file")
    weights.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    expect("lacks model-00001-of-00002.safetensors")
    index.unlink()
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"model_type": "not_a_model"}, "architecture 'not_a_model'"),
        ({"model_type": None}, "has no model_type"),
        ({"hidden_size": 32}, "cannot be loaded"),
        ({"hidden_size": None}, "cannot be loaded"),
        ({"num_hidden_layers": 3}, "cannot be loaded"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        expect(message)
    (folder / "config.json").write_text("{")
    expect("config.json is not valid JSON")
    weights.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    expect(r"no model\*\.safetensors")


def test_loading_leaves_the_limit_of_open_files_alone(tmp_path: Path) -> None:
    import resource
    import subprocess
    import sys

    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from models.mlx.lm import mlx_lm_utils; mlx_lm_utils()\n"
        "print(before == resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit.__name__)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.split() == ["True", resource.setrlimit.__name__]
