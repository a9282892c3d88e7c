"""One thread steps; the loop hands in and receives. Over a fake executor that is a pure function of the tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from engine.engine_fakes import make_engine

from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.engine import Engine
from anaphora.engine.outputs import RequestOutput
from anaphora.engine.request_group import NewRequest, RequestGroup
from anaphora.errors import EngineStoppedError, InvalidTokenError, PromptTooLongError
from anaphora.sampling_params import SamplingParams


def new(*token_ids: int, max_tokens: int = 4) -> NewRequest:
    return NewRequest(list(token_ids), SamplingParams(max_tokens=max_tokens))


def slow_engine() -> Engine:
    """Each step takes a while, so that a long request still runs when a test looks."""
    engine, executor, _ = make_engine()
    executor.before = lambda plan: time.sleep(0.005)
    return engine


def on_loop(test: Callable[[AsyncEngine], Awaitable[None]], engine: AsyncEngine) -> None:
    async def main() -> None:
        engine.start()
        try:
            await asyncio.wait_for(test(engine), 20)
        finally:
            await engine.stop()

    asyncio.run(main())


async def outputs_of(group: RequestGroup) -> dict[int, RequestOutput]:
    outputs = {}
    while batch := await group.receive():
        outputs |= {index: step.output for index, step in batch if step.output is not None}
    return outputs


def test_groups_get_their_own_outputs_and_nothing_stays() -> None:
    engine, _, _ = make_engine()
    alone, _, _ = make_engine()
    alone.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4))
    expected = None
    while alone.has_unfinished:
        for step in alone.step():
            expected = step.output.outputs[0].token_ids if step.output else expected

    async def test(running: AsyncEngine) -> None:
        groups = [running.submit([new(i, 6, 7), new(5, 6, 7)]) for i in range(20)]
        for group in groups:
            await group.accepted()
            outputs = await outputs_of(group)
            assert outputs[1].outputs[0].token_ids == expected
            assert sorted(outputs) == [0, 1]
        assert running.num_unfinished == 0
        assert running.stats.gauges.num_live_blocks == 0
        assert running.stats.counters.num_finished_requests == 40

    on_loop(test, AsyncEngine(engine))


def test_a_group_is_accepted_as_a_whole_or_not_at_all() -> None:
    async def test(running: AsyncEngine) -> None:
        group = running.submit([new(1, 2), new(1, 999)])
        with pytest.raises(InvalidTokenError):
            await group.accepted()
        group.close()
        with pytest.raises(PromptTooLongError):
            await running.submit([new(*[1] * 1000)]).accepted()
        assert running.stats.counters.num_finished_requests == 0
        assert running.engine.num_unfinished == 0

    on_loop(test, AsyncEngine(make_engine()[0]))


def test_nothing_waits_for_a_step_but_what_changes_the_engine() -> None:
    engine, executor, _ = make_engine()
    entered, leave = threading.Event(), threading.Event()

    def block(plan: object) -> None:
        entered.set()
        assert leave.wait(20)

    executor.before = block

    async def test(running: AsyncEngine) -> None:
        group = running.submit([new(1, 2)])
        await asyncio.to_thread(entered.wait)
        assert running.is_running
        running.stats  # noqa: B018
        second = running.submit([new(3, 4)])
        reset = asyncio.ensure_future(running.reset_prefix_cache())
        await asyncio.sleep(0.05)
        assert not reset.done()
        leave.set()
        assert await reset is False  # the first request holds blocks
        await outputs_of(group)
        await outputs_of(second)
        assert await running.reset_prefix_cache() is True

    on_loop(test, AsyncEngine(engine))


def test_closing_a_group_frees_its_blocks_while_others_go_on() -> None:
    async def test(running: AsyncEngine) -> None:
        long = running.submit([new(1, 2, max_tokens=190), new(3, 4, max_tokens=190)])
        short = running.submit([new(5, 6)])
        await long.receive()
        long.close()
        long.close()
        assert len(await outputs_of(short)) == 1
        await running.reset_prefix_cache()  # behind the abort
        gauges = running.stats.gauges
        assert (gauges.num_live_blocks, gauges.num_running, gauges.num_waiting) == (0, 0, 0)
        assert running.stats.counters.num_aborted_requests == 2

    on_loop(test, AsyncEngine(slow_engine()))


def test_a_crash_of_the_thread_fails_every_stream_and_every_later_call() -> None:
    engine, _, _ = make_engine()
    engine.step = lambda: 1 / 0  # type: ignore[assignment, method-assign]

    async def test(running: AsyncEngine) -> None:
        group = running.submit([new(1, 2)])
        with pytest.raises(EngineStoppedError, match="ZeroDivisionError"):
            await group.receive()
        assert not running.is_running
        with pytest.raises(EngineStoppedError):
            await running.submit([new(1, 2)]).accepted()
        with pytest.raises(EngineStoppedError):
            await running.reset_prefix_cache()

    on_loop(test, AsyncEngine(engine))


def test_a_failed_step_ends_its_requests_and_the_engine_serves_on() -> None:
    engine, executor, _ = make_engine()

    async def test(running: AsyncEngine) -> None:
        executor.failed = {"0-0"}
        outputs = await outputs_of(running.submit([new(1, 2)]))
        assert outputs[0].error == "non-finite logits"
        outputs = await outputs_of(running.submit([new(1, 2)]))
        assert outputs[0].error is None

    on_loop(test, AsyncEngine(engine))


def test_stopping_fails_what_runs() -> None:
    async def main() -> None:
        running = AsyncEngine(slow_engine())
        running.start()
        group = running.submit([new(1, 2, max_tokens=190)])
        await group.accepted()
        await running.stop()
        with pytest.raises(EngineStoppedError):
            while await group.receive():
                pass
        await running.stop()

    asyncio.run(main())
