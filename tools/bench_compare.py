"""Comparisons within one run: this server against a plain loop and against mlx-lm's server.

    python tools/bench_compare.py default-8
    python tools/bench_compare.py default-32
    python tools/bench_compare.py mixed-8
    python tools/bench_compare.py peer-default-8 --peer-model FOLDER
    python tools/bench_compare.py peer-mixed-8 --peer-model FOLDER
    python tools/bench_compare.py tiny-32 --model FOLDER
    python tools/bench_compare.py threads

Starts the servers itself, measures both sides in turn and prints the median of the ratios of the
rounds.  Absolute figures drift from run to run and machine to machine; the ratios are what counts.
``FOLDER`` for a peer comes from ``tools/export_model.py`` (``--never-stop``) or
``tools/tiny_model.py``.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich.console import Console
from rich.table import Table

from tools.benchkit.rounds import (
    FIGURES,
    Contest,
    alternate,
    in_process,
    over_http,
    warm_up,
)
from tools.benchkit.servers import ServerSpec, our_server, peer_server, started
from tools.loadgen.leavers import check_writable
from tools.loadgen.options import Options, Parser
from tools.loadgen.report import write_json
from tools.loadgen.target import UsageError

SCHEMA = "mlxcel-compare/1"
STREAMS = {
    "default-8": 8,
    "default-32": 32,
    "mixed-8": 8,
    "peer-default-8": 8,
    "peer-mixed-8": 8,
    "tiny-32": 32,
    "threads": 8,
}
MODES = tuple(STREAMS)
PEER_MODES = ("peer-default-8", "peer-mixed-8", "tiny-32")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", help="of our server (default: the embedded one)")
    parser.add_argument("--peer-model", type=Path, help="folder for mlx-lm's server")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--streams", type=int, help="default: by mode")
    parser.add_argument("--max-tokens", type=int, help="per answer; default: 64, tiny-32: 256")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="words (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the BLAS (%(default)s)")
    parser.add_argument(
        "--try-threads", default="1,2", help="threads: counts to try, by comma (%(default)s)"
    )
    parser.add_argument("--ours-arg", action="append", default=[], help="more for our server")
    parser.add_argument("--peer-arg", action="append", default=[], help="more for the peer")
    parser.add_argument("--max-time", type=float, default=600.0, help="s per load (%(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything as JSON")
    options = parser.parse_args(argv)
    if min(options.rounds, options.threads, options.prompt_tokens) < 1:
        raise UsageError("--rounds, --threads and --prompt-tokens must be at least 1")
    options.streams = options.streams or STREAMS[options.mode]
    options.max_tokens = options.max_tokens or (256 if options.mode == "tiny-32" else 64)
    if options.mode == "tiny-32":
        options.peer_model = options.peer_model or (Path(options.model) if options.model else None)
    if options.mode in PEER_MODES and options.peer_model is None:
        raise UsageError(f"{options.mode} needs a folder: see --help")
    return options


def load_options(options: argparse.Namespace) -> Options:
    return Options(
        scenario="mixed" if options.mode == "peer-mixed-8" else "uniform",
        concurrency=options.streams,
        requests=options.streams,
        max_tokens=options.max_tokens,
        prompt_tokens=options.prompt_tokens,
        ignore_eos=True,
        preconnect=True,
        timeout_s=options.max_time,
        max_time_s=options.max_time,
    )


async def against_loop(options: argparse.Namespace, threads: int) -> Contest:
    """Ours over HTTP against a plain BatchGenerator loop."""
    load = load_options(options)
    contest = Contest(ours=f"ours, {threads} thread(s)", theirs=f"in process, {threads} thread(s)")
    spec = our_server(
        options.model, parallel=options.streams, threads=threads, extra=tuple(options.ours_arg)
    )
    theirs = in_process(
        options.model,
        batch=options.streams,
        tokens=options.max_tokens,
        prompt_tokens=options.prompt_tokens,
        threads=threads,
    )
    async with started(spec) as server:
        await warm_up([server], replace(load, max_tokens=8))
        await alternate(contest, over_http(server, load), theirs, rounds=options.rounds)
    return contest


async def against_peer(options: argparse.Namespace) -> Contest:
    """Ours against mlx-lm's server, both over HTTP."""
    load = load_options(options)
    specs: list[ServerSpec] = [
        our_server(
            options.model,
            parallel=options.streams,
            threads=options.threads,
            extra=tuple(options.ours_arg),
        ),
        peer_server(
            str(options.peer_model), threads=options.threads, extra=tuple(options.peer_arg)
        ),
    ]
    contest = Contest(ours=specs[0].name, theirs=specs[1].name)
    async with AsyncExitStack() as stack:
        ours, peer = [await stack.enter_async_context(started(spec)) for spec in specs]
        await warm_up([ours, peer], replace(load, max_tokens=8))
        await alternate(
            contest,
            over_http(ours, load),
            over_http(peer, replace(load, model="default_model")),
            rounds=options.rounds,
        )
    return contest


