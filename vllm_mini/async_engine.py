"""The engine apart from the HTTP loop: a thread runs its steps, async streams bring the answers. Does not know HTTP.

The thread owns the LLMEngine, the event loop owns the streams, and neither touches what is the other's. Commands go to
the thread through an inbox that it empties between steps; it sleeps on a condition while there is nothing to do. What a
step brought goes back in one callback, however many requests it served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from vllm_mini.engine import LLMEngine, StepError, TokenOutput
from vllm_mini.sequence import RequestError, SamplingParams

__all__ = ["AsyncLLMEngine", "EngineBusy", "EngineError", "EngineStopped", "OutputStream", "RequestWatcher"]

logger = logging.getLogger(__name__)

Verdict = tuple[str, Exception | None]  # request_id, and why it was refused or ended
Finding = TypeVar("Finding")


class EngineError(RuntimeError):
    """An answer was lost because the engine failed. The message is fit for a client; the log has the details."""


class EngineStopped(RuntimeError):
    """A request was refused or given up though nothing failed: the engine is shutting down, or somebody aborted it."""


class EngineBusy(RuntimeError):
    """A request was refused because too many wait already; the same one may be accepted in a while."""


class RequestWatcher(Protocol):
    """Whoever wants to know how requests come and go; called on the event loop."""

    def arrived(self, request_id: str, num_choices: int) -> None: ...

    def rejected(self) -> None: ...  # with EngineBusy; such a request never arrives

    def left(self, request_id: str, cause: str) -> None: ...  # "finished", "refused", "abort" or "error"


class OutputStream:
    """What the engine says about a request (or several, added to one stream), as it comes. Lives on the event loop.

    Outputs that wait for a slow reader are merged, so at most one for each choice is kept. Raises EngineError or
    EngineStopped where the answer breaks off. Closing it, or cancelling whoever reads it, aborts what is unfinished.
    """

    def __init__(self, abort: Callable[[str, Exception | None], None]) -> None:
        self._abort = abort
        self._num_open: dict[str, int] = {}  # request_id -> choices not yet finished
        self._pending: dict[tuple[str, int], TokenOutput] = {}
        self._has_begun = False
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        return self._pending.pop(next(iter(self._pending)))

    def close(self) -> None:
        """Let go of whatever is unfinished and unread; does nothing to a stream that was read to its end."""
        if self._timer is not None:
            self._timer.cancel()
        self._pending.clear()
        self.end(None)

    def limit_time(self, seconds: float, error: Exception) -> None:
        """Break off with `error` what is unfinished in so many seconds, requests not yet added included."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, error)

    def _expire(self, error: Exception) -> None:
        if self._num_open or not self._has_begun:
            self.end(error)

    def expect(self, request_id: str, num_choices: int) -> None:
        """For AsyncLLMEngine: the stream is not at its end before all these choices have finished.

        Raises what the stream was ended with.
        """
        if self._error is not None:
            raise self._error
        self._has_begun = True
        self._num_open[request_id] = num_choices

    def push(self, output: TokenOutput) -> bool:
        """For AsyncLLMEngine: hand over one output; True when it was the last of its request."""
        key = (output.request_id, output.index)
        earlier = self._pending.get(key)
        self._pending[key] = output if earlier is None else _merge(earlier, output)
        self._num_open[output.request_id] -= output.finish_reason is not None
        self._changed.set()
        if self._num_open[output.request_id]:
            return False
        del self._num_open[output.request_id]
        return True

    def end(self, error: Exception | None) -> None:
        """For AsyncLLMEngine: break off here, with an error or in silence, and abort what is unfinished."""
        self._error = error
        for request_id in list(self._num_open):
            self._abort(request_id, error)
        self._num_open.clear()
        self._changed.set()


def _merge(earlier: TokenOutput, later: TokenOutput) -> TokenOutput:
    return replace(later, text=earlier.text + later.text, token_ids=earlier.token_ids + later.token_ids,
                   logprobs=earlier.logprobs + later.logprobs,
                   prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs)


