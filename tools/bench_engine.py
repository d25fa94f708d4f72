"""Decode speed of the engine against mlx-lm's BatchGenerator, in one process, alternating.

    OPENBLAS_NUM_THREADS=1 python tools/bench_engine.py            # the default model, 8 rows
    python tools/bench_engine.py --model FOLDER --rows 32 --prompt 16

Both run the same weights, prompts and sampling on the same thread; the reference with mlx-lm's own
attention and activations.  Each round measures one after the other, so that a busy machine hits
both; the figure that counts is the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout

from models.engine import PrefillChunk, StepPlan
from models.mlx.blas import prepare_blas
from models.sampling import GREEDY, SamplingParams
from models.source import resolve_source

if TYPE_CHECKING:
    from models.mlx.backend import MLXBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one round: seconds per decode step, and seconds of CPU of the calling thread per step.

    The latter bound the time that holds the interpreter lock; evaluation releases it.
    """

    wall_s: float
    thread_s: float


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    return [
        [(31 * row + 17 * place) % vocab_size for place in range(length + row % 4)]
        for row in range(rows)
    ]


def run_engine(
    backend: MLXBackend, tasks: list[list[int]], sampling: SamplingParams, steps: int
) -> tuple[Sample, list[list[int]]]:
    ids = tuple(range(len(tasks)))
    out: list[list[int]] = [[] for _ in tasks]
    for row, task in enumerate(tasks):
        chunk = PrefillChunk(sequence_id=row, tokens=tuple(task), start=0, sampling=sampling)
        out[row].append(backend.step(StepPlan(step=0, prefill=(chunk,))).tokens[row])
    _take(backend, ids, out)  # the rows join
    begin, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        _take(backend, ids, out)
    sample = Sample(
        wall_s=(time.perf_counter() - begin) / steps, thread_s=(time.thread_time() - cpu) / steps
    )
    backend.step(StepPlan(step=0, drop=ids))
    return sample, out


def _take(backend: MLXBackend, ids: tuple[int, ...], out: list[list[int]]) -> None:
    result = backend.step(StepPlan(step=0, decode=ids))
    assert not result.failed
    for row, token in result.tokens.items():
        out[row].append(token)


def run_reference(
    model: Any, tasks: list[list[int]], sampling: SamplingParams, steps: int
) -> tuple[Sample, list[list[int]]]:
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    sampler = None
    if not sampling.greedy:
        sampler = make_sampler(
            temp=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
        )
    generator = BatchGenerator(
        model,
        sampler=sampler,
        completion_batch_size=len(tasks),
        prefill_batch_size=len(tasks),
    )
    uids = generator.insert(tasks, max_tokens=[steps + 8] * len(tasks))
    out: dict[int, list[int]] = {uid: [] for uid in uids}
    running = 0
    while running < len(tasks):  # prefill
        responses = generator.next_generated()
        running = len(responses)
        for response in responses:
            out[response.uid].append(response.token)
    begin, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        for response in generator.next_generated():
            out[response.uid].append(response.token)
    sample = Sample(
        wall_s=(time.perf_counter() - begin) / steps, thread_s=(time.thread_time() - cpu) / steps
    )
    generator.remove(uids)
    generator.close()
    return sample, [out[uid] for uid in uids]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="GGUF file or folder; default: the embedded model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=40, help="tokens per prompt")
    parser.add_argument("--steps", type=int, default=48, help="decode steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="BLAS threads")
    parser.add_argument("--sampled", action="store_true", help="the server's default sampling")
    args = parser.parse_args()
    blas = prepare_blas(args.threads)
    from models.mlx import cpu_math
    from models.mlx.backend import MLXBackend
    from models.mlx.weights import load_model

    loaded = load_model(resolve_source(args.model))
    backend = MLXBackend(
        loaded.model,
        vocab_size=loaded.text.vocab_size,
        context_length=loaded.text.context_length,
    )
    sampling = SamplingParams(seed=1) if args.sampled else GREEDY
    tasks = prompts(args.rows, args.prompt, loaded.text.vocab_size)
    print(f"BLAS: {blas.library}, {blas.threads} threads ({blas.note})")
    print(f"{loaded.text.name}: {args.rows} rows, {args.steps} steps, prompts of {args.prompt}")
    print(
        "round  engine ms/step (thread ms)  BatchGenerator ms/step (thread ms)  ratio of tokens/s"
    )
    ratios: list[float] = []
    engine_times: list[float] = []
    for number in range(args.rounds + 1):
        if loaded.notes["device"] == "cpu":
            cpu_math.install(loaded.model)
        ours, our_tokens = run_engine(backend, tasks, sampling, args.steps)
        cpu_math.uninstall(loaded.model)
        theirs, their_tokens = run_reference(loaded.model, tasks, sampling, args.steps)
        if number == 0:  # warming up, and the check that both did the same work
            if sampling.greedy:
                equal = sum(
                    a[: args.steps] == b[: args.steps]
                    for a, b in zip(our_tokens, their_tokens, strict=True)
                )
                print(f"equal token sequences: {equal} of {args.rows}")
            continue
        ratios.append(theirs.wall_s / ours.wall_s)
        engine_times.append(ours.wall_s)
        print(
            f"{number:5d}  {_ms(ours):>27s}  {_ms(theirs):>34s}  {ratios[-1]:.3f}",
            flush=True,
        )
    print(
        f"median ratio {statistics.median(ratios):.3f}; engine median "
        f"{statistics.median(engine_times) * 1e3:.2f} ms/step, "
        f"{args.rows / statistics.median(engine_times):.1f} tokens/s"
    )


def _ms(sample: Sample) -> str:
    return f"{sample.wall_s * 1e3:.2f} ({sample.thread_s * 1e3:.2f})"


if __name__ == "__main__":
    main()
