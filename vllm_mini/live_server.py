"""The live page over HTTP: its files, the feed of records, the pace of the engine, and a sandbox engine to play with.

The recorder lives on the engine's thread, everything here on the event loop: records cross over one by one, in order.
Does not know what is in a record, nor how the page draws it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_mini.async_engine import AsyncLLMEngine, EngineError
from vllm_mini.config import ConfigError, EngineConfig
from vllm_mini.engine import LLMEngine
from vllm_mini.http_edge import APIError, ClientDisconnected, event, json_response, until_disconnect
from vllm_mini.live import LiveRecorder
from vllm_mini.trace import Record, TraceWriter

__all__ = ["LiveFeed", "LivePage", "LiveSettings", "add_page"]

WEB = Path(__file__).parent / "web"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "cache-control": "no-cache", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'"}
MAX_RECORDS = 1000  # that a slow watcher may be behind before it is given a new snapshot
MAX_WATCHERS = 32
HEARTBEAT = 15.0  # seconds of silence after which a comment is sent, for proxies that close what is silent


@dataclass(frozen=True)
class LiveSettings:
    """What of the live view a server offers."""

    page: bool = True  # the page and its feed
    hide_text: bool = False  # no text of prompts and answers in feed and trace
    may_set_pace: bool = True  # the page may pause and slow down this engine
    is_local: bool = True  # listens on loopback: answers only to names that nobody else can point here
    trace: Path | None = None  # a file for all records
    sandbox: bool = True


class LiveFeed:
    """Streams of one engine's records, for any number of watchers.

    The recorder works only while somebody watches. A watcher begins with a snapshot, and begins anew with one where it
    fell so far behind that records it has not had are gone from the ring.
    """

    def __init__(self, engine: AsyncLLMEngine, recorder: LiveRecorder, greeting: Record) -> None:
        """`greeting` is what watchers are told first, beside their name."""
        self._engine = engine
        self._recorder = recorder
        self._greeting = greeting
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=MAX_RECORDS)  # consecutive ids
        self._watchers: dict[str, asyncio.Event] = {}
        self._pace: Record = {"type": "pace", "steps_per_second": None, "num_steps": None}
        self._pace_owner: str | None = None
        self._num_paces = 0
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        engine.on_stop.append(self._close)

    def open_stream(self, *, after: int | None = None) -> AsyncGenerator[bytes, None]:
        """Server-sent events, from the record after number `after` on if that is still here. APIError: too many watch."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise APIError(503, f"{MAX_WATCHERS} pages watch already", type="service_unavailable")
        if not self._engine.is_healthy:
            raise EngineError("the engine has stopped after an error")
        self._loop = asyncio.get_running_loop()
        return self._stream(after)

    def set_pace(self, watcher: str, steps_per_second: float | None, num_steps: int | None) -> None:
        """Slow down or pause the engine for as long as this watcher stays. APIError for a watcher that is not there."""
        if watcher not in self._watchers:
            raise APIError(409, "only a page that watches the feed may set the pace", param="watcher")
        self._pace_owner = None if steps_per_second is None and num_steps is None else watcher
        self._set_pace(steps_per_second, num_steps)

    def _set_pace(self, steps_per_second: float | None, num_steps: int | None) -> None:
        self._pace = {"type": "pace", "steps_per_second": steps_per_second, "num_steps": num_steps}
        self._num_paces += 1
        self._engine.set_pace(*(math.inf if value is None else value for value in (steps_per_second, num_steps)))
        self._wake()

    async def _stream(self, after: int | None) -> AsyncGenerator[bytes, None]:
        watcher, changed = secrets.token_hex(8), asyncio.Event()
        self._watchers[watcher] = changed
        try:
            yield event({"type": "hello", "watcher": watcher, **self._greeting})
            num_paces = -1
            position = after if after is not None and self._holds(after) else None
            while not self._is_closed:
                changed.clear()
                if num_paces != self._num_paces:
                    num_paces = self._num_paces
                    yield event(self._pace)
                if position is None or (self._ring and self._ring[0][0] > position + 1):
                    snapshot = await self._engine.inspect(partial(self._recorder.open, self._receive_from_thread))
                    position = snapshot["id"]
                    yield _numbered(snapshot)
                elif records := self._after(position):
                    position = records[-1][0]
                    yield b"".join(content for _, content in records)
                elif not await _wait(changed, HEARTBEAT):
                    yield b": nothing new\n\n"
        except EngineError:
            pass
        finally:
            self._leave(watcher)
        yield event({"type": "end"})

    def _holds(self, position: int) -> bool:
        """Whether this record or the one after it is here, so that all after it can be had."""
        return bool(self._ring) and self._ring[0][0] - 1 <= position <= self._ring[-1][0]

    def _after(self, position: int) -> list[tuple[int, bytes]]:
        return list(islice(self._ring, max(0, position + 1 - self._ring[0][0]), None)) if self._ring else []

    def _leave(self, watcher: str) -> None:
        del self._watchers[watcher]
        if self._pace_owner == watcher:
            self._pace_owner = None
            self._set_pace(None, None)
        if not self._watchers:
            self._engine.run_between_steps(partial(self._recorder.close, self._receive_from_thread))

    def _receive_from_thread(self, record: Record) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody watches any more
            self._loop.call_soon_threadsafe(self._receive, record)

    def _receive(self, record: Record) -> None:
        if self._ring and record["id"] != self._ring[-1][0] + 1:  # nobody watched for a while
            self._ring.clear()
        self._ring.append((record["id"], _numbered(record)))
        self._wake()

    def _wake(self) -> None:
        for changed in self._watchers.values():
            changed.set()

    def _close(self) -> None:
        self._is_closed = True
        self._wake()


