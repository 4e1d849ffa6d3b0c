"""OpenAI's HTTP interface: requests in, JSON or a stream of events out. Does not know how an engine is built or run.

`build_app` makes the application around an AsyncLLMEngine, `run_server` serves it on a socket until a signal comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_mini import __version__
from vllm_mini.answers import Answer, ChatAnswer, CompletionAnswer, Prompt
from vllm_mini.async_engine import AsyncLLMEngine, EngineError, EngineStopped, OutputStream
from vllm_mini.engine import LLMEngine, TokenOutput
from vllm_mini.http_edge import (
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
from vllm_mini.protocol import ChatRequest, CompletionRequest
from vllm_mini.sequence import RequestError

__all__ = ["build_app", "run_server", "server_config"]

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # nginx's status for a client that did not wait; nobody receives it
MAX_IGNORED = 100  # field names that are remembered
KEEP_ALIVE = 60  # seconds that an idle connection is kept: longer than clients keep theirs, or they meet a closed one
FLUSH_TIMEOUT = 1  # seconds that readers get, at the end, to take what is already written

Json = dict[str, Any]


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

    def __init__(self, engine: AsyncLLMEngine, served_model_names: Sequence[str], model_path: str | None) -> None:
        self._engine = engine
        self._names = tuple(served_model_names)
        self._model_path = model_path
        self._created = int(time.time())
        self._ignored: set[str] = set()

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        return await self._serve(request, self._prepare_chat, body)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return await self._serve(request, self._prepare_completion, body)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, model: str) -> Response:
        return json_response(self._model(self._served_name(model)))

    async def health(self) -> Response:
        if self._engine.is_accepting:
            return Response()
        raise APIError(503, "the engine has stopped" if not self._engine.is_healthy else "the server is shutting down",
                       type="service_unavailable")

    async def version(self) -> Response:
        return json_response({"version": __version__})

    def _model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "vllm-mini",
                "root": self._names[0], "parent": None, "max_model_len": self._engine.engine.max_model_len,
                "permission": []}

    def _served_name(self, name: str) -> str:
        """The name that answers will carry. Raises APIError for a model that is not served."""
        if name in self._names:
            return name
        if self._model_path is not None and name == self._model_path:
            return self._names[0]
        raise APIError(404, f"the model {name[:100]!r} does not exist; served: {', '.join(self._names)}", param="model",
                       code="model_not_found")

    def _log_ignored(self, body: BaseModel) -> None:
        """Each field that is not understood is mentioned once: it may be a typing error."""
        for name in body.model_extra or ():
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED:
                self._ignored.add(name)
                logger.info("requests carry the field %.40r, which is ignored", name)

    # ---- on a thread of its own: templates and long texts take their time ----

    def _prepare_chat(self, body: ChatRequest) -> Answer:
        name = self._served_name(body.model)
        engine = self._engine.engine
        body.check()
        params = body.sampling_params(engine.default_params)
        if engine.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it cannot chat", param="messages")
        token_ids = engine.tokenizer.encode_chat(body.messages, **body.template_options())
        with _named({"prompt": "messages", "max_tokens": body.limit_field}):
            prompt = self._check_prompt(token_ids, body)
        return ChatAnswer(body, [prompt], params, engine.tokenizer, model=name)

    def _prepare_completion(self, body: CompletionRequest) -> Answer:
        name = self._served_name(body.model)
        engine = self._engine.engine
        body.check()
        params = body.sampling_params(engine.default_params)
        prompts = []
        for param, prompt in body.prompts():
            with _named({"prompt": param}):
                add_special_tokens = body.add_special_tokens is not False
                prompts.append(self._check_prompt(prompt, body, add_special_tokens=add_special_tokens))
        return CompletionAnswer(body, prompts, params, engine.tokenizer, model=name)

    def _check_prompt(
        self, prompt: str | list[int], body: ChatRequest | CompletionRequest, *, add_special_tokens: bool = True,
    ) -> Prompt:
        """Its ids, if they and all the tokens that the request itself asks for will fit."""
        engine = self._engine.engine
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
        self._log_ignored(body)
        answer = await asyncio.to_thread(prepare, body)
        source = await self._submit(answer)
        try:
            first = await anext(source)
            if body.stream:
                return _EventStream(_events(answer, first, source), source)
            answer.add(first)
            async for output in source:
                answer.add(output)
            return json_response(answer.body())
        except BaseException:
            source.close()
            raise

    async def _submit(self, answer: Answer) -> OutputStream:
        """All its prompts at once, on one stream; a refused one takes the others with it."""
        source = self._engine.open_stream()
        await asyncio.gather(*(
            self._engine.add(answer.request_id(index), prompt.token_ids, answer.params, stream=source)
            for index, prompt in enumerate(answer.prompts)))
        return source


@contextlib.contextmanager
def _named(names: dict[str, str]) -> Iterator[None]:
    """Inside, the engine's names for what is wrong become those that the request used."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "", error.param)
        message = str(error)
        if name != error.param and error.code is None:
            message = f"{name}: {message.removeprefix(f'{error.param}: ')}"
        raise RequestError(message, param=name, code=error.code) from error


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
        if not isinstance(error, (EngineError, EngineStopped)):
            logger.exception("stream %s failed", answer.id)
        yield event(as_api_error(error).content)
    yield b"data: [DONE]\n\n"


