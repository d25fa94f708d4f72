"""The anchor of the benchmarks: a plain mlx-lm ``BatchGenerator`` loop in one process.

    python tools/bench_batchgen.py [MODEL] --batch 8 --tokens 64

Same weights, dtype and BLAS as the server, no HTTP, no detokenising: greedy rows that all start
together.  Prints one JSON object; ``steady_tokens_per_s`` counts only the time in which all rows
decode, ``tokens_per_s`` everything from the first prompt token on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.errors import ModelLoadError
from models.mlx.blas import prepare_blas
from models.source import resolve_source
from tools.loadgen.outcome import Outcome
from tools.loadgen.prompts import made_up, numbered
from tools.loadgen.stats import spread, steady_rate


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode speed of mlx-lm's BatchGenerator.", allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", help="GGUF file or folder; default: the embedded one")
    parser.add_argument("--batch", type=int, default=8, help="rows (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="per row (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="words (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the BLAS (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--cpu-dtype", choices=("auto", "float32", "keep"), default="auto", help="(%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds (%(default)s)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, measure.  The keys of the result are those of the module's docstring."""
    # The BLAS must be in the process before MLX is.
    blas = prepare_blas(options.threads)
    import mlx.core as mx

    from models.mlx.weights import load_model

    mx.disable_compile()
    loaded = load_model(resolve_source(options.model, offline=True), cpu_dtype=options.cpu_dtype)
    prompts = [encode(loaded.text, prompt_of(i, options)) for i in range(options.batch)]
    decode(loaded.model, prompts, 4)
    rounds = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        rows = decode(loaded.model, prompts, options.tokens)
        wall = time.perf_counter() - began
        _, steady = steady_rate(rows)
        gaps = [gap for row in rows for gap in row.gaps]
        rounds.append(
            {
                "steady_tokens_per_s": steady,
                "tokens_per_s": sum(len(row.stamps) for row in rows) / wall,
                "wall_s": wall,
                "itl_ms": spread(gaps, scale=1000),
            }
        )
    best = max(rounds, key=lambda r: float(str(r["tokens_per_s"])))
    return {
        "batch": options.batch,
        "tokens": options.tokens,
        "prompt_tokens": sum(map(len, prompts)),
        "blas": {"library": blas.library, "threads": blas.threads},
        "notes": loaded.notes,
        **best,
        "rounds": rounds,
    }


def prompt_of(index: int, options: argparse.Namespace) -> str:
    """The text that ``tools/load.py`` sends as request ``index`` with the same seed."""
    rng = Random(f"{options.seed} {index}")
    return numbered(made_up(options.prompt_tokens, rng), index)


def encode(text: Any, prompt: str) -> list[int]:
    """Token ids of a chat with one message; of the bare prompt when there is no template."""
    if not text.has_chat_template:
        return list(text.encode(prompt, add_special=True))
    rendered = text.render_chat([{"role": "user", "content": prompt}], kwargs={})
    return list(text.encode(rendered, add_special=False))


def decode(model: Any, prompts: list[list[int]], tokens: int) -> list[Outcome]:
    """One row per prompt with the time of each token; nothing ends a row early."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(
        model,
        stop_tokens=[],
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    began = time.perf_counter()
    uids = generator.insert(prompts, max_tokens=[tokens] * len(prompts))
    rows = {uid: Outcome(status=200, started=began, stamps=array("d")) for uid in uids}
    missing = set(uids)
    while missing:
        _, responses = generator.next()
        now = time.perf_counter()
        for response in responses:
            rows[response.uid].stamps.append(now)
            if response.finish_reason is not None:
                rows[response.uid].ended = now
                missing.discard(response.uid)
    generator.close()
    return [rows[uid] for uid in uids]


def main(argv: list[str] | None = None) -> int:
    try:
        result = run(parse(argv))
    except ModelLoadError as error:
        print(f"bench_batchgen.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
