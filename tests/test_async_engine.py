"""The engine behind a thread: streams, refusals, aborts, failures and the end. On a device whose tokens are known."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from fake_device import VOCAB_SIZE, FakeDevice, make_scheduler

from vllm_mini.async_engine import AsyncLLMEngine, EngineError, EngineStopped, OutputStream
from vllm_mini.engine import LLMEngine, StepError, TokenOutput
from vllm_mini.scheduler import SchedulerOutput, SequenceOutput
from vllm_mini.sequence import RequestError, SamplingParams

DEADLINE = 10.0  # seconds


class SteeredDevice(FakeDevice):
    """A fake device that can be held, can be told to fail, and counts its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures: list[BaseException] = []
        self.num_steps = 0
        self._num_allowed = math.inf
        self._changed = threading.Condition()

    def allow(self, num_steps: float) -> None:
        """Steps that may be made from now on; 0 holds the device."""
        with self._changed:
            self._num_allowed = num_steps
            self._changed.notify()

    def execute(self, output: SchedulerOutput) -> list[SequenceOutput]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_allowed > 0, DEADLINE)
            self._num_allowed -= 1
        self.num_steps += 1
        if self.failures:
            raise self.failures.pop(0)
        return super().execute(output)


def make_llm_engine(num_blocks: int = 64, *, errors: dict[tuple[int, int], int] | None = None,
                    **config: Any) -> LLMEngine:
    scheduler = make_scheduler(num_blocks, **config)
    return LLMEngine(scheduler, SteeredDevice(scheduler.block_manager, errors=errors), None, vocab_size=VOCAB_SIZE)


@contextlib.asynccontextmanager
async def running(engine: LLMEngine | None = None, **settings: Any) -> AsyncIterator[AsyncLLMEngine]:
    served = AsyncLLMEngine(engine or make_llm_engine(), **settings)
    served.start()
    try:
        yield served
    finally:
        release(served)
        await served.shutdown()


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 1, **fields})


def device_of(served: AsyncLLMEngine) -> SteeredDevice:
    assert isinstance(served.engine.worker, SteeredDevice)
    return served.engine.worker


def hold(served: AsyncLLMEngine) -> None:
    device_of(served).allow(0)


def release(served: AsyncLLMEngine) -> None:
    device_of(served).allow(math.inf)


async def add_held(served: AsyncLLMEngine, requests: dict[str, SamplingParams]) -> dict[str, OutputStream]:
    """Add requests to an idle engine and hold its device: the first one has made one step, the others none."""
    hold(served)
    names = list(requests)
    streams = [await served.add(names[0], [1, 2, 3], requests[names[0]])]
    adding = [asyncio.ensure_future(served.add(name, [1, 2, 3], requests[name])) for name in names[1:]]
    await asyncio.sleep(0)  # a request is accepted between two steps
    device_of(served).allow(1)
    streams += await asyncio.gather(*adding)
    return dict(zip(names, streams))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))


async def read(stream: OutputStream) -> dict[int, list[int]]:
    """The token ids of each choice."""
    found: dict[int, list[int]] = {}
    async for output in stream:
        found.setdefault(output.index, []).extend(output.token_ids)
    return found


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until the condition holds; the test's own deadline ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)


async def drained(served: AsyncLLMEngine) -> None:
    scheduler = served.engine.scheduler
    await until(lambda: not scheduler.has_unfinished() and not scheduler.block_manager.num_used_blocks)
    scheduler.check()