def build_app(
    engine: AsyncLLMEngine, *, served_model_names: Sequence[str], api_key: str | None = None,
    model_path: str | None = None,
) -> FastAPI:
    """The application around one engine, which it starts and stops.

    Answers carry the served name that the request used; `model_path` is accepted as a name too, but never shown. With
    an api_key every path but /health and /version needs it.
    """
    service = _Service(engine, served_model_names, model_path)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.shutdown()

    app = FastAPI(title="mini-vLLM", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
                  redirect_slashes=False)
    app.add_middleware(Edge, api_key=api_key)
    for kind in (APIError, RequestError, EngineError, EngineStopped, RequestValidationError, StarletteHTTPException,
                 RecursionError):
        app.add_exception_handler(kind, error_response)
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", service.chat_completions),
        ("POST", "/v1/completions", service.completions),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{model:path}", service.model),
        ("GET", "/health", service.health),
        ("GET", "/version", service.version),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


def server_config(app: FastAPI, log_level: str) -> uvicorn.Config:
    """How uvicorn is to serve the application. Headers may arrive in parts, so h11 must wait for more than Edge allows."""
    return uvicorn.Config(app, http="h11", h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES, log_config=None,
                          log_level=log_level, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=FLUSH_TIMEOUT)


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
def _handling_signals(on_first: Callable[[], Any]) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM calls `on_first`, and the second ends the process there and then."""
    num_signals = 0

    def handle(*_: Any) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(1)
        on_first()

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


async def run_server(
    llm_engine: LLMEngine, listener: socket.socket, *, drain_timeout: float, log_level: str = "info",
    on_ready: Callable[[], None] = lambda: None, **app_settings: Any,
) -> int:
    """Serve until SIGTERM, SIGINT or the end of the engine; returns the exit code. Other settings are build_app's.

    At the first signal new requests are refused with 503 and running ones get drain_timeout seconds to finish; the
    second one ends the process at once. For the main thread only.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or every event may wait 40 ms for an ACK
    loop = asyncio.get_running_loop()
    stop_asked, is_dead = asyncio.Event(), asyncio.Event()
    engine = AsyncLLMEngine(llm_engine, on_dead=is_dead.set)
    server = _Server(server_config(build_app(engine, **app_settings), log_level), on_ready)
    with _handling_signals(lambda: loop.call_soon_threadsafe(stop_asked.set)):
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
    return 1 if is_dead.is_set() else 0
