"""The compute thread and the engine on top of it, with real threads and no model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from models.backend import BackendFatal
from models.compute_thread import ComputeThread
from models.engine import EngineDead, EngineError, EngineInfo, StepPlan, StepResult
from models.threaded_engine import ThreadedEngine

INFO = EngineInfo(model_type="fake", vocab_size=4, context_length=8, kv_bytes_per_token=1)


class FakeBackend:
    """Answers every step; ``on_step`` runs on the thread first."""

    info = INFO

    def __init__(self) -> None:
        self.on_step: Callable[[StepPlan], object] = lambda plan: None
        self.calls: list[str] = []

    def step(self, plan: StepPlan) -> StepResult:
        self.calls.append(f"step {plan.step}")
        self.on_step(plan)
        return StepResult(step=plan.step, tokens={})

    def reset(self) -> None:
        self.calls.append("reset")

    def close(self) -> None:
        self.calls.append("close")


class Gate:
    """Holds a job on the compute thread until it is opened."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()

    def hold(self, *_: object) -> str:
        self._entered.set()
        assert self._open.wait(10)
        return "held"

    async def entered(self) -> None:
        assert await trio.to_thread.run_sync(self._entered.wait, 10)

    def open(self) -> None:
        self._open.set()


@contextmanager
def gate() -> Iterator[Gate]:
    made = Gate()
    try:
        yield made
    finally:
        made.open()


def fail() -> None:
    raise ValueError("no such thing")


def leave() -> None:
    raise SystemExit(3)


async def test_jobs_run_in_order_on_one_thread() -> None:
    thread = ComputeThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        order: list[int] = []

        def job(number: int) -> tuple[int, int]:
            order.append(number)
            return number, threading.get_ident()

        jobs = [thread.submit(lambda number=number: job(number)) for number in range(20)]
        results = [await handle.wait() for handle in reversed(jobs)]
        assert order == list(range(20))
        assert [number for number, _ in results] == list(reversed(range(20)))
        idents = {ident for _, ident in results}
        assert len(idents) == 1
        assert threading.get_ident() not in idents
        thread.stop()
    assert not thread.alive


async def test_jobs_queued_before_the_start_run() -> None:
    thread = ComputeThread()
    job = thread.submit(lambda: 7)
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        assert await job.wait() == 7
        assert await thread.run_job(lambda: 8) == 8
        nursery.cancel_scope.cancel()


async def test_an_exception_goes_to_the_waiter() -> None:
    thread = ComputeThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        job = thread.submit(fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="no such thing"):
                await job.wait()
        assert await thread.run_job(lambda: 1) == 1
        nursery.cancel_scope.cancel()


async def test_a_cancelled_waiter_drops_the_outcome() -> None:
    thread = ComputeThread()
    with gate() as held:
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            job = thread.submit(held.hold)
            await held.entered()
            with trio.CancelScope() as scope:
                scope.cancel()
                await job.wait()
            assert scope.cancelled_caught
            held.open()
            assert await job.wait() == "held"  # it ran to its end
            nursery.cancel_scope.cancel()


async def test_cancelling_ends_the_thread_after_the_running_job() -> None:
    thread = ComputeThread()
    ran: list[str] = []
    with gate() as held:
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            running = thread.submit(held.hold)
            queued = thread.submit(lambda: ran.append("queued"))
            await held.entered()
            nursery.cancel_scope.cancel()
            assert thread.alive
            held_open = threading.Timer(0.05, held.open)
            held_open.start()
        assert not thread.alive
        assert ran == []
        with pytest.raises(EngineDead):
            await queued.wait()
        with pytest.raises(EngineDead):
            await thread.run_job(lambda: 1)
        assert running.done


