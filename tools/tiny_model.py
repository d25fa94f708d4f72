"""Tiny model folders with random weights, for tests and for measuring the runtime itself.

    python tools/tiny_model.py OUT --variant plain --layers 2 --width 64

A folder has what a real one has: ``config.json``, ``model.safetensors``, ``tokenizer.json`` (a
byte-level BPE of 512 tokens), a chat template and ``generation_config.json``.  The same arguments
give the same bytes.  The end token is never likely, so that generations run to their limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

VOCAB_SIZE: Final = 512
START, END = "<|im_start|>", "<|im_end|>"
START_ID: Final = VOCAB_SIZE - 2
END_ID: Final = VOCAB_SIZE - 1
CONTEXT_LENGTH: Final = 4096
VARIANTS: Final = ("plain", "sliding", "quantized", "recurrent", "hybrid")
SLIDING_WINDOW: Final = 16
QUANTIZATION: Final = {"group_size": 32, "bits": 4}

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Letters by how common they are; their pairs become the merges.
_LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxz"


def build_tiny_model(
    path: Path, *, variant: str = "plain", layers: int = 2, width: int = 64, seed: int = 0
) -> Path:
    """Write a model folder at ``path`` (made if missing) and return it.  ``width`` % 32 == 0."""
    path.mkdir(parents=True, exist_ok=True)
    config = _config(variant, layers, width)
    _write_weights(path, config, seed)
    _write_json(path / "config.json", config)
    _write_json(path / "tokenizer.json", _tokenizer())
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_LENGTH,
            "bos_token": START,
            "eos_token": END,
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        path / "generation_config.json", {"bos_token_id": START_ID, "eos_token_id": [END_ID]}
    )
    return path


def _config(variant: str, layers: int, width: int) -> dict[str, Any]:
    heads = max(1, width // 32)
    common = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "bos_token_id": START_ID,
        "eos_token_id": END_ID,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    attention = {
        "intermediate_size": 2 * width,
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    if variant == "plain":
        return {"model_type": "llama", **common, **attention}
    if variant == "quantized":
        return {"model_type": "llama", **common, **attention, "quantization": QUANTIZATION}
    if variant == "sliding":
        # Every second layer looks at the last SLIDING_WINDOW tokens only.
        return {
            "model_type": "gemma3_text",
            **common,
            **attention,
            "query_pre_attn_scalar": 16,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
        }
    if variant == "recurrent":
        return {"model_type": "mamba2", **common, **_MAMBA, "num_heads": width // 16}
    if variant == "hybrid":
        return {"model_type": "falcon_h1", **common, **attention, **_FALCON_MAMBA}
    raise ValueError(f"variant must be one of {', '.join(VARIANTS)}")


_MAMBA: Final[dict[str, Any]] = {
    "head_dim": 16,
    "intermediate_size": 64,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": False,
    "time_step_limit": [0.0, 1e9],
    "time_step_rank": "auto",
}
_FALCON_MAMBA: Final[dict[str, Any]] = {
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    from models.mlx.lm import mlx_lm_utils

    utils = mlx_lm_utils()
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    rng = np.random.default_rng(seed)
    random: list[tuple[str, Any]] = []
    for name, array in sorted(tree_flatten(model.parameters())):
        if array.ndim >= 2:  # norms and the like keep the values they start with
            random.append((name, mx.array(_random_weight(name, tuple(array.shape), rng))))
    model.load_weights(random, strict=False)
    if "quantization" in config:
        nn.quantize(model, **config["quantization"])
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})


def _random_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Scaled so that activations keep their size and the logits have a spread of about 3."""
    fan_in = int(np.prod(shape[1:]))
    scale = 1.0 if "embed" in name else fan_in**-0.5
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    if "lm_head" in name:
        values *= np.float32(3.0)
        values[[START_ID, END_ID]] = 0  # logit 0, far below the best of the others
    return values


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _special(text: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}


def _tokenizer() -> dict[str, Any]:
    letters = _byte_letters()
    space = letters[32]
    pairs = [(space, letter) for letter in _LETTERS]
    ranked = sorted(product(range(len(_LETTERS)), repeat=2), key=lambda pair: (sum(pair), pair))
    pairs += [(_LETTERS[left], _LETTERS[right]) for left, right in ranked]
    pairs = pairs[: START_ID - len(letters)]
    tokens = [*letters, *(left + right for left, right in pairs)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(START, START_ID), _special(END, END_ID)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [[left, right] for left, right in pairs],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a tiny model folder with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_tiny_model(
        args.out, variant=args.variant, layers=args.layers, width=args.width, seed=args.seed
    )
    print(f"{args.out}: {args.variant}, {args.layers} layers of width {args.width}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout
    main()
