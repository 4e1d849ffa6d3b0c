"""OpenAI's HTTP interface: requests in, JSON or a stream of events out. Does not know how an engine is built or run.

`build_app` makes the application around an AsyncLLMEngine, `run_server` serves it on a socket until a signal comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import html
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_mini import __version__
from vllm_mini.answers import Answer, ChatAnswer, CompletionAnswer, Prompt
from vllm_mini.async_engine import AsyncLLMEngine, EngineBusy, EngineError, EngineStopped, OutputStream
from vllm_mini.engine import LLMEngine, TokenOutput
from vllm_mini.http_connection import Connection
from vllm_mini.http_edge import (
    ERROR_RESPONSE,
    MAX_HEADER_BYTES,
    APIError,
    ClientDisconnected,
    Edge,
    as_api_error,
    error_response,
    event,
    json_response,
    until_disconnect,
)
from vllm_mini.live_server import LivePage, LiveSettings
from vllm_mini.metrics import CONTENT_TYPE, Metrics
from vllm_mini.protocol import ChatRequest, CompletionRequest
from vllm_mini.sequence import RequestError
from vllm_mini.text_endpoints import TextEndpoints, named, render_chat

__all__ = ["build_app", "run_server", "server_config"]

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # nginx's status for a client that did not wait; nobody receives it
MAX_IGNORED = 100  # field names that are remembered
KEEP_ALIVE = 60  # seconds that an idle connection is kept: longer than clients keep theirs, or they meet a closed one
FLUSH_TIMEOUT = 1  # seconds that readers get, at the end, to take what is already written
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # pages of this machine
EXPOSED_HEADERS = ("x-request-id", "retry-after")  # to scripts of another origin

Json = dict[str, Any]
Responses = dict[int | str, Json]  # as OpenAPI describes them


class _EventStream(StreamingResponse):
    """Server-sent events; whatever ends it closes the engine's stream."""

    def __init__(self, events: AsyncIterator[bytes], source: OutputStream) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self.stream_response(send))
        except (ClientDisconnected, OSError):
            logger.info("the client went away: its stream was aborted")
        finally:
            self._source.close()


