"""The seeded task order must really be seeded, or every replay is a lie."""

from __future__ import annotations

import subprocess
import sys

import trio
import trio.testing

from tests.sim.schedule import seeded_schedule


def order(seed: int, tasks: int = 8, turns: int = 5) -> list[int]:
    """Who ran when, of some tasks that are always ready together."""
    ran: list[int] = []

    async def worker(number: int) -> None:
        for _ in range(turns):
            ran.append(number)
            await trio.lowlevel.checkpoint()

    async def sleeper(number: int) -> None:
        await trio.sleep(1.0)  # equal deadlines, so ready together
        ran.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(tasks):
                nursery.start_soon(worker, number)
                nursery.start_soon(sleeper, 100 + number)

    with seeded_schedule(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return ran


def test_same_seed_same_order() -> None:
    assert order(1) == order(1)
    assert order(7) == order(7)


def test_different_seeds_differ() -> None:
    assert len({tuple(order(seed)) for seed in range(8)}) == 8


def test_the_switch_is_put_back() -> None:
    from trio._core import _run

    before = (_run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate())
    order(3)
    assert (_run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate()) == before


def test_same_order_in_another_process() -> None:
    code = "from tests.sim.test_schedule import order; print(order(5))"
    for hash_seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == str(order(5))
