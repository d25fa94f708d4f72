"""What sampling costs per step: greedy rows, equal rows, and rows that all differ.

    OPENBLAS_NUM_THREADS=1 python tools/bench_sampler.py

Random logits of 8 rows by 49152 tokens and 32 rows by 512; the kinds are measured in turn in every
round, and the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout

from models.mlx.blas import prepare_blas
from models.sampling import GREEDY, WHOLE, SamplingParams

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def different(rows: int) -> list[SamplingParams]:
    """Every eighth row is of the same kind, with other numbers; two rows want logprobs."""
    found = []
    for row in range(rows):
        some = 0.01 * row
        kinds: tuple[dict[str, Any], ...] = (
            {"temperature": 0.0},
            {**OFF, "temperature": 0.7 + some},
            {"top_k": 20 + row, "top_p": 0.9 - some / 4, "logprobs": 5 if row < 8 else None},
            {**OFF, "top_p": 0.9 - some / 4},
            {**OFF, "typical_p": 0.8 - some / 4},
            {**OFF, "xtc_probability": 0.5, "xtc_threshold": 0.05 + some / 8},
            {**OFF, "top_n_sigma": 1.0 + some, "min_p": 0.02, "logprobs": 5 if row < 8 else None},
            {
                "repetition_penalty": 1.1,
                "frequency_penalty": 0.1 + some,
                "dry_multiplier": 0.8,
                "dry_window": WHOLE,
            },
        )
        found.append(SamplingParams(seed=row, **kinds[row % len(kinds)]))
    return found


def measure(params: list[SamplingParams], logits: Any, steps: int) -> float:
    """Seconds per step, the building of the graph included."""
    import mlx.core as mx

    from models.mlx.sampler import BatchSampler

    rows, vocab = logits.shape
    histories = [[(row + 7 * place) % 50 for place in range(200)] for row in range(rows)]
    sampler = BatchSampler(params, vocab, histories=histories, generated=[0] * rows)
    positions = [200] * rows
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        draw = sampler.draw(logits, positions)
        extra = [] if draw.logprobs is None else draw.logprobs.arrays
        mx.eval(draw.tokens, extra)
        if draw.logprobs is not None:
            draw.logprobs.values()
        times.append(time.perf_counter() - begin)
        positions = [one + 1 for one in positions]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", action="store_true", help="also each kind on its own")
    args = parser.parse_args()
    blas = prepare_blas(1)
    import mlx.core as mx

    mx.disable_compile()
    print(f"BLAS: {blas.library}, 1 thread")
    for rows, vocab in ((8, 49152), (32, 512)):
        mx.random.seed(3)
        logits = mx.random.normal((rows, vocab)) * 3
        mx.eval(logits)
        kinds = {
            "greedy": [GREEDY] * rows,
            "all with the defaults": [SamplingParams(seed=row) for row in range(rows)],
            "all different": different(rows),
        }
        if args.each:
            kinds.update({f"only kind {one}": [different(8)[one]] for one in range(8)})
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(args.rounds):
            for name, params in kinds.items():
                found[name].append(measure(params, logits[: len(params)], args.steps))
        for name, times in found.items():
            cost = statistics.median(times)
            count = len(kinds[name])
            print(
                f"{rows} x {vocab}  {name:24} {1e3 * cost:7.2f} ms per step, "
                f"{1e6 * cost / count:7.1f} us per row"
            )


if __name__ == "__main__":
    main()