class _Service:
    """The endpoints around one engine."""

    def __init__(
        self, engine: AsyncLLMEngine, served_model_names: Sequence[str], model_path: str | None,
        request_timeout: float | None,
    ) -> None:
        self._engine = engine
        self._names = tuple(served_model_names)
        self._model_path = model_path
        self._request_timeout = request_timeout
        self._metrics = Metrics(engine.engine, model_name=self._names[0])
        engine.engine.observers.append(self._metrics.on_step)
        engine.watchers.append(self._metrics)
        self._created = int(time.time())
        self._ignored: set[str] = set()

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        return await self._serve(request, self._prepare_chat, body)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        return await self._serve(request, self._prepare_completion, body)

    async def models(self) -> Response:
        """The names under which the model is served."""
        return json_response({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, model: str) -> Response:
        """One of these names."""
        return json_response(self._model(self.served_name(model)))

    async def health(self) -> Response:
        """200 and no body, or 503 once the engine is dead or shutting down."""
        if self._engine.is_accepting:
            return Response()
        raise APIError(503, "the engine has stopped" if not self._engine.is_healthy else "the server is shutting down",
                       type="service_unavailable")

    async def version(self) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def load(self) -> Response:
        """How many requests are being answered or wait; each prompt of a completions request is one."""
        return json_response({"server_load": self._engine.num_requests})

    async def metrics(self) -> Response:
        """Prometheus's text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    def _model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "vllm-mini",
                "root": self._names[0], "parent": None, "max_model_len": self._engine.engine.max_model_len,
                "permission": []}

    def served_name(self, name: str) -> str:
        """The name that answers will carry. Raises APIError for a model that is not served."""
        if name in self._names:
            return name
        if self._model_path is not None and name == self._model_path:
            return self._names[0]
        raise APIError(404, f"the model {name[:100]!r} does not exist; served: {', '.join(self._names)}", param="model",
                       code="model_not_found")

    def _check_width(self, num_choices: int) -> None:
        """RequestError for more choices than could ever wait together."""
        limit = self._engine.max_waiting
        if limit is not None and num_choices > limit:
            raise RequestError(f"the request asks for {num_choices} choices (prompts times n), at most {limit} may wait",
                               param="n")

    def _log_ignored(self, body: BaseModel) -> None:
        """Each field that is not understood is mentioned once: it may be a typing error."""
        for name in body.model_extra or ():
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED:
                self._ignored.add(name)
                logger.info("requests carry the field %.40r, which is ignored", name)

    # ---- on a thread of its own: templates and long texts take their time ----

    def _prepare_chat(self, body: ChatRequest) -> Answer:
        name = self.served_name(body.model)
        engine = self._engine.engine
        body.check()
        params = body.sampling_params(engine.default_params)
        tools = body.tool_use(engine.tokenizer.chat_template if engine.tokenizer else None)
        if tools is not None:
            params = params.clone(structured_outputs=tools.structure(params.structured_outputs))
        text = render_chat(engine, body.messages, body.template_options())
        with named({"prompt": "messages", "max_tokens": body.limit_field}):
            prompt = self._check_prompt(text, body, add_special_tokens=False)
        with named({"structured_outputs": body.structure_field if tools is None else "tools"}):
            params = engine.prepare(params)
        return ChatAnswer(body, [prompt], params, engine.tokenizer, model=name, tools=tools)

    def _prepare_completion(self, body: CompletionRequest) -> Answer:
        name = self.served_name(body.model)
        engine = self._engine.engine
        body.check()
        with named({"structured_outputs": body.structure_field}):
            params = engine.prepare(body.sampling_params(engine.default_params))
        self._check_width(len(body.prompts()) * params.n)
        prompts = []
        for param, prompt in body.prompts():
            with named({"prompt": param}):
                add_special_tokens = body.add_special_tokens is not False
                prompts.append(self._check_prompt(prompt, body, add_special_tokens=add_special_tokens))
        return CompletionAnswer(body, prompts, params, engine.tokenizer, model=name)

    def _check_prompt(
        self, prompt: str | list[int], body: ChatRequest | CompletionRequest, *, add_special_tokens: bool = True,
    ) -> Prompt:
        """Its ids, if they and all the tokens that the request itself asks for will fit."""
        engine = self._engine.engine
        if isinstance(prompt, list) and body.truncate_prompt_tokens is None:
            engine.scheduler.check_fits(len(prompt), body.asked_tokens or 1)  # before each of a million ids is looked at
        token_ids = engine.encode(prompt, add_special_tokens=add_special_tokens)
        if body.truncate_prompt_tokens is not None:
            token_ids = token_ids[-body.truncate_prompt_tokens :]
        engine.scheduler.check_fits(len(token_ids), body.asked_tokens or 1)
        return Prompt(token_ids, prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None)

    # ---- on the event loop ----

    async def _serve(self, request: Request, prepare: Callable[[Any], Answer], body: Any) -> Response:
        """Answer whole, or with a stream once its first output is there: until then an error has its own status."""
        try:
            return await until_disconnect(request.receive, self._respond(prepare, body))
        except ClientDisconnected:
            logger.info("the client went away: its request was aborted")
            return Response(status_code=CLIENT_CLOSED)

    async def _respond(self, prepare: Callable[[Any], Answer], body: Any) -> Response:
        self._engine.check_room()
        self._log_ignored(body)
        source = self._engine.open_stream()
        if self._request_timeout is not None:
            source.limit_time(self._request_timeout, _timeout_error(self._request_timeout))
        try:
            answer = await asyncio.to_thread(prepare, body)
            prompts = {answer.request_id(index): prompt.token_ids for index, prompt in enumerate(answer.prompts)}
            await self._engine.add_all(prompts, answer.params, stream=source)
            first = await anext(source)
            if body.stream:
                return _EventStream(_events(answer, first, source), source)
            answer.add(first)
            async for output in source:
                answer.add(output)
        except BaseException:
            source.close()
            raise
        source.close()
        return json_response(answer.body())


def _timeout_error(seconds: float) -> APIError:
    return APIError(504, f"the request was given up after {seconds:g} seconds, all that this server gives to one",
                    type="timeout_error", code="request_timeout", headers={"x-should-retry": "false"})


async def _events(answer: Answer, first: TokenOutput, source: OutputStream) -> AsyncIterator[bytes]:
    try:
        for chunk in (*answer.opening(), *answer.chunks(first)):
            yield event(chunk)
        async for output in source:
            for chunk in answer.chunks(output):
                yield event(chunk)
        for chunk in answer.closing():
            yield event(chunk)
    except Exception as error:  # the status is long sent, so the stream itself has to say it
        if not isinstance(error, (APIError, EngineError, EngineStopped)):
            logger.exception("stream %s failed", answer.id)
        yield event(as_api_error(error).content)
    yield b"data: [DONE]\n\n"


def build_app(
    engine: AsyncLLMEngine, *, served_model_names: Sequence[str], api_key: str | Sequence[str] | None = None,
    model_path: str | None = None, request_timeout: float | None = None, allowed_origins: Sequence[str] | None = None,
    live: LiveSettings | None = None,
) -> FastAPI:
    """The application around one engine, which it starts and stops.

    Answers carry the served name that the request used; `model_path` is accepted as a name too, but never shown. With
    an api_key (or several) every path but http_edge.OPEN_PATHS needs one. A request is given up after request_timeout
    seconds. Scripts of the allowed origins ("*": of all) may use it in a browser; None allows those of this machine.
    """
    service = _Service(engine, served_model_names, model_path, request_timeout)
    texts = TextEndpoints(engine.engine, service.served_name)

    page = None if live is None else LivePage(engine, live, served_model_names[0], _sandbox_app)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        if page is not None:
            await page.close()
        await engine.shutdown()

    app = FastAPI(title="mini-vLLM", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
                  redirect_slashes=False)
    app.add_middleware(Edge, api_keys=[api_key] if isinstance(api_key, str) else list(api_key or ()))
    app.add_middleware(  # outside the edge: browsers ask without the key what they may do, and read a 401 too
        CORSMiddleware, allow_origins=list(allowed_origins or ()),
        allow_origin_regex=LOCAL_ORIGINS if allowed_origins is None else None, allow_methods=["*"], allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS)
    for kind in (APIError, RequestError, EngineBusy, EngineError, EngineStopped, RequestValidationError,
                 StarletteHTTPException, RecursionError):
        app.add_exception_handler(kind, error_response)
    _add_routes(app, service, texts)
    if page is not None:
        page.add_to(app)

    return app


def _add_routes(app: FastAPI, service: _Service, texts: TextEndpoints) -> None:
    streamed: Responses = {200: {"content": {"text/event-stream": {}}}}
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]], type[Response], Responses]] = [
        ("POST", "/v1/chat/completions", service.chat_completions, JSONResponse, streamed),
        ("POST", "/v1/chat/completions/render", texts.render, JSONResponse, {}),
        ("POST", "/v1/completions", service.completions, JSONResponse, streamed),
        ("GET", "/v1/models", service.models, JSONResponse, {}),
        ("GET", "/v1/models/{model:path}", service.model, JSONResponse, {}),
        ("POST", "/tokenize", texts.tokenize, JSONResponse, {}),
        ("POST", "/detokenize", texts.detokenize, JSONResponse, {}),
        ("GET", "/tokenizer_info", texts.tokenizer_info, JSONResponse, {}),
        ("GET", "/health", service.health, Response, {}),
        ("GET", "/ping", service.health, Response, {}),
        ("GET", "/version", service.version, JSONResponse, {}),
        ("GET", "/load", service.load, JSONResponse, {}),
        ("GET", "/metrics", service.metrics, PlainTextResponse, {}),
    ]
    for method, path, endpoint, response_class, responses in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None, response_class=response_class,
                          responses={**responses, "default": ERROR_RESPONSE}, name=f"{method} {path}")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(_docs_page(app.openapi()))


def _sandbox_app(engine: AsyncLLMEngine) -> FastAPI:
    """The application of the live page's sandbox."""
    return build_app(engine, served_model_names=["sandbox"], live=LiveSettings(sandbox=False, is_local=False))


def _docs_page(openapi: Json) -> str:
    """The list of endpoints, with nothing from elsewhere."""
    rows = "".join(f"<tr><td>{method.upper()}<td><code>{html.escape(path)}</code><td>"
                   f"{html.escape(operation.get('description', ''))}"
                   for path, methods in openapi["paths"].items() for method, operation in methods.items())
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{openapi["info"]["title"]}</title>'
            "<style>body{font:16px sans-serif;margin:2em}td{padding:.2em 1em .2em 0}</style>"
            f"<h1>{openapi['info']['title']} {openapi['info']['version']}</h1><table>{rows}</table>"
            '<p>Their fields: <a href="openapi.json">openapi.json</a></html>')


