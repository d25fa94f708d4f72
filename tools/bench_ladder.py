"""Cost against load: one server, 1 to 64 streams, as a table and a picture.

    python tools/bench_ladder.py --plot docs/load.png --json ladder.json

Starts the server itself with as many slots as the widest rung has streams.  Every stream asks for
the same number of tokens; each rung runs ``--rounds`` times and its median counts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich.console import Console
from rich.table import Table

from tools.benchkit.rounds import warm_up
from tools.benchkit.servers import our_server, started
from tools.load import run_scenario
from tools.loadgen.options import Options, Parser
from tools.loadgen.report import write_json
from tools.loadgen.target import UsageError

RUNGS = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (
    ("tokens_per_s", "tok/s"),
    ("steady_tokens_per_s", "steady tok/s"),
    ("ttft_p50", "TTFT p50 ms"),
    ("ttft_p99", "TTFT p99 ms"),
    ("itl_p50", "ITL p50 ms"),
    ("itl_p99", "ITL p99 ms"),
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--streams", default=",".join(map(str, RUNGS)), help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="per answer (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="words (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the BLAS (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(argv)
    try:
        options.streams = sorted({int(text) for text in options.streams.split(",")})
    except ValueError:
        raise UsageError("--streams: expected whole numbers") from None
    if not options.streams or options.streams[0] < 1 or options.rounds < 1:
        raise UsageError("--streams and --rounds must be at least 1")
    return options


async def climb(options: argparse.Namespace) -> list[dict[str, float]]:
    """One row of medians per rung."""
    spec = our_server(options.model, parallel=max(options.streams), threads=options.threads)
    rows: list[dict[str, float]] = []
    async with started(spec) as server:
        for streams in options.streams:
            load = Options(
                scenario="uniform",
                concurrency=streams,
                requests=streams,
                max_tokens=options.max_tokens,
                prompt_tokens=options.prompt_tokens,
                ignore_eos=True,
                preconnect=True,
                timeout_s=1800.0,
            )
            if not rows:
                await warm_up([server], load)
            reports = [(await run_scenario(load, server.target))[0] for _ in range(options.rounds)]
            rows.append({"streams": float(streams), **medians([figures(one) for one in reports])})
    return rows


def figures(report: dict[str, Any]) -> dict[str, float]:
    latency = report["latency_ms"]
    found = {
        "tokens_per_s": report["throughput"]["tokens_per_s"],
        "steady_tokens_per_s": report["throughput"]["steady_tokens_per_s"],
    }
    for short, name in (("ttft", "ttft"), ("itl", "itl")):
        for part in ("p50", "p99"):
            found[f"{short}_{part}"] = (latency.get(name) or {}).get(part)
    return {name: float(value) for name, value in found.items() if value is not None}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = set.intersection(*(set(row) for row in rows))
    return {name: median(row[name] for row in rows) for name in sorted(names)}


def show(console: Console, rows: list[dict[str, float]]) -> None:
    table = Table()
    table.add_column("streams", justify="right")
    for _, title in COLUMNS:
        table.add_column(title, justify="right")
    for row in rows:
        cells = [f"{row[name]:.1f}" if name in row else "-" for name, _ in COLUMNS]
        table.add_row(f"{row['streams']:.0f}", *cells)
    console.print(table)


def plot(path: Path, rows: list[dict[str, float]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    streams = [row["streams"] for row in rows]
    panels = (
        ("throughput", "tokens per second", ("tokens_per_s", "steady_tokens_per_s"), "linear"),
        ("time to first token", "ms", ("ttft_p50", "ttft_p99"), "log"),
        ("inter-token latency", "ms", ("itl_p50", "itl_p99"), "log"),
    )
    titles = dict(COLUMNS)
    for axis, (title, unit, names, scale) in zip(axes, panels, strict=True):
        for name in names:
            axis.plot(streams, [row.get(name) for row in rows], marker="o", label=titles[name])
        axis.set(title=title, xlabel="streams", ylabel=unit, yscale=scale)
        axis.set_xscale("log", base=2)
        axis.set_xticks(streams, [f"{one:.0f}" for one in streams])
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    console = Console()
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        rows = trio.run(climb, options)
    except UsageError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    show(console, rows)
    if options.json:
        write_json(options.json, {"schema": "mlxcel-ladder/1", "rows": rows})
    if options.plot:
        plot(options.plot, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