def run_directly(requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    """What the engine answers without a thread."""
    engine = make_llm_engine()
    found: dict[str, list[int]] = {}
    for request_id, (token_ids, request_params) in requests.items():
        engine.add_request(request_id, token_ids, request_params)
    while engine.has_unfinished():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def test_streams_bring_what_the_engine_computes_to_whoever_asked() -> None:
    requests = {f"r{i}": ([i % VOCAB_SIZE] * (i + 1), params(3 + i, seed=i)) for i in range(8)}

    async def test() -> None:
        async with running() as served:
            streams = [await served.add(request_id, *request) for request_id, request in requests.items()]
            answers = await asyncio.gather(*map(read, streams))
            assert [answer[0] for answer in answers] == list(run_directly(requests).values())
            assert (served.num_running, served.num_waiting) == (0, 0)

    run(test)


def test_a_refused_request_raises_when_it_is_added_and_leaves_nothing() -> None:
    async def test() -> None:
        async with running() as served:
            for token_ids, wrong in (([9], params()), ([1] * 600, params()), ([1], params(n=65))):
                with pytest.raises(RequestError):
                    await served.add("a", token_ids, wrong)
            assert await read(await served.add("a", [1], params(2)))
            await drained(served)

    run(test)


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async def test() -> None:
        async with running() as served:
            hold(served)
            stream = await served.add("a", [1, 2], params(50))
            with pytest.raises(RequestError, match="in use"):
                await served.add("a", [1], params())
            release(served)
            assert len((await read(stream))[0]) == 50

    run(test)


def test_a_fault_while_a_request_is_added_ends_that_request_only() -> None:
    async def test() -> None:
        async with running() as served:
            with pytest.raises(EngineError):
                await served.add("a", None, params())  # type: ignore[arg-type]
            assert served.is_healthy
            assert await read(await served.add("b", [1], params(2)))

    run(test)


def test_a_slow_reader_costs_one_output_for_each_choice_and_loses_nothing() -> None:
    async def test() -> None:
        async with running() as served:
            stream = await served.add("a", [1, 2], params(200, n=3))
            await drained(served)
            await asyncio.sleep(0)
            outputs = [output async for output in stream]
            assert len(outputs) == 3
            assert [len(output.token_ids) for output in outputs] == [200] * 3
            assert [output.finish_reason for output in outputs] == ["length"] * 3

    run(test)


def test_a_step_calls_the_event_loop_once_however_many_requests_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running() as served:
            hold(served)
            streams = [await served.add("first", [1], params(20))]
            loop = asyncio.get_running_loop()
            calls = []
            original = loop.call_soon_threadsafe
            monkeypatch.setattr(loop, "call_soon_threadsafe",
                                lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
            adding = [asyncio.ensure_future(served.add(f"r{i}", [i % VOCAB_SIZE], params(20))) for i in range(16)]
            await asyncio.sleep(0)
            release(served)
            streams += await asyncio.gather(*adding)
            await asyncio.gather(*map(read, streams))
            assert len(calls) <= device_of(served).num_steps + 1  # and one for the acceptance of all 16

    run(test)


@pytest.mark.parametrize("n", [1, 4])
def test_AB_06_closing_a_stream_aborts_all_its_choices_and_frees_their_blocks(n: int) -> None:
    async def test() -> None:
        async with running() as served:
            device_of(served).allow(3)
            stream = await served.add("a", [1, 2, 3], params(400, n=n))
            await anext(stream)
            stream.close()
            release(served)
            await drained(served)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert device_of(served).num_steps <= 4

    run(test)


def test_a_stream_that_was_read_to_its_end_may_be_closed() -> None:
    async def test() -> None:
        async with running() as served:
            stream = await served.add("a", [1], params(2))
            await read(stream)
            stream.close()
            assert await read(await served.add("a", [1], params(2)))

    run(test)


def test_cancelling_the_reader_aborts_the_request() -> None:
    async def test() -> None:
        async with running() as served:
            device_of(served).allow(3)
            task = asyncio.ensure_future(read(await served.add("a", [1], params(400))))
            await asyncio.sleep(0)  # it begins to read
            await until(lambda: device_of(served).num_steps == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release(served)
            await drained(served)
            assert device_of(served).num_steps <= 4

    run(test)


def test_cancelling_whoever_waits_for_acceptance_aborts_the_request() -> None:
    async def test() -> None:
        async with running() as served:
            hold(served)
            first = await served.add("a", [1], params(5))
            await until(lambda: served.num_running)
            task = asyncio.ensure_future(served.add("b", [1], params(500)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release(served)
            assert len((await read(first))[0]) == 5
            await drained(served)

    run(test)


def test_AB_03_requests_that_wait_can_be_aborted_and_never_run() -> None:
    async def test() -> None:
        engine = make_llm_engine(max_num_seqs=1)
        async with running(engine) as served:
            streams = await add_held(served, {f"r{i}": params(6) for i in range(1, 7)})
            await until(lambda: served.num_running == 1)
            assert served.num_waiting == 5
            streams["r3"].close()
            served.abort("r5")
            release(served)
            answers = {name: await read(streams[name]) for name in ("r1", "r2", "r4", "r6")}
            assert [len(answer[0]) for answer in answers.values()] == [6] * 4
            with pytest.raises(EngineStopped):
                await read(streams["r5"])
            await drained(served)
            assert device_of(served).num_steps == 4 * 6  # nothing was computed for the others

    run(test)


def test_abort_from_another_thread_ends_the_stream_within_a_step() -> None:
    async def test() -> None:
        async with running() as served:
            device_of(served).allow(2)
            stream = await served.add("a", [1], params(400))
            await anext(stream)
            thread = threading.Thread(target=served.abort, args=("a",))
            thread.start()
            await asyncio.to_thread(thread.join)
            release(served)
            with pytest.raises(EngineStopped):
                await read(stream)
            assert device_of(served).num_steps <= 3
            await drained(served)
            served.abort("a")  # gone, and never known: both are fine
            served.abort("b")

    run(test)


def test_several_requests_share_a_stream() -> None:
    async def test() -> None:
        async with running() as served:
            stream = await served.add("a", [1], params(3))
            assert await served.add("b", [2], params(5, n=2), stream=stream) is stream
            found = [output async for output in stream]
            last = {(output.request_id, output.index): output for output in found}
            assert {key: output.num_output_tokens for key, output in last.items()} == {
                ("a", 0): 3, ("b", 0): 5, ("b", 1): 5}

    run(test)


def test_a_refused_request_takes_the_others_of_its_stream_with_it() -> None:
    async def test() -> None:
        async with running() as served:
            stream = await served.add("a", [1], params(500))
            with pytest.raises(RequestError):
                await served.add("b", [99], params(), stream=stream)
            await drained(served)

    run(test)


def test_requests_that_share_a_stream_are_accepted_together_or_not_at_all() -> None:
    async def test() -> None:
        async with running() as served:
            for last, is_refused in (([1], False), ([99], True)):
                await add_held(served, {"busy": params(500)})
                stream = served.open_stream()
                adding = [asyncio.ensure_future(served.add(f"r{i}", token_ids, params(4), stream=stream))
                          for i, token_ids in enumerate([[2], last, [3], [4]])]
                await asyncio.sleep(0)
                device_of(served).allow(1)
                results = await asyncio.gather(*adding, return_exceptions=True)  # nobody waits for another step
                assert [isinstance(result, RequestError) for result in results] == [False, is_refused, False, False]
                served.abort("busy")
                release(served)
                assert len([output async for output in stream if output.finish_reason]) == (0 if is_refused else 4)
                await drained(served)

    run(test)


def test_a_failed_step_ends_what_ran_with_an_error_and_serves_what_waited() -> None:
    async def test() -> None:
        engine = make_llm_engine(max_num_seqs=2)
        async with running(engine) as served:
            streams = await add_held(served, {name: params(5) for name in "abc"})
            device_of(served).failures.append(RuntimeError("cuda says no"))
            release(served)
            results = await asyncio.gather(*map(read, streams.values()), return_exceptions=True)
            assert [type(result) for result in results] == [EngineError, EngineError, dict]
            assert "cuda" not in str(results[0])  # that is for the log
            assert served.is_healthy
            await drained(served)
            assert await read(await served.add("again", [1, 2, 3], params(5)))

    run(test)


def test_logits_that_are_no_numbers_end_only_the_request_that_has_them() -> None:
    async def test() -> None:
        async with running(make_llm_engine(errors={(7, 0): 5})) as served:
            bad = await served.add("bad", [1, 2], params(10, seed=7))
            good = await served.add("good", [1, 2], params(10, seed=8))
            with pytest.raises(EngineError):
                await read(bad)
            assert len((await read(good))[0]) == 10
            await drained(served)

    run(test)


async def check_death(served: AsyncLLMEngine, deaths: list[bool], streams: list[OutputStream]) -> None:
    """Everybody hears of it, nobody waits."""
    for stream in streams:
        with pytest.raises(EngineError):
            await read(stream)
    await until(lambda: deaths)
    assert deaths == [True]
    assert not served.is_healthy
    assert not served.is_accepting
    with pytest.raises(EngineError):
        await served.add("late", [1], params())


def test_three_failed_steps_in_a_row_are_the_end_of_the_engine() -> None:
    async def test() -> None:
        deaths: list[bool] = []
        async with running(make_llm_engine(max_num_seqs=1), on_dead=lambda: deaths.append(True)) as served:
            device = device_of(served)
            device.failures += [RuntimeError("no"), RuntimeError("no")]
            for name in "ab":
                with pytest.raises(EngineError):
                    await read(await served.add(name, [1], params()))
            assert await read(await served.add("c", [1], params(2)))  # a good one in between begins the count anew
            streams = await add_held(served, {f"r{i}": params() for i in range(5)})
            device.failures += [RuntimeError("no")] * 3
            release(served)
            await check_death(served, deaths, list(streams.values()))

    run(test)


@pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt(), MemoryError()],
                         ids=lambda one: type(one).__name__)
def test_a_thread_that_dies_of_anything_tells_everybody(death: BaseException) -> None:
    async def test() -> None:
        deaths: list[bool] = []
        engine = make_llm_engine(max_num_seqs=1)
        async with running(engine, on_dead=lambda: deaths.append(True)) as served:
            streams = await add_held(served, {f"r{i}": params() for i in range(5)})
            device_of(served).failures += [death] * 3
            release(served)
            await check_death(served, deaths, list(streams.values()))

    run(test)


def test_a_failed_step_with_nobody_to_blame_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        deaths: list[bool] = []
        engine = make_llm_engine()

        def step() -> list[TokenOutput]:
            raise StepError("empty step with work left", [])

        monkeypatch.setattr(engine, "step", step)
        async with running(engine, on_dead=lambda: deaths.append(True)) as served:
            await check_death(served, deaths, [await served.add("a", [1], params())])

    run(test)


def test_shutdown_lets_accepted_requests_finish_and_refuses_new_ones() -> None:
    async def test() -> None:
        async with running(make_llm_engine(max_num_seqs=1)) as served:
            streams = await add_held(served, {name: params(20) for name in "abc"})
            readers = [asyncio.ensure_future(read(stream)) for stream in streams.values()]
            ending = asyncio.ensure_future(served.shutdown(drain_timeout=DEADLINE))
            await asyncio.sleep(0)
            assert served.is_healthy
            assert not served.is_accepting
            with pytest.raises(EngineStopped):
                await served.add("late", [1], params())
            release(served)
            assert [len((await reader)[0]) for reader in readers] == [20] * 3
            await ending
            assert not served.is_healthy
            await served.shutdown(5.0)  # again does nothing

    run(test)


def test_shutdown_aborts_what_does_not_finish_in_time() -> None:
    async def test() -> None:
        async with running() as served:
            hold(served)
            stream = await served.add("a", [1], params(500))
            ending = asyncio.ensure_future(served.shutdown(drain_timeout=0.05))
            with pytest.raises(EngineStopped, match="shutting down"):
                await read(stream)
            release(served)
            await ending
            assert not served.engine.has_unfinished()
            served.engine.scheduler.check()

    run(test)


def test_an_engine_that_was_never_started_accepts_nothing_and_shuts_down() -> None:
    async def test() -> None:
        served = AsyncLLMEngine(make_llm_engine())
        with pytest.raises(EngineError):
            await served.add("a", [1], params())
        await served.shutdown(1.0)

    run(test)
