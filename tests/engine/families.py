"""Tiny random models of many architectures, made from mlx-lm's classes.

Weights are float32 and a function of the family's name.  The output is scaled so that the best
token is rarely a near tie.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from models.mlx.lm import mlx_lm_utils

VOCAB_SIZE = 128
WIDTH = 32
WINDOW = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    ``prefix`` and ``max_batch`` are what the server must say of it.  ``quantized``: whether its
    attention can read quantised keys and values.
    """

    name: str
    config: dict[str, Any] = field(repr=False)
    prefix: Literal["blocks", "snapshots", "none"] = "blocks"
    max_batch: int | None = None
    quantized: bool = True


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
    "head_dim": 8,
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
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
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
    _family("llama"),
    _family("llama without groups", {"num_key_value_heads": 4}, model_type="llama"),
    _family("mistral", {"rope_traditional": True, "num_key_value_heads": 1}),
    _family("qwen2"),
    _family("qwen3"),
    _family("phi3", {"rope_scaling": None}),
    _family("olmo2"),
    _family("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5}),
    _family("gemma2", {"query_pre_attn_scalar": 8}, quantized=False),
    _family("qwen3_moe", MOE),
    _family("mixtral", MOE),
    # attention over latents; v2 caches whole keys and values
    _family("deepseek_v2", DEEPSEEK),
    _family("deepseek_v3", DEEPSEEK, quantized=False),
    _family("minicpm3", LATENT, {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 1.0}),
    # sliding windows
    _family(
        "gemma3_text",
        {"query_pre_attn_scalar": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2},
        prefix="snapshots",
    ),
    _family(
        "llama with windows",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        model_type="llama",
        prefix="snapshots",
    ),
    _family(
        "cohere2",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0},
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
        quantized=False,
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
)


def build(family: Family) -> Any:
    """A new model, on the calling thread."""
    model_class, args_class = mlx_lm_utils()._get_classes(family.config)
    model = model_class(args_class.from_dict(family.config))
    rng = np.random.default_rng(zlib.crc32(family.name.encode()))
    weights = [
        (name, mx.array(_weight(name, tuple(array.shape), rng)))
        for name, array in sorted(tree_flatten(model.parameters()))
        if array.ndim >= 2  # norms and the like keep the values they start with
    ]
    model.load_weights(weights, strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def _weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Scaled so that activations keep their size, and so that the logits are well apart."""
    fan_in = math.prod(shape[1:]) if "conv" in name else shape[-1]
    scale = 1.0 if "embed" in name else fan_in**-0.5
    if name.startswith(("lm_head", "embed_out")):
        scale *= 3.0
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


@functools.cache
def by_name() -> dict[str, Family]:
    return {family.name: family for family in FAMILIES}