async def mixed_against_greedy(options: argparse.Namespace) -> Contest:
    """Eight different samplers against eight greedy rows, on one and the same server of ours."""
    load = load_options(options)
    contest = Contest(ours="mixed", theirs="greedy")
    spec = our_server(
        options.model,
        parallel=options.streams,
        threads=options.threads,
        extra=tuple(options.ours_arg),
    )
    async with started(spec) as server:
        mixed = replace(load, scenario="mixed")
        await warm_up([server], replace(mixed, max_tokens=8))
        await alternate(
            contest, over_http(server, mixed), over_http(server, load), rounds=options.rounds
        )
    return contest


async def compare(options: argparse.Namespace) -> list[Contest]:
    """The contests of a mode."""
    match options.mode:
        case "mixed-8":
            return [await mixed_against_greedy(options)]
        case "default-8" | "default-32":
            return [await against_loop(options, options.threads)]
        case "threads":
            try:
                counts = [int(text) for text in options.try_threads.split(",")]
            except ValueError:
                raise UsageError("--try-threads: expected whole numbers") from None
            return [await against_loop(options, count) for count in counts]
    return [await against_peer(options)]


def best_of(contests: list[Contest]) -> dict[str, Any]:
    """Each side at its best thread count, by the median of its rounds."""
    found: dict[str, Any] = {}
    for index, side in enumerate(("ours", "theirs")):
        medians = {
            getattr(contest, side): sorted(row[index]["tokens_per_s"] for row in contest.rows)[
                len(contest.rows) // 2
            ]
            for contest in contests
        }
        name = max(medians, key=lambda key: medians[key])
        found[side] = {"name": name, "tokens_per_s": medians[name]}
    return found


def show(console: Console, contests: list[Contest]) -> None:
    for contest in contests:
        table = Table(title=f"{contest.ours} / {contest.theirs}", title_justify="left")
        for column in ("round", "figure", contest.ours, contest.theirs, "ratio"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for number, (a, b) in enumerate(contest.rows, 1):
            for figure in FIGURES:
                x, y = a.get(figure), b.get(figure)
                ratio = f"{x / y:.3f}" if x and y else "-"
                table.add_row(
                    str(number), figure, f"{x:.1f}" if x else "-", f"{y:.1f}" if y else "-", ratio
                )
        console.print(table)
        for figure, ratio_of in contest.result()["median_ratio"].items():
            console.print(f"median ratio of {figure}: {ratio_of:.3f}" if ratio_of else "no ratio")
        for warning in contest.warnings():
            console.print(f"warning: {warning}", style="yellow", markup=False)


def main(argv: list[str] | None = None) -> int:
    console = Console()
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        reason = check_writable(options.json)
        if reason:
            raise UsageError(reason)
        contests = trio.run(_unwrapped, options)
        show(console, contests)
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "mode": options.mode,
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "contests": [contest.result() for contest in contests],
        }
        if options.mode == "threads":
            result["best"] = best_of(contests)
            for side, best in result["best"].items():
                console.print(
                    f"best of {side}: {best['name']}, {best['tokens_per_s']:.1f} tokens/s"
                )
        if options.json is not None:
            write_json(options.json, result)
    except (UsageError, OSError) as error:
        print(f"bench_compare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench_compare.py: interrupted", file=sys.stderr)
        return 130
    return 0


async def _unwrapped(options: argparse.Namespace) -> list[Contest]:
    try:
        return await compare(options)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


if __name__ == "__main__":
    sys.exit(main())
