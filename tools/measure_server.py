"""What the server itself spends under load, on Linux: CPU per token of the event loop's thread.

    python tools/measure_server.py --pid PID [arguments of tools/load.py]

Runs a load (``uniform`` unless named) and reads the server's threads from /proc before and after:
microseconds of CPU per streamed token of the main thread (which runs the event loop) and of the
others, resident memory, file descriptors, and the loop lag that the server reports in ``/props``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio

from tools.load import SCENARIOS, run_scenario
from tools.loadgen.client import open_client
from tools.loadgen.leavers import check_writable
from tools.loadgen.options import Options, parse_options
from tools.loadgen.proc import sample_process, thread_cpu_s, thread_names
from tools.loadgen.report import write_json
from tools.loadgen.target import Target, UsageError, resolve_target


async def measure(pid: int, options: Options, target: Target) -> dict[str, Any]:
    """The load's report with a section ``server``.  Raises UsageError."""
    before = cpu_of_threads(pid)
    start = sample_process(pid)
    report, _ = await run_scenario(options, target)
    after = cpu_of_threads(pid)
    lag = await loop_lag(target, options)
    tokens = report["tokens"]["total"]
    spent = {tid: seconds - before.get(tid, 0.0) for tid, seconds in after.items()}
    report["server"] = {
        "pid": pid,
        "tokens": tokens,
        "event_loop_us_per_token": per_token(spent.get(pid, 0.0), tokens),
        "all_threads_us_per_token": per_token(sum(spent.values()), tokens),
        "busiest_threads_us_per_token": busiest(pid, spent, tokens),
        "before": asdict(start),
        "after": asdict(sample_process(pid)),
        "loop_lag": lag,
    }
    return report


def cpu_of_threads(pid: int) -> dict[int, float]:
    """CPU seconds by thread id; threads that end meanwhile are left out."""
    found: dict[int, float] = {}
    for tid in thread_names(pid):
        try:
            found[tid] = thread_cpu_s(pid, tid)
        except UsageError:
            if tid == pid:
                raise
    return found


def per_token(seconds: float, tokens: int) -> float | None:
    """Microseconds per token; None without tokens."""
    return round(1e6 * seconds / tokens, 2) if tokens else None


def busiest(pid: int, spent: dict[int, float], tokens: int) -> dict[str, float | None]:
    names = thread_names(pid)
    top = sorted(spent.items(), key=lambda item: -item[1])[:5]
    return {f"{names.get(tid, 'ended')} ({tid})": per_token(s, tokens) for tid, s in top}


async def loop_lag(target: Target, options: Options) -> Any:
    """What the server says of its event loop; None when it does not."""
    async with open_client(target, timeout_s=options.timeout_s) as client:
        outcome = await client.get("/props")
    try:
        props = json.loads(outcome.body)
    except ValueError:
        return None
    return props.get("loop_lag") if isinstance(props, dict) else None


def main(argv: list[str] | None = None) -> int:
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, tuple(SCENARIOS))
        reason = check_writable(options.json_out)
        if reason or options.pid is None:
            raise UsageError(reason or "--pid of the server is required")
        target = resolve_target(
            options.base_url, api_key=options.api_key, allow_remote=options.allow_remote
        )
        report = trio.run(measure, options.pid, options, target)
        if options.json_out is not None:
            write_json(options.json_out, report)
    except (UsageError, OSError) as error:
        print(f"measure_server.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report["server"], indent=2))
    rate = report["throughput"]
    print(f"{rate['tokens_per_s']} tokens/s; problems: {report['verdict']['problems'] or 'none'}")
    return 0 if report["verdict"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
