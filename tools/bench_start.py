"""Seconds from the start of the process to the first token of an answer.

    python tools/bench_start.py [--rounds 3] [server flags ...]

Each round starts a server, waits until it is ready, and streams one short answer.  The first round
may read the model from a cold disk, so the later ones count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.e2e.server import read_until, running


def start_once(flags: list[str]) -> tuple[float, float, float]:
    """Seconds until the socket is open, until ready, until the first token."""
    began = time.perf_counter()
    with running(*flags) as server:
        listening = time.perf_counter()
        server.wait_ready()
        ready = time.perf_counter()
        sock = server.open_stream(
            max_tokens=4, temperature=0, messages=[{"role": "user", "content": "Hello"}]
        )
        read_until(sock, b'"content"')
        first = time.perf_counter()
        sock.close()
    return listening - began, ready - began, first - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options, flags = parser.parse_known_args()
    rows = [start_once(flags) for _ in range(options.rounds)]
    for number, (listening, ready, first) in enumerate(rows, 1):
        print(
            f"round {number}: socket open {listening:.2f} s, ready {ready:.2f} s, "
            f"first token {first:.2f} s"
        )
    later = rows[1:] or rows
    print(f"median of the later rounds: {statistics.median(row[2] for row in later):.2f} s")


if __name__ == "__main__":
    main()
