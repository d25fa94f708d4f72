"""Write a llama GGUF model as a Hugging Face folder, for servers that read only those.

    python tools/export_model.py FOLDER [--model FILE.gguf] [--dtype bfloat16] [--never-stop]

``--never-stop`` names an end token that the model practically never draws, so that every answer of
a benchmark has the same length on servers that know no ``ignore_eos``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.errors import ModelLoadError
from models.gguf_file import read_gguf
from models.gguf_tokenizer import gguf_tokenizer
from models.source import resolve_source

DTYPES = ("float32", "bfloat16", "float16")


def export(model: str | None, folder: Path, *, dtype: str, never_stop: bool) -> None:
    """Write ``folder``; its ``config.json`` comes last.  Raises ModelLoadError, OSError."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from models.mlx.weights import load_model

    source = resolve_source(model, offline=True)
    if source.kind != "gguf":
        raise ModelLoadError(f"{source.path} is a folder already")
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_model(source, cpu_dtype="float32")
    weights = {
        name: value.astype(getattr(mx, dtype))
        for name, value in tree_flatten(loaded.model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    file = read_gguf(source.path)
    tokenizer = gguf_tokenizer(file.metadata)
    tokenizer.raw.save(str(folder / "tokenizer.json"))
    end = last_special(tokenizer.raw) if never_stop else min(tokenizer.eos_ids)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.raw.id_to_token(end),
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.special.bos_id is not None:
        settings["bos_token"] = tokenizer.raw.id_to_token(tokenizer.special.bos_id)
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    _write(folder / "tokenizer_config.json", settings)
    ends = [end] if never_stop else sorted(tokenizer.eos_ids)
    _write(
        folder / "config.json",
        {**loaded.config, "eos_token_id": ends if len(ends) > 1 else end, "torch_dtype": dtype},
    )


def last_special(tokenizer: Any) -> int:
    """The special token with the highest id: markers of training data that chats never contain."""
    added = tokenizer.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special]
    if not special:
        raise ModelLoadError("the tokenizer has no special token to end with")
    return int(max(special))


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write a GGUF model as a Hugging Face folder.", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", metavar="FILE.gguf", help="default: the embedded model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    parser.add_argument("--never-stop", action="store_true", help="an end token never drawn")
    options = parser.parse_args(argv)
    try:
        export(options.model, options.folder, dtype=options.dtype, never_stop=options.never_stop)
    except (ModelLoadError, OSError) as error:
        print(f"export_model.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
