"""One random llama (2 layers, width 64) as a GGUF file and as a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.gguf_writer import Raw, encode, write_gguf
from tests.unit.tokenizers_for_tests import byte_level

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 64, 2, 4, 2, 96, 320
HEAD_DIM = HIDDEN // HEADS
TEMPLATE = "{% for m in messages %}<|bos|>{{ m.content }}<|im_end|>{% endfor %}"

Weights = dict[str, NDArray[np.float32]]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_traditional": True,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

_NAMES = {
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}


def random_weights(seed: int = 0) -> Weights:
    """GGUF name -> values."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes.update({f"blk.{layer}.{name}": shape for name, (_, shape) in _NAMES.items()})
    return {
        f"{name}.weight": (
            rng.normal(size=shape).astype(np.float32) * (0.5 if len(shape) > 1 else 0.1)
            + (0.0 if len(shape) > 1 else 1.0)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def metadata() -> dict[str, Any]:
    vocab = byte_level().get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(byte_level().to_str())["model"]["merges"]
    types = [3 if i < 2 else 4 if token == "<tool_call>" else 1 for i, token in enumerate(tokens)]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 128,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors(weights: Weights, type_name: str = "F32") -> dict[str, Raw]:
    """Matrices in ``type_name``, vectors in F32, as real files have it."""
    return {
        name: encode(values, type_name if values.ndim > 1 else "F32")
        for name, values in weights.items()
    }


def write_tiny_gguf(path: Path, weights: Weights, type_name: str = "F32", **changes: Any) -> Path:
    """``changes`` replace metadata (``__`` stands for the dot); None removes an entry."""
    entries = metadata()
    for name, value in changes.items():
        entries[name.replace("__", ".")] = value
    kept = {name: value for name, value in entries.items() if value is not None}
    return write_gguf(path, kept, tensors(weights, type_name))


def write_tiny_folder(folder: Path, weights: Weights, **config: Any) -> Path:
    import mlx.core as mx

    folder.mkdir(exist_ok=True)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    arrays: dict[str, mx.array] = {}
    for name, values in weights.items():
        parts = name.split(".")
        module = (
            names[parts[0]]
            if parts[0] != "blk"
            else f"model.layers.{parts[1]}.{_NAMES[parts[2]][0]}"
        )
        arrays[f"{module}.weight"] = mx.array(values)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text(byte_level().to_str())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return folder