def server_config(app: FastAPI, log_level: str) -> uvicorn.Config:
    """How uvicorn is to serve the application. Headers may arrive in parts, so h11 must wait for more than Edge allows."""
    return uvicorn.Config(app, http=Connection, ws="none", h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
                          log_config=None, log_level=log_level, timeout_keep_alive=KEEP_ALIVE,
                          timeout_graceful_shutdown=FLUSH_TIMEOUT)


class _Server(uvicorn.Server):
    """Says when it is ready, and leaves signals to run_server: uvicorn would die of them after it has shut down."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _handling_signals(*actions: Callable[[], Any]) -> Iterator[None]:
    """Inside, each SIGINT or SIGTERM calls the next of the actions; one more ends the process there and then."""
    remaining = list(actions)

    def handle(*_: Any) -> None:
        if not remaining:
            os._exit(1)
        remaining.pop(0)()

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _exit_soon() -> None:
    """End the process even if something hangs, once readers had the time to take their errors."""
    timer = threading.Timer(2 * FLUSH_TIMEOUT, os._exit, (1,))
    timer.daemon = True
    timer.start()


async def run_server(
    llm_engine: LLMEngine, listener: socket.socket, *, drain_timeout: float, log_level: str = "info",
    max_waiting: int | None = None, on_ready: Callable[[], None] = lambda: None, **app_settings: Any,
) -> int:
    """Serve until SIGTERM, SIGINT or the end of the engine; returns the exit code. Other settings are build_app's.

    At the first signal new requests are refused with 503 and running ones get drain_timeout seconds to finish; at the
    second one they end at once, with an error, and the exit code is 1. For the main thread only.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or every event may wait 40 ms for an ACK
    loop = asyncio.get_running_loop()
    stop_asked, hurry_asked, is_dead = asyncio.Event(), asyncio.Event(), asyncio.Event()
    engine = AsyncLLMEngine(llm_engine, on_dead=is_dead.set, max_waiting=max_waiting)
    server = _Server(server_config(build_app(engine, **app_settings), log_level), on_ready)

    def hurry() -> None:
        hurry_asked.set()
        _exit_soon()
        loop.call_soon_threadsafe(engine.cut_short)

    gc.collect()
    gc.freeze()  # or each full collection looks through all that was imported, and stops every thread for 0.2 s

    with _handling_signals(lambda: loop.call_soon_threadsafe(stop_asked.set), hurry):
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        reasons = [asyncio.ensure_future(event.wait()) for event in (stop_asked, is_dead)]
        await asyncio.wait({serving, *reasons}, return_when=asyncio.FIRST_COMPLETED)
        logger.info("shutting down: %d running and %d waiting sequences have %g s to finish (a second signal: at once)",
                    engine.num_running, engine.num_waiting, drain_timeout)
        await engine.shutdown(drain_timeout)
        server.should_exit = True
        await serving
        for reason in reasons:
            reason.cancel()
    return 1 if is_dead.is_set() or hurry_asked.is_set() else 0
