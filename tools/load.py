"""Load generator for OpenAI-compatible servers: ``python tools/load.py --help``."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Run as a file: Python put this folder first, where modules may hide standard ones.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich.console import Console

from tools.loadgen.bench import Bench, Progress
from tools.loadgen.client import Client, open_client
from tools.loadgen.leavers import cancel, check_writable, details_for_display, newcomer, soak
from tools.loadgen.options import Options, parse_options
from tools.loadgen.outcome import Outcome
from tools.loadgen.report import SCHEMA, BarProgress, show, write_json, write_plot
from tools.loadgen.scenarios import long_prompt, mixed, overload, shared_prefix, uniform
from tools.loadgen.stats import summarise
from tools.loadgen.target import Target, UsageError, resolve_target

Scenario = Callable[[Bench], Awaitable[None]]

SCENARIOS: dict[str, Scenario] = {
    "uniform": uniform,
    "mixed": mixed,
    "long-prompt": long_prompt,
    "shared-prefix": shared_prefix,
    "cancel": cancel,
    "overload": overload,
    "newcomer": newcomer,
    "soak": soak,
}

# Sent when the server lists no model; servers with one model take any name.
FALLBACK_MODEL = "default_model"


async def run_scenario(
    options: Options, target: Target, progress: Progress | None = None
) -> tuple[dict[str, Any], list[Outcome]]:
    """Run one scenario: the report (see ``write_json``) and the single outcomes.

    Raises UsageError when the server cannot be reached.
    """
    try:
        return await _run_scenario(options, target, progress)
    except BaseExceptionGroup as group:  # one task's error, wrapped once per nursery
        raise _only(group) from None


async def _run_scenario(
    options: Options, target: Target, progress: Progress | None
) -> tuple[dict[str, Any], list[Outcome]]:
    async with open_client(
        target, timeout_s=options.timeout_s, keep_alive=options.keep_alive
    ) as client:
        model = await find_model(client, options)
        bench = Bench(client=client, options=options, model=model, progress=progress or Progress())
        if options.preconnect:
            await client.preconnect(options.concurrency)
        cpu, began = time.process_time(), time.perf_counter()
        with trio.move_on_after(options.max_time_s) as scope:
            await SCENARIOS[options.scenario](bench)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    if scope.cancelled_caught:
        bench.problems.append(f"stopped after --max-time {options.max_time_s:g} s")
    return make_report(bench, target, wall_s=bench.measured_s or wall, cpu_s=cpu), bench.outcomes


def _only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def make_report(bench: Bench, target: Target, *, wall_s: float, cpu_s: float) -> dict[str, Any]:
    options = bench.options
    failed = [o for o in bench.outcomes if o.error is not None]
    if options.scenario == "overload":
        failed = [o for o in failed if o.status != 503]
    problems = list(bench.problems)
    if failed:
        problems.append(f"{len(failed)} of {len(bench.outcomes)} requests failed")
    chosen = asdict(options)
    chosen["api_key"] = options.api_key is not None
    return {
        "schema": SCHEMA,
        "scenario": options.scenario,
        "target": {"base_url": target.base_url, "model": bench.model},
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in chosen.items()},
        **summarise(bench.outcomes, wall_s=wall_s, cpu_s=cpu_s),
        "details": bench.details,
        "verdict": {"ok": not problems, "problems": problems},
    }


async def find_model(client: Client, options: Options) -> str:
    """The model to name in requests.  Raises UsageError when nothing listens."""
    outcome = await client.get("/v1/models")
    if outcome.status == 0:
        raise UsageError(f"{client.target.base_url}: {outcome.error}")
    if outcome.status == 401:
        raise UsageError(f"{client.target.base_url} wants an API key: use --api-key")
    if options.model is not None:
        return options.model
    try:
        listing = json.loads(outcome.body)
    except ValueError:
        return FALLBACK_MODEL
    entries = listing.get("data") if isinstance(listing, dict) else None
    if isinstance(entries, list) and entries and isinstance(entries[0], dict):
        return str(entries[0].get("id") or FALLBACK_MODEL)
    return FALLBACK_MODEL


def main(argv: list[str] | None = None) -> int:
    """The exit code; see ``--help``."""
    console = Console(stderr=True)
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, tuple(SCENARIOS))
        for path in (options.json_out, options.plot_out):
            reason = check_writable(path)
            if reason:
                raise UsageError(reason)
        target = resolve_target(
            options.base_url, api_key=options.api_key, allow_remote=options.allow_remote
        )
        bar = BarProgress(console) if options.progress and console.is_terminal else None
        with bar.bar if bar else contextlib.nullcontext():
            report, outcomes = trio.run(run_scenario, options, target, bar)
        show(Console(), report, details_for_display(report["details"]))
        if options.json_out is not None:
            write_json(options.json_out, report)
        if options.plot_out is not None:
            title = f"{options.scenario}: {report['target']['model']}"
            write_plot(options.plot_out, title, outcomes)
    except UsageError as error:
        print(f"load.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"load.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("load.py: interrupted", file=sys.stderr)
        return 130
    return 0 if report["verdict"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
