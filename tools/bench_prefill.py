"""Prefill speed of the engine against mlx-lm's own, in one process, alternating.

    OPENBLAS_NUM_THREADS=1 python tools/bench_prefill.py --tokens 1000
    python tools/bench_prefill.py --profile      # where the time of a layer goes

Both run the same weights on the same thread; the reference with mlx-lm's own functions, which does
not compute unread logits either.  The figure that counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout

from models.engine import PrefillChunk, StepPlan
from models.mlx.blas import prepare_blas
from models.sampling import GREEDY
from models.source import resolve_source


def engine_s(backend: Any, prompt: list[int], chunk: int) -> tuple[float, int]:
    """Seconds to the first token, and the token."""
    begin = time.perf_counter()
    token = -1
    for start in range(0, len(prompt), chunk):
        part = tuple(prompt[start : start + chunk])
        sampling = GREEDY if start + chunk >= len(prompt) else None
        piece = PrefillChunk(sequence_id=0, tokens=part, start=start, sampling=sampling)
        token = backend.step(StepPlan(step=0, prefill=(piece,))).tokens.get(0, -1)
    spent = time.perf_counter() - begin
    backend.step(StepPlan(step=0, drop=(0,)))
    return spent, token


def reference_s(model: Any, prompt: list[int], chunk: int) -> tuple[float, int]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    begin = time.perf_counter()
    steps = generate_step(mx.array(prompt), model, max_tokens=1, prefill_step_size=chunk)
    token = int(next(iter(steps))[0])
    return time.perf_counter() - begin, token


def profile(model: Any, tokens: int) -> None:
    """Seconds per layer and part, each part evaluated on its own."""
    import mlx.core as mx

    layer = model.model.layers[0]
    x = mx.random.normal((1, tokens, model.args.hidden_size))
    norm = layer.input_layernorm(x)
    attention = layer.self_attn
    heads = [attention.n_heads, attention.n_kv_heads, attention.n_kv_heads]
    q, k, v = (
        project(norm).reshape(1, tokens, count, -1).transpose(0, 2, 1, 3)
        for project, count in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj), heads, strict=True
        )
    )
    mx.eval(x, norm, q, k, v)
    module = sys.modules[type(attention).__module__]
    core: Any = vars(module)["scaled_dot_product_attention"]
    flat = mx.random.normal((1, tokens, model.args.hidden_size))
    parts: dict[str, Callable[[], Any]] = {
        "norm": lambda: layer.input_layernorm(x),
        "q, k, v": lambda: [attention.q_proj(norm), attention.k_proj(norm), attention.v_proj(norm)],
        "rope": lambda: [attention.rope(q), attention.rope(k)],
        "attention core": lambda: core(q, k, v, cache=None, scale=attention.scale, mask="causal"),
        "output projection": lambda: attention.o_proj(flat),
        "mlp": lambda: layer.mlp(norm),
        "whole layer": lambda: layer(x, mask="causal"),
    }
    for name, run in parts.items():
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            mx.eval(run())
            times.append(time.perf_counter() - begin)
        print(f"{name:20} {1e3 * statistics.median(times):8.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="GGUF file or folder; default: the embedded model")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=512, help="tokens per chunk, on both sides")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="BLAS threads")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    blas = prepare_blas(args.threads)
    from models.mlx import cpu_math, rope
    from models.mlx.backend import MLXBackend
    from models.mlx.weights import load_model

    loaded = load_model(resolve_source(args.model))
    model, text = loaded.model, loaded.text
    backend = MLXBackend(model, vocab_size=text.vocab_size, context_length=text.context_length)
    prompt = [(17 * place + place * place) % text.vocab_size for place in range(args.tokens)]
    print(f"BLAS: {blas.library}, {blas.threads} threads; {text.name}, {args.tokens} tokens")
    if args.profile:
        for name, change in (("mlx-lm's own", None), ("ours", True)):
            if change:
                cpu_math.install(model)
                rope.install(model, text.context_length)
            print(name)
            profile(model, min(args.tokens, args.chunk))
        return
    ratios = []
    for number in range(args.rounds + 1):
        cpu_math.install(model)
        rope.install(model, text.context_length)
        ours, token = engine_s(backend, prompt, args.chunk)
        rope.uninstall(model)
        cpu_math.uninstall(model)
        theirs, other = reference_s(model, prompt, args.chunk)
        assert token == other, "different first tokens"
        if number:  # the first round warms up
            ratios.append(theirs / ours)
            print(
                f"{ours:.2f} s ({args.tokens / ours:.0f} tok/s)   {theirs:.2f} s   {ratios[-1]:.2f}"
            )
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
