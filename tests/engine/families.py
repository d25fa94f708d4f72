"""Tiny random models of many architectures, made from mlx-lm's classes.

Weights are float32 and a function of the family's name.  The output is scaled so that the best
token is rarely a near tie.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from models.mlx.batching import new_caches
from models.mlx.lm import mlx_lm_utils

VOCAB_SIZE = 128
WIDTH = 32
WINDOW = 12
HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    The rest is what the server must find out about it: how parts of its caches can be kept, whether
    its sequences can be decoded together, and whether it can have quantised or limited caches
    ("ignored": it has no plain caches that could be replaced).
    """

    name: str
    config: dict[str, Any] = field(repr=False)
    prefix: Literal["blocks", "snapshots", "none"] = "blocks"
    max_batch: int | None = None
    quantized: Literal["yes", "no", "ignored"] = "no"
    limited: Literal["yes", "no", "ignored"] = "yes"


COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "head_dim": 32,
    "attention_bias": False,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SPARSE: dict[str, Any] = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 32}
MAMBA: dict[str, Any] = {
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}


def _family(name: str, *changes: dict[str, Any], model_type: str = "", **facts: Any) -> Family:
    config = {"model_type": model_type or name, **COMMON}
    for change in changes:
        config.update(change)
    return Family(name=name, config=config, **facts)


FAMILIES: tuple[Family, ...] = (
    _family("llama", quantized="yes"),
    _family(
        "llama without groups", {"num_key_value_heads": 4}, model_type="llama", quantized="yes"
    ),
    _family("mistral", {"rope_traditional": True, "num_key_value_heads": 1}, quantized="yes"),
    _family("qwen2"),
    _family("qwen3", quantized="yes"),
    _family("phi3", {"rope_scaling": None}),
    _family("olmo2", quantized="yes"),
    _family("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5}),
    _family("gemma2", {"query_pre_attn_scalar": 32}),
    _family("qwen3_moe", MOE, quantized="yes"),
    _family("mixtral", MOE),
    # attention over latents; v2 caches whole keys and values
    _family("deepseek_v2", DEEPSEEK, {"rope_scaling": {"factor": 2.0}}, quantized="yes"),
    _family("deepseek_v3", DEEPSEEK),
    _family(
        "deepseek_v32",
        DEEPSEEK,
        SPARSE,
        prefix="snapshots",
        quantized="ignored",
        limited="ignored",
    ),
    _family(
        "minicpm3",
        LATENT,
        {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 1.0, "rope_scaling": {}},
    ),
    # sliding windows
    _family(
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "sliding_window_pattern": 2},
        prefix="snapshots",
        quantized="yes",
    ),
    _family(
        "llama with windows",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        model_type="llama",
        prefix="snapshots",
        quantized="yes",
    ),
    _family(
        "cohere2",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0, "head_dim": 8},
        prefix="snapshots",
    ),
    _family(
        "gpt_oss",
        MOE,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 2048,
            },
        },
        prefix="snapshots",
    ),
    # recurrent
    _family(
        "mamba",
        {
            "state_size": 8,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
        prefix="snapshots",
        quantized="ignored",
        limited="ignored",
    ),
    _family(
        "rwkv7",
        {
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
        prefix="snapshots",
        quantized="ignored",
        limited="ignored",
    ),
    # attention and recurrent layers
    _family(
        "jamba",
        MOE,
        MAMBA,
        {
            "mamba_expand": 2,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
        },
        prefix="snapshots",
    ),
    _family(
        "granitemoehybrid",
        MAMBA,
        {
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.35,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
        },
        prefix="snapshots",
    ),
    _family(
        "falcon_h1",
        MAMBA,
        {"mamba_d_ssm": 32},
        prefix="snapshots",
        quantized="ignored",
        limited="ignored",
    ),
    _family(
        "qwen3_next",
        MOE,
        {
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "shared_expert_intermediate_size": 24,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
        },
        prefix="snapshots",
        quantized="yes",
    ),
    _family(
        "recurrent_gemma",
        {
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
            "num_key_value_heads": 1,
        },
        prefix="snapshots",
        quantized="ignored",
        limited="ignored",
    ),
    _family(
        "lfm2",
        {
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": WIDTH,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 48,
            "full_attn_idxs": [1],
            "layer_types": ["conv", "full_attention"],
        },
        prefix="snapshots",
    ),
    # layers that share caches
    _family(
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "global_head_dim": 32,
        },
        prefix="snapshots",
    ),
    # not in a batch: chunked attention; positions from columns; one position for all rows
    _family(
        "llama4",
        {
            "text_config": {
                **COMMON,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_chunk_size": 16,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "rope_scaling": None,
                "use_qk_norm": True,
            }
        },
        prefix="snapshots",
        quantized="yes",
        max_batch=1,
    ),
    _family(
        "afm7",
        {
            "hidden_dim": WIDTH,
            "num_layers": 3,
            "num_kv_reuse_layers": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        max_batch=1,
        limited="no",
    ),
    _family(
        "gpt_bigcode",
        {
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_inner": 48,
            "n_head": 4,
            "n_positions": 256,
            "layer_norm_epsilon": 1e-5,
        },
        max_batch=1,
    ),
)


def build(family: Family) -> Any:
    """A new model, on the calling thread."""
    model_class, args_class = mlx_lm_utils()._get_classes(family.config)
    model = model_class(args_class.from_dict(family.config))
    rng = np.random.default_rng(zlib.crc32(family.name.encode()))
    arrays = dict(sorted(tree_flatten(model.parameters())))
    # With a head of its own the embedding may be large; as the head it would repeat its input.
    embedding = 1.0 if any(_is_head(name) for name in arrays) else 0.2
    weights = [
        (name, mx.array(_weight(name, tuple(array.shape), rng, embedding)))
        for name, array in arrays.items()
        if array.ndim >= 2  # norms and the like keep the values they start with
    ]
    model.load_weights(weights, strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def _is_head(name: str) -> bool:
    return any(head in name for head in HEADS)


def _weight(name: str, shape: tuple[int, ...], rng: np.random.Generator, embedding: float) -> Any:
    """Scaled so that activations keep their size, and so that the logits are well apart."""
    fan_in = math.prod(shape[1:]) if "conv" in name else shape[-1]
    scale = embedding if "embed" in name or "wte" in name else fan_in**-0.5
    if _is_head(name):
        scale = 3.0 * fan_in**-0.5
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


class WithCaches:
    """A model whose sequences have other caches; ``settings`` are those of ``new_caches``."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self._model = model
        self._settings = settings
        self.model_type = model.model_type
        self.layers = model.layers
        self.named_modules = model.named_modules

    def make_cache(self) -> list[Any]:
        return new_caches(self._model, **self._settings)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> Any:
        return self._model(inputs, cache=cache)
