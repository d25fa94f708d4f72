"""Alternating rounds and their ratios."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import trio

from tools.benchkit.servers import ROOT, Running, child_env
from tools.load import run_scenario
from tools.loadgen.options import Options
from tools.loadgen.target import UsageError

Measure = Callable[[], Awaitable[dict[str, Any]]]
FIGURES = ("tokens_per_s", "steady_tokens_per_s")
# Answers may end early at a server that knows no ignore_eos; a larger difference is another job.
LENGTH_TOLERANCE = 0.1


@dataclass(slots=True, kw_only=True)
class Contest:
    """Two things measured in turn: ``rows`` holds (ours, theirs) of each round."""

    ours: str
    theirs: str
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def ratios(self, figure: str) -> list[float]:
        """ours / theirs of each round in which both have the figure."""
        pairs = [(a.get(figure), b.get(figure)) for a, b in self.rows]
        return [a / b for a, b in pairs if a and b]

    def result(self) -> dict[str, Any]:
        found = {figure: self.ratios(figure) for figure in FIGURES}
        return {
            "ours": self.ours,
            "theirs": self.theirs,
            "rounds": [{"ours": a, "theirs": b} for a, b in self.rows],
            "ratios": found,
            "median_ratio": {figure: median(r) if r else None for figure, r in found.items()},
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        """Reasons for which a ratio says less than it seems to."""
        found = []
        for number, (a, b) in enumerate(self.rows, 1):
            for side in (a, b):
                found += [f"round {number}: {problem}" for problem in side.get("problems", ())]
            more, fewer = max(a["tokens"], b["tokens"]), min(a["tokens"], b["tokens"])
            if fewer < more * (1 - LENGTH_TOLERANCE):
                found.append(f"round {number}: {a['tokens']} against {b['tokens']} tokens")
        return found


async def alternate(contest: Contest, ours: Measure, theirs: Measure, *, rounds: int) -> None:
    """Measure in turn; every other round in the opposite order, so that drift cancels out."""
    for number in range(rounds):
        if number % 2 == 0:
            a = await ours()
            b = await theirs()
        else:
            b = await theirs()
            a = await ours()
        contest.rows.append((a, b))


def over_http(server: Running, options: Options) -> Measure:
    """A measurement by the load generator."""

    async def measure() -> dict[str, Any]:
        report, _ = await run_scenario(options, server.target)
        return {
            "tokens": report["tokens"]["total"],
            "tokens_per_s": report["throughput"]["tokens_per_s"],
            "steady_tokens_per_s": report["throughput"]["steady_tokens_per_s"],
            "latency_ms": report["latency_ms"],
            "client_cpu_us_per_token": report["client"]["cpu_us_per_token"],
            "problems": report["verdict"]["problems"],
        }

    return measure


def in_process(
    model: str | None, *, batch: int, tokens: int, prompt_tokens: int, threads: int
) -> Measure:
    """A measurement by ``tools/bench_batchgen.py`` in a process of its own."""
    argv = [sys.executable, str(ROOT / "tools" / "bench_batchgen.py"), *([model] if model else [])]
    argv += ["--batch", str(batch), "--tokens", str(tokens), "--threads", str(threads)]
    argv += ["--prompt-tokens", str(prompt_tokens)]

    async def measure() -> dict[str, Any]:
        done = await trio.run_process(
            argv,
            env={**os.environ, **child_env(threads)},
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        if done.returncode:
            tail = done.stderr.decode("utf-8", "replace").strip()[-500:]
            raise UsageError(f"bench_batchgen.py failed: {tail}")
        found: dict[str, Any] = json.loads(done.stdout)
        return {**found, "tokens": batch * tokens}

    return measure


async def warm_up(servers: Sequence[Running], options: Options) -> None:
    """One short run each, so that lazy set-up is not measured.  Raises UsageError on a failure."""
    for server in servers:
        report, _ = await run_scenario(options, server.target)
        if not report["requests"]["ok"]:
            raise UsageError(f"{server.name} answers no request: {report['requests']['errors']}")