async def test_a_dying_thread_fails_every_job() -> None:
    thread = ComputeThread()
    with gate() as held, pytest.RaisesGroup(EngineDead, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            jobs: list[Any] = [thread.submit(held.hold), thread.submit(leave)]
            jobs.append(thread.submit(lambda: 1))
            held.open()
            with trio.CancelScope(shield=True):
                assert await jobs[0].wait() == "held"
                for job in jobs[1:]:
                    with pytest.raises(EngineDead):
                        await job.wait()
                with pytest.raises(EngineDead):
                    await thread.run_job(lambda: 1)
    assert not thread.alive


async def test_a_step_and_its_result() -> None:
    thread, backend = ComputeThread(), FakeBackend()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        engine = await ThreadedEngine.load(thread, lambda: backend)
        assert engine.info is INFO
        assert engine.alive
        for step in range(3):
            engine.start_step(StepPlan(step=step))
            with pytest.raises(AssertionError):
                engine.start_step(StepPlan(step=99))
            assert (await engine.wait_step()).step == step
        await engine.close()
        assert not engine.alive
        assert backend.calls == ["step 0", "step 1", "step 2", "close"]
        nursery.cancel_scope.cancel()


async def test_loading_fails_with_its_own_error() -> None:
    thread = ComputeThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)

        def factory() -> FakeBackend:
            raise FileNotFoundError("no model")

        with pytest.raises(FileNotFoundError):
            await ThreadedEngine.load(thread, factory)
        nursery.cancel_scope.cancel()


async def test_a_failing_step_is_an_engine_error() -> None:
    thread, backend = ComputeThread(), FakeBackend()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        engine = ThreadedEngine(thread, backend)
        backend.on_step = lambda plan: fail()
        engine.start_step(StepPlan(step=1))
        with pytest.raises(EngineError) as caught:
            await engine.wait_step()
        assert not isinstance(caught.value, EngineDead)
        assert isinstance(caught.value.__cause__, ValueError)
        assert engine.alive
        await engine.reset()
        backend.on_step = lambda plan: None
        engine.start_step(StepPlan(step=2))
        assert (await engine.wait_step()).step == 2
        nursery.cancel_scope.cancel()


async def test_reset_waits_for_the_step_and_forgets_its_result() -> None:
    thread, backend = ComputeThread(), FakeBackend()
    with gate() as held:
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            engine = ThreadedEngine(thread, backend)
            backend.on_step = held.hold
            engine.start_step(StepPlan(step=1))
            await held.entered()
            with trio.CancelScope() as scope:
                scope.cancel()
                await engine.wait_step()
            assert scope.cancelled_caught
            with pytest.raises(AssertionError):
                engine.start_step(StepPlan(step=2))  # the first is still in flight
            nursery.start_soon(engine.reset)
            await trio.testing.wait_all_tasks_blocked()
            assert backend.calls == ["step 1"]
            engine.start_step(StepPlan(step=3))
            held.open()
            assert (await engine.wait_step()).step == 3
            assert backend.calls == ["step 1", "reset", "step 3"]
            nursery.cancel_scope.cancel()


async def test_a_fatal_backend_error_kills_the_engine() -> None:
    thread, backend = ComputeThread(), FakeBackend()

    def break_down(plan: StepPlan) -> None:
        raise BackendFatal("the device is gone")

    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        engine = ThreadedEngine(thread, backend)
        backend.on_step = break_down
        engine.start_step(StepPlan(step=1))
        with pytest.raises(EngineDead, match="the device is gone"):
            await engine.wait_step()
        assert not engine.alive
        with pytest.raises(EngineDead):
            await engine.reset()
        nursery.cancel_scope.cancel()


async def test_a_step_that_does_not_end_kills_the_engine() -> None:
    thread, backend = ComputeThread(), FakeBackend()
    with gate() as held:
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            engine = ThreadedEngine(thread, backend, step_timeout_s=0.05)
            backend.on_step = held.hold
            engine.start_step(StepPlan(step=1))
            with pytest.raises(EngineDead):
                await engine.wait_step()
            assert not engine.alive
            with pytest.raises(EngineDead):
                await engine.reset()
            held.open()
            nursery.cancel_scope.cancel()


async def test_the_death_of_the_thread_kills_the_engine() -> None:
    thread, backend = ComputeThread(), FakeBackend()
    with pytest.RaisesGroup(EngineDead, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            engine = ThreadedEngine(thread, backend)
            backend.on_step = lambda plan: leave()
            engine.start_step(StepPlan(step=1))
            with trio.CancelScope(shield=True):
                with pytest.raises(EngineDead):
                    await engine.wait_step()
                assert not engine.alive
                engine.start_step(StepPlan(step=2))
                with pytest.raises(EngineDead):
                    await engine.wait_step()
