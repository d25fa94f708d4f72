"""Peak resident memory of this server against what weights and caches need by hand (Linux).

    python tools/bench_memory.py [--slots 8] [--context 2048] [--prompt-tokens 1800] [server flags]

Fills every slot to its last token at the same time: each stream sends about ``--prompt-tokens`` and
decodes until its context is full.  By hand: the bytes of the weights plus slots x context x bytes
per token, and with the prompt cache on also what it holds at the end.  Prints one line per figure.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio

from tools.benchkit.servers import Running, our_server, started
from tools.load import run_scenario
from tools.loadgen.client import open_client
from tools.loadgen.options import Options
from tools.loadgen.target import UsageError

MIB = 1 << 20


def peak_bytes(pid: int) -> int:
    """VmHWM of a process.  Raises UsageError."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError as error:
        raise UsageError(f"cannot read process {pid}: {error}") from None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    if found is None:
        raise UsageError("this system does not tell the peak of a process")
    return int(found[1]) * 1024


async def get(server: Running, path: str) -> Any:
    async with open_client(server.target, timeout_s=30.0) as client:
        return json.loads((await client.get(path)).body)


async def measure(options: argparse.Namespace, flags: tuple[str, ...]) -> dict[str, float]:
    spec = our_server(
        options.model,
        parallel=options.slots,
        threads=options.threads,
        extra=("--ctx-size", str(options.slots * options.context), *flags),
    )
    load = Options(
        scenario="uniform",
        concurrency=options.slots,
        requests=options.slots,
        max_tokens=options.context,
        prompt_tokens=options.prompt_tokens,
        ignore_eos=True,
        timeout_s=3600.0,
        max_time_s=3600.0,
    )
    async with started(spec) as server:
        engine = (await get(server, "/props"))["engine"]
        at_start = peak_bytes(server.pid)
        report, _ = await run_scenario(load, server.target)
        peak = peak_bytes(server.pid)
        kept = (await get(server, "/v1/cache/stats"))["bytes"]
    if report["requests"]["ok"] != options.slots:
        raise UsageError(f"not every stream was served: {report['requests']}")
    caches = options.slots * options.context * engine["kv_bytes_per_token"]
    by_hand = engine["weight_bytes"] + caches + kept
    return {
        "weights MiB": engine["weight_bytes"] / MIB,
        f"caches of {options.slots} x {options.context} tokens MiB": caches / MIB,
        "kept in the prompt cache at the end MiB": kept / MIB,
        "by hand MiB": by_hand / MIB,
        "peak after start MiB": at_start / MIB,
        "peak MiB": peak / MIB,
        "peak / by hand": peak / by_hand,
        "tokens decoded": float(report["tokens"]["total"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--slots", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="tokens per slot (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="words (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the BLAS (%(default)s)")
    options, flags = parser.parse_known_args()
    try:
        for name, value in trio.run(measure, options, tuple(flags)).items():
            print(f"{name}: {value:.3f}" if value < 10 else f"{name}: {value:.0f}")
    except UsageError as error:
        print(f"bench_memory.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