async def _wait(changed: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(changed.wait(), seconds)
    return False


def _numbered(record: Record) -> bytes:
    return b"id: %d\n" % record["id"] + event(record)


class FeedResponse(StreamingResponse):
    """Server-sent events until they end or the client goes."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected, OSError, asyncio.CancelledError):  # the last: the server stops
            try:
                await until_disconnect(receive, self.stream_response(send))
            finally:  # it may stand at a yield, where a cancelled task does not reach it
                await self._events.aclose()


class Pace(BaseModel):
    """Null is no limit."""

    watcher: str
    steps_per_second: float | None = Field(None, gt=0, le=1e6)
    num_steps: int | None = Field(None, ge=0, le=10**6)


class SandboxSettings(BaseModel):
    """The switches of the sandbox; what they are called in EngineConfig."""

    num_kv_blocks: int = Field(48, ge=1, le=8192)
    block_size: int = Field(16, ge=1, le=256)
    max_num_seqs: int = Field(64, ge=1, le=256)
    max_num_batched_tokens: int = Field(64, ge=1, le=8192)
    max_model_len: int = Field(1024, ge=1, le=2048)
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enable_continuous_batching: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_host_blocks: int = Field(0, ge=0, le=8192)

    def engine_config(self) -> EngineConfig:
        settings = self.model_dump()
        if not self.enable_chunked_prefill:  # or prompts longer than a step could never run
            settings["max_num_batched_tokens"] = max(self.max_num_batched_tokens, self.max_model_len)
        return EngineConfig(model="dummy", dtype="float32", device="cpu", **settings)


class Sandbox:
    """An application around an engine with random weights; every new start gives it a new one. Requests go to the newest.

    The served engine knows nothing of it.
    """

    def __init__(self, make_app: Callable[[AsyncLLMEngine], FastAPI]) -> None:
        self._make_app = make_app
        self._app: FastAPI | None = None
        self._running = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()

    async def start(self, settings: SandboxSettings) -> None:
        """Raises ConfigError for settings that do not go together; the engine so far then stays."""
        async with self._lock:
            engine = await asyncio.to_thread(LLMEngine.from_config, settings.engine_config())
            await self._running.aclose()
            self._app = self._make_app(AsyncLLMEngine(engine))
            await self._running.enter_async_context(self._app.router.lifespan_context(self._app))

    async def close(self) -> None:
        async with self._lock:
            self._app = None
            await self._running.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            raise APIError(409, "there is no sandbox yet: POST its settings to /live/sandbox first")
        check_site(Request(scope), is_local=False)
        await self._app(scope, receive, send)


class LivePage:
    """The live view of one engine, as routes of its server's application."""

    def __init__(
        self, engine: AsyncLLMEngine, settings: LiveSettings, model: str, make_sandbox: Callable[[AsyncLLMEngine], FastAPI],
    ) -> None:
        """To be made before the engine is started. ConfigError for a trace file that cannot be written."""
        self._settings = settings
        recorder = LiveRecorder(engine.engine, model=model, hide_text=settings.hide_text)
        engine.between_steps.append(recorder.between_steps)
        self._trace = None if settings.trace is None else TraceWriter(settings.trace)
        if self._trace is not None:
            self._trace.write(recorder.open(self._trace.write))
        self._sandbox = Sandbox(make_sandbox)
        self._feed = LiveFeed(engine, recorder, {
            "mode": "live", "model": model, "may_set_pace": settings.may_set_pace, "has_sandbox": settings.sandbox})

    def add_to(self, app: FastAPI) -> None:
        if not self._settings.page:
            return
        add_page(app)
        routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [("GET", "/live/feed", self.feed)]
        if self._settings.may_set_pace:
            routes.append(("POST", "/live/pace", self.set_pace))
        if self._settings.sandbox:
            routes.append(("POST", "/live/sandbox", self.start_sandbox))
            app.mount("/sandbox", self._sandbox)
        for method, path, endpoint in routes:
            app.add_api_route(path, endpoint, methods=[method], response_model=None, include_in_schema=False)

    async def close(self) -> None:
        await self._sandbox.close()
        if self._trace is not None:
            self._trace.close()

    async def feed(self, request: Request) -> Response:
        check_site(request, is_local=self._settings.is_local)
        last = request.headers.get("last-event-id", "")
        return FeedResponse(self._feed.open_stream(after=int(last) if last.isdecimal() and len(last) < 16 else None))

    async def set_pace(self, body: Pace, request: Request) -> Response:
        check_site(request, is_local=self._settings.is_local)
        self._feed.set_pace(body.watcher, body.steps_per_second, body.num_steps)
        return Response(status_code=204)

    async def start_sandbox(self, body: SandboxSettings, request: Request) -> Response:
        check_site(request, is_local=self._settings.is_local)
        try:
            await self._sandbox.start(body)
        except ConfigError as error:
            raise APIError(400, str(error)) from error
        return json_response(body.model_dump())


def check_site(request: Request, *, is_local: bool) -> None:
    """APIError for what another site's page asks, which a browser would send along with the rights of this machine.

    A server on loopback answers only to addresses and "localhost": any other name may be somebody's who points it here.
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    name = urlsplit(f"//{host}").hostname or ""
    if origin not in (None, f"http://{host}", f"https://{host}") or \
            request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise APIError(403, "the live view does not answer pages of other sites", type="permission_error")
    if is_local and name != "localhost" and not _is_address(name):
        raise APIError(403, f"the live view does not answer to the name {name[:100]!r}: use localhost or an address",
                       type="permission_error")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def add_page(app: FastAPI) -> None:
    """The page at / and its files under /web, read once."""
    files = {path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for path in sorted(WEB.iterdir())
             if path.suffix in MEDIA_TYPES}

    async def web_file(name: str = "index.html") -> Response:
        if name not in files:
            raise APIError(404, f"the page has no file {name[:100]!r}")
        content, media_type = files[name]
        return Response(content, headers=PAGE_HEADERS, media_type=media_type)

    async def index() -> Response:
        return await web_file()

    app.add_api_route("/", index, methods=["GET"], response_model=None, include_in_schema=False)
    app.add_api_route("/web/{name}", web_file, methods=["GET"], response_model=None, include_in_schema=False)