class _Asking(NamedTuple):
    """A request that waits for the engine's verdict."""

    num_choices: int
    verdict: asyncio.Future[Exception | None]


class AsyncLLMEngine:
    """Serves the requests of one event loop. `on_dead` is called there once the engine cannot go on.

    With `max_waiting`, what would make more choices wait than that is refused with EngineBusy.
    """

    MAX_FAILURES = 3  # failed steps in a row that it takes for a broken device
    JOIN_TIMEOUT = 5.0  # seconds that shutdown() gives the last step

    def __init__(
        self, engine: LLMEngine, *, on_dead: Callable[[], None] | None = None, max_waiting: int | None = None,
    ) -> None:
        self.engine = engine  # what never changes (tokenizer, limits, defaults) may be read from any thread
        self.max_waiting = max_waiting
        self.watchers: list[RequestWatcher] = []
        self._on_dead = on_dead
        self.between_steps: list[Callable[[], None]] = []  # called on the thread before each step; set before start()
        self.on_stop: list[Callable[[], None]] = []  # called on the event loop once no step will follow
        # shared
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Condition()
        self._is_dead = False
        # the thread's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._num_failures = 0
        self._verdicts: list[Verdict] = []
        self._seconds_between_steps = 0.0
        self._num_steps_allowed = math.inf
        self._last_step = 0.0  # time.monotonic()
        # the event loop's
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, OutputStream] = {}
        self._asking: dict[str, _Asking] = {}
        self._looking: set[asyncio.Future[Any]] = set()  # those who wait for what inspect() finds
        self._is_closing = False
        self._drained = asyncio.Event()

    @property
    def is_healthy(self) -> bool:
        """False before start(), after shutdown() and once the engine is dead."""
        return self._thread.is_alive() and not self._is_dead

    @property
    def is_accepting(self) -> bool:
        return self.is_healthy and not self._is_closing

    @property
    def num_running(self) -> int:
        """Sequences on the device; like num_waiting a glance from any thread, without a lock."""
        return len(self.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.engine.scheduler.waiting) + len(self.engine.scheduler.swapped)

    @property
    def num_requests(self) -> int:
        """Accepted and not yet at their end."""
        return len(self._streams)

    def start(self) -> None:
        """Start the thread. To be called once, on the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def open_stream(self) -> OutputStream:
        """A stream without requests yet, for several that belong together."""
        return OutputStream(self._close)

    async def add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, *, stream: OutputStream | None = None,
    ) -> OutputStream:
        """add_all with a single request."""
        return await self.add_all({request_id: token_ids}, params, stream=stream)

    async def add_all(
        self, prompts: Mapping[str, list[int]], params: SamplingParams, *, stream: OutputStream | None = None,
    ) -> OutputStream:
        """Queue requests, by their ids; returns the stream of their outputs, once the engine has accepted them (between
        two steps).

        Given a stream, the requests join it. Raises RequestError when one cannot be served, EngineBusy when they cannot
        be now, EngineStopped or EngineError when nothing can; the stream is then closed, with all that is on it.
        """
        stream = stream or self.open_stream()
        try:
            self._check_accepting(prompts)
            self.check_room(len(prompts) * params.n)
            verdicts = [self._ask(request_id, stream, params.n) for request_id in prompts]
            self._post(*(partial(self._admit, request_id, token_ids, params) for request_id, token_ids in prompts.items()))
            for error in await asyncio.gather(*verdicts):
                if error is not None:
                    raise error
        except BaseException:  # refused, or the caller was cancelled
            stream.close()
            raise
        return stream

    def check_room(self, num_choices: int = 1) -> None:
        """EngineBusy where so many more choices may not wait."""
        if self.max_waiting is None:
            return
        waiting = {seq.request_id: 1 + seq.num_forks for seq in tuple(self.engine.scheduler.waiting)}
        asking = {request_id: asking.num_choices for request_id, asking in self._asking.items()}  # or already waiting
        num_waiting = sum((waiting | asking).values())
        if num_waiting + num_choices > self.max_waiting:
            for watcher in self.watchers:
                watcher.rejected()
            raise EngineBusy(f"the server is busy: {num_waiting} of at most {self.max_waiting} requests (choices of n count "
                             "one each) are waiting; please try again later")

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its stream raises EngineStopped. Callable from any thread, for any id."""
        self._post(partial(self._abort_for_others, request_id))

    async def inspect(self, look: Callable[[], Finding]) -> Finding:
        """What `look` returns when it is called on the thread, between two steps. EngineError when no thread is left."""
        if not self.is_healthy:
            raise EngineError("the engine has stopped")
        found: asyncio.Future[Finding] = asyncio.get_running_loop().create_future()
        self._looking.add(found)
        self._post(partial(self._look, look, found))
        try:
            return await found
        finally:
            self._looking.discard(found)

    def run_between_steps(self, command: Callable[[], None]) -> None:
        """Have the thread call `command`, which must not raise, before its next step. From any thread."""
        self._post(command)

    def set_pace(self, steps_per_second: float = math.inf, num_steps: float = math.inf) -> None:
        """From now on at most so many steps a second, and `num_steps` of them in all: 0 is a pause. From any thread.

        Requests keep coming and going meanwhile. The same without arguments is the end of it.
        """
        self._post(partial(self._set_pace, 1 / steps_per_second, num_steps))

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, give the accepted ones so many seconds to finish, abort the rest and stop the thread.

        `cut_short` ends those seconds at once.
        """
        self._is_closing = True
        self.set_pace()
        if self._streams and self.is_healthy:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained.wait(), drain_timeout)
        for stream in set(self._streams.values()):
            stream.end(EngineStopped("the server is shutting down and had no time left to finish this answer"))
        self._post(self._stop)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, self.JOIN_TIMEOUT)
        self._say_stopped()

    def cut_short(self) -> None:
        """Let a shutdown that waits for answers wait no longer."""
        self._drained.set()

    # ---- on the event loop ----

    def _check_accepting(self, request_ids: Mapping[str, Any]) -> None:
        if self._is_closing:
            raise EngineStopped("the server is shutting down")
        if not self.is_healthy:
            raise EngineError("the engine has stopped after an error")
        for request_id in request_ids:
            if request_id in self._streams:
                raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _ask(self, request_id: str, stream: OutputStream, num_choices: int) -> asyncio.Future[Exception | None]:
        """Enter a request that is about to be posted; the future brings the verdict."""
        stream.expect(request_id, num_choices)
        self._streams[request_id] = stream
        asking = self._asking[request_id] = _Asking(num_choices, asyncio.get_running_loop().create_future())
        for watcher in self.watchers:
            watcher.arrived(request_id, num_choices)
        return asking.verdict

    def _answer(self, request_id: str, error: Exception | None) -> bool:
        """Tell whoever added a request; False when nobody waits to hear."""
        asking = self._asking.pop(request_id, None)
        if asking is None or asking.verdict.done():
            return False
        asking.verdict.set_result(error)
        return True

    def _post(self, *commands: Callable[[], None]) -> None:
        with self._wakeup:
            self._inbox.extend(commands)
            self._wakeup.notify()

    def _forget(self, request_id: str, cause: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            for watcher in self.watchers:
                watcher.left(request_id, cause)
        if not self._streams and self._is_closing:
            self._drained.set()

    def _close(self, request_id: str, error: Exception | None) -> None:
        """A stream lets go of a request."""
        self._answer(request_id, None)  # whoever added it finds the stream closed
        self._forget(request_id, "error" if isinstance(error, EngineError) else "abort")
        self._post(partial(self.engine.abort_request, request_id))

    def _receive(self, verdicts: list[Verdict], outputs: list[TokenOutput]) -> None:
        """Hand out what the thread sent; what nobody waits for any more is dropped."""
        for request_id, error in verdicts:
            if self._answer(request_id, error):
                if error is not None:
                    self._forget(request_id, "refused")
            elif error is not None and request_id in self._streams:
                self._streams[request_id].end(error)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and output.finish_reason == "error":
                stream.end(EngineError("the engine failed while it computed this answer"))
            elif stream is not None and stream.push(output):
                self._forget(output.request_id, "finished")

    def _found(self, future: asyncio.Future[Any], finding: Any, error: Exception | None) -> None:
        if future.done():  # whoever asked was cancelled
            return
        if error is None:
            future.set_result(finding)
        else:
            future.set_exception(error)

    def _say_stopped(self) -> None:
        for future in self._looking:
            if not future.done():
                future.set_exception(EngineError("the engine has stopped"))
        for callback in self.on_stop:
            callback()

    def _bury(self) -> None:
        """The thread is dead: nobody may wait for it."""
        error = EngineError("the engine has stopped after an error")
        for request_id in list(self._asking):
            self._receive([(request_id, error)], [])
        for stream in set(self._streams.values()):
            stream.end(error)
        self._say_stopped()
        if self._on_dead is not None:
            self._on_dead()

    # ---- on the thread ----

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                for command in self._take_commands():
                    command()
                self._send([])
                for look in self.between_steps:
                    look()
                if not self._is_stopping and self._seconds_to_step() == 0:
                    self._send(self._step())
        except BaseException:  # whatever it was, nobody else would hear of it
            logger.critical("the engine cannot go on", exc_info=True)
            self._is_dead = True
            self._call_loop(self._bury)

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._wakeup:
            while not self._inbox and (seconds := self._seconds_to_step()) != 0:
                self._wakeup.wait(seconds)
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def _seconds_to_step(self) -> float | None:
        """Until the next step is due: 0 is now, None not before something else happens."""
        if not self.engine.has_unfinished() or self._num_steps_allowed <= 0:
            return None
        if not self._seconds_between_steps:
            return 0
        return max(0, self._last_step + self._seconds_between_steps - time.monotonic())

    def _look(self, look: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        finding, error = None, None
        try:
            finding = look()
        except Exception as failure:
            error = failure
        self._call_loop(self._found, future, finding, error)

    def _set_pace(self, seconds_between_steps: float, num_steps: float) -> None:
        self._seconds_between_steps, self._num_steps_allowed = seconds_between_steps, num_steps

    def _step(self) -> list[TokenOutput]:
        """One step's outputs, those of a failed one too. Raises when there is no hope for the next."""
        self._num_steps_allowed -= 1
        self._last_step = time.monotonic()
        try:
            outputs = self.engine.step()
        except StepError as error:
            self._num_failures += 1
            if not error.outputs or self._num_failures >= self.MAX_FAILURES:
                raise
            return error.outputs
        self._num_failures = 0
        return outputs

    def _admit(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        try:
            self.engine.add_request(request_id, token_ids, params)
        except RequestError as error:
            self._verdicts.append((request_id, error))
        except Exception:
            logger.exception("request %s could not be added", request_id)
            self._verdicts.append((request_id, EngineError("the engine failed to take in this request")))
        else:
            self._verdicts.append((request_id, None))

    def _abort_for_others(self, request_id: str) -> None:
        self.engine.abort_request(request_id)
        self._verdicts.append((request_id, EngineStopped("the request was aborted")))

    def _stop(self) -> None:
        self._is_stopping = True

    def _send(self, outputs: list[TokenOutput]) -> None:
        if self._verdicts or outputs:
            self._call_loop(self._receive, self._verdicts, outputs)
            self._verdicts = []

    def _call_loop(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed, so nobody listens any more
            self._is_stopping = True
