"""Llama-architecture GGUF files as mlx-lm models.

MLX's own GGUF reader is not used: it opens the file for writing (so a read-only model file cannot
be loaded), knows fewer types, and gives wrong values for Q4_K.  The tensors are read by
:mod:`models.gguf_blocks` instead.

Llama files store the rows of the query and key projections for interleaved rotary embeddings, hence
``rope_traditional``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from models.chat_template import ChatTemplate, parse_templates
from models.errors import ModelLoadError
from models.gguf_blocks import is_affine, pack, read_bytes, to_affine, to_float32
from models.gguf_file import GGUFFile, TensorInfo
from models.gguf_tokenizer import gguf_tokenizer
from models.text import HFTextModel

ARCHITECTURE: Final = "llama"
GROUP_SIZE: Final = 32

_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS: Final = "rope_freqs.weight"


class FactorRoPE(nn.Module):  # type: ignore[misc]
    """Rotary embedding whose wavelengths are stretched by a factor per pair of dimensions."""

    def __init__(self, dims: int, base: float, factors: mx.array) -> None:
        super().__init__()
        self.dims = dims
        # The underscore keeps the array out of the model's parameters.
        self._freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) * factors

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=True, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The configuration in the terms of mlx-lm.  Raises ModelLoadError."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelLoadError(
            f"{file.path} has the architecture {architecture or 'unknown'!r}; "
            "of GGUF files only 'llama' is supported"
        )
    heads = _required(file, "attention.head_count")
    hidden = _required(file, "embedding_length")
    if hidden % heads:
        raise ModelLoadError(f"{file.path}: {hidden} dimensions cannot be split into {heads} heads")
    if metadata.get("llama.expert_count", 0):
        raise ModelLoadError(f"{file.path} is a mixture of experts, which is not supported as GGUF")
    head_dim = _optional(file, "attention.key_length") or hidden // heads
    rotated = _optional(file, "rope.dimension_count") or head_dim
    if rotated != head_dim:
        raise ModelLoadError(
            f"{file.path}: rotary embedding over {rotated} of {head_dim} dimensions "
            "is not supported"
        )
    embedding = _tensor(file, "token_embd.weight")
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _required(file, "block_count"),
        "intermediate_size": _required(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _optional(file, "attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _required(file, "context_length"),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file),
        "rope_traditional": True,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def gguf_text(file: GGUFFile, config: Mapping[str, Any], *, name: str) -> HFTextModel:
    """Tokenizer and chat template of the file.  Raises ModelLoadError."""
    tokenizer = gguf_tokenizer(file.metadata)
    if tokenizer.vocab_size > config["vocab_size"]:
        raise ModelLoadError(
            f"{file.path}: the vocabulary has {tokenizer.vocab_size} tokens, "
            f"the model {config['vocab_size']}"
        )
    templates = parse_templates(file.metadata.get("tokenizer.chat_template"))
    prefix = "tokenizer.chat_template."
    for key, source in file.metadata.items():
        if key.startswith(prefix) and isinstance(source, str):
            templates[key.removeprefix(prefix)] = source
    return HFTextModel(
        name=name,
        tokenizer=tokenizer,
        template=(
            ChatTemplate(templates, variables=tokenizer.special.variables) if templates else None
        ),
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
    )


def gguf_model(file: GGUFFile, config: dict[str, Any], *, dequantize: bool) -> nn.Module:
    """The network with its weights, evaluated.

    With ``dequantize`` all weights are float32.  Otherwise affine types stay quantised, with
    float32 scales, and other weights become float32; ``config`` gets a "quantization" entry.
    """
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs.from_dict(config))
    shapes = {path: tuple(array.shape) for path, array in _parameters(model)}
    weights: dict[str, mx.array] = {}
    quantized: dict[str, int] = {}  # module path -> bits
    scratch = np.empty(max(math.prod(info.shape) for info in file.tensors.values()), np.float32)
    for info, path in _renamed(file):
        if path not in shapes or shapes[path] != info.shape:
            raise ModelLoadError(
                f"{file.path}: tensor {info.name} of shape {list(info.shape)} does not belong to "
                f"the model that the metadata describes"
            )
        data = read_bytes(file.path, info)
        keep = not dequantize and info.type_name != "Q6_K" and len(info.shape) == 2
        if keep and is_affine(info.type_name):
            module = path.removesuffix(".weight")
            affine = to_affine(data, info.type_name)
            rows = info.shape[0]
            weights[path] = mx.array(pack(affine).reshape(rows, -1))
            weights[f"{module}.scales"] = mx.array(affine.scale.reshape(rows, -1))
            weights[f"{module}.biases"] = mx.array(affine.bias.reshape(rows, -1))
            quantized[module] = affine.bits
        else:
            weights[path] = mx.array(to_float32(data, info, scratch))
    _check_complete(file, shapes, weights)
    if quantized:
        _quantize(model, config, quantized)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    _apply_rope_factors(model, file, config)
    mx.eval(model.parameters())
    return model


def _parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))


def _renamed(file: GGUFFile) -> Iterator[tuple[TensorInfo, str]]:
    """Every tensor of the network with its parameter path; unknown ones are refused."""
    for name, info in file.tensors.items():
        if name == _ROPE_FREQS:
            continue
        parts = name.split(".")
        path: str | None = None
        if len(parts) == 2 and parts[0] in _TOP:
            path = f"{_TOP[parts[0]]}.{parts[1]}"
        elif len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
            path = f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
        if path is None:
            raise ModelLoadError(f"{file.path}: unknown tensor {name} in a llama model")
        yield info, path


def _check_complete(
    file: GGUFFile, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, mx.array]
) -> None:
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{file.path} lacks the weights {missing[0]}{more}")


def _quantize(model: nn.Module, config: dict[str, Any], quantized: Mapping[str, int]) -> None:
    widths = sorted(quantized.values())
    usual = max(set(widths), key=widths.count)

    def settings(path: str, _: nn.Module) -> bool | dict[str, int]:
        if path not in quantized:
            return False
        return {"group_size": GROUP_SIZE, "bits": quantized[path]}

    nn.quantize(model, group_size=GROUP_SIZE, bits=usual, class_predicate=settings)
    config["quantization"] = {
        "group_size": GROUP_SIZE,
        "bits": usual,
        **{
            path: {"group_size": GROUP_SIZE, "bits": bits}
            for path, bits in quantized.items()
            if bits != usual
        },
    }


def _apply_rope_factors(model: Any, file: GGUFFile, config: Mapping[str, Any]) -> None:
    """Llama 3 files carry the stretched wavelengths as a tensor, not as settings."""
    info = file.tensors.get(_ROPE_FREQS)
    if info is None:
        return
    dims = config["head_dim"]
    if info.shape != (dims // 2,):
        raise ModelLoadError(f"{file.path}: tensor {_ROPE_FREQS} has shape {list(info.shape)}")
    factors = mx.array(to_float32(read_bytes(file.path, info), info))
    rope = FactorRoPE(dims, config["rope_theta"], factors)
    for layer in model.layers:
        layer.self_attn.rope = rope


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factor = file.metadata.get("llama.rope.scaling.factor")
    if kind == "linear" and factor:
        return {"type": "linear", "factor": float(factor)}
    if kind in ("none", "linear"):
        return None
    raise ModelLoadError(f"{file.path}: rotary scaling of type {kind!r} is not supported")


def _tensor(file: GGUFFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path} lacks the tensor {name}")
    return file.tensors[name]


def _optional(file: GGUFFile, name: str) -> int | None:
    """A positive whole number of the architecture; a list only if all its values agree."""
    value = file.metadata.get(f"{ARCHITECTURE}.{name}")
    if isinstance(value, list) and value and len(set(value)) == 1:
        value = value[0]
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{file.path}: {ARCHITECTURE}.{name} is not a positive number")
    return value


def _required(file: GGUFFile, name: str) -> int:
    value = _optional(file, name)
    if value is None:
        raise ModelLoadError(f"{file.path} lacks the metadata {ARCHITECTURE}.{name}")
    return value
