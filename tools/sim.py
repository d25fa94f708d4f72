"""Replay simulated runs of the whole runtime by seed, with every invariant checked.

    python -m tools.sim --seed 17 --journal        the run of one seed, entry by entry
    python -m tools.sim --seed 17 --requests       the same, request by request
    python -m tools.sim --seed 1000 --count 500    many seeds; stops at none, lists what failed

The exit code is 1 if an invariant does not hold.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.sim import coverage
from tests.sim.checkers import CHECKERS
from tests.sim.run import CheckFailed
from tests.sim.world import WorldResult, run_plan
from tests.sim.world_plan import WorldPlan, make_plan
from tools.trace import stories, timeline, to_jsonl


def summary(plan: WorldPlan) -> str:
    """What the seed decided, in a few lines."""
    moods = Counter(client.mood.value for client in plan.clients)
    lines = [
        f"seed {plan.seed}: {len(plan.clients)} clients, ends: {plan.ending.value}",
        f"  limits  {plan.limits}",
        f"  moods   {', '.join(f'{count} {mood}' for mood, count in sorted(moods.items()))}",
        f"  engine  {plan.engine}",
        f"  crashes {dict(plan.crashes) or 'none'}",
    ]
    return "\n".join(lines)


def violations(result: WorldResult) -> list[str]:
    found = []
    for checker in CHECKERS.values():
        try:
            checker(result.run)
        except CheckFailed as error:
            found.append(str(error))
    return found


def replay(seed: int, arguments: argparse.Namespace, met: set[str]) -> list[str]:
    """Run one seed, print what was asked for, and return what is wrong with it."""
    plan = make_plan(seed)
    verbose = arguments.count == 1
    if verbose:
        print(summary(plan))
    try:
        result = run_plan(plan)
    except (Exception, BaseExceptionGroup) as error:  # a bug may raise anything: report the seed
        return [f"{type(error).__name__}: {error}"]
    if arguments.journal:
        print("\n".join(timeline(result.journal)))
    if arguments.requests:
        print("\n".join(stories(result.journal)))
    if arguments.dump is not None:
        lines = "\n".join(to_jsonl(result.journal))
        arguments.dump.write_text(lines + "\n", encoding="utf-8")
    situations = coverage.situations(result.run)
    met |= situations
    if verbose:
        print(f"  met     {', '.join(sorted(situations))}")
        print(f"  {len(result.journal)} entries, {result.steps} task steps")
    return violations(result)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.sim", description="Replay simulated runs.")
    parser.add_argument("--seed", type=int, required=True, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--journal", action="store_true", help="print the timeline")
    parser.add_argument("--requests", action="store_true", help="print one story per request")
    parser.add_argument("--dump", type=Path, help="write the journal of the (last) seed here")
    arguments = parser.parse_args(argv)
    failed = 0
    met: set[str] = set()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        wrong = replay(seed, arguments, met)
        failed += bool(wrong)
        for line in wrong:
            print(f"seed {seed} FAILED {line}")
        done = seed - arguments.seed + 1
        if arguments.count > 1 and sys.stderr.isatty():
            print(f"\r{done}/{arguments.count} seeds, {failed} failed", end="", file=sys.stderr)
    if arguments.count > 1:
        missing = [name for name in coverage.REQUIRED if name not in met]
        print(f"\n{arguments.count} seeds, {failed} failed; never met: {missing or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
