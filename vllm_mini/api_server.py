"""OpenAI's HTTP interface: requests in, JSON or a stream of events out. Does not know how an engine is built or run.

`build_app` makes the application around an AsyncLLMEngine, `run_server` serves it on a socket until a signal comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_mini import __version__
from vllm_mini.async_engine import AsyncLLMEngine, EngineError, EngineStopped, OutputStream
from vllm_mini.engine import LLMEngine, TokenOutput
from vllm_mini.protocol import Answer, ChatAnswer, ChatRequest, CompletionAnswer, CompletionRequest, Prompt
from vllm_mini.sequence import RequestError

__all__ = ["build_app", "run_server"]

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
OPEN_PATHS = ("/health", "/version")  # need no key
JSON_TYPE = "application/json"
CLIENT_CLOSED = 499  # nginx's status for a client that did not wait; nobody receives it
MAX_MESSAGE = 1000  # characters; a number from the request may have thousands of digits
MAX_IGNORED = 100  # field names that are remembered
KEEP_ALIVE = 60  # seconds that an idle connection is kept: longer than clients keep theirs, or they meet a closed one
FLUSH_TIMEOUT = 1  # seconds that readers get, at the end, to take what is already written
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # some clients would split an event at these
UNREADABLE = "the body cannot be read: it is not UTF-8, is nested too deeply or holds a number of too many digits"
COMPLAINTS = {  # pydantic's names for what is wrong
    "missing": "is missing", "string_type": "must be a string", "bool_type": "must be true or false",
    "int_type": "must be an integer", "float_type": "must be a number", "dict_type": "must be an object",
    "model_type": "must be an object", "model_attributes_type": "must be an object",
    "greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}"}

Json = dict[str, Any]
Result = TypeVar("Result")


class APIError(Exception):
    """An error as OpenAI's clients expect it."""

    def __init__(
        self, status: int, message: str, *, type: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        message = message[:MAX_MESSAGE]
        self.status = status
        self.content = {"error": {"message": message, "type": type, "param": param, "code": code}}
        self.headers = headers or {}


def as_api_error(error: Exception) -> APIError:
    """Any exception in OpenAI's words. Nothing of Python, of paths or of other people's data gets into them."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineStopped):
        return APIError(503, str(error), type="service_unavailable", headers={"retry-after": "5"})
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, StarletteHTTPException):
        message = UNREADABLE if error.status_code == 400 else str(error.detail)
        return APIError(error.status_code, message, headers=dict(error.headers or {}))
    if isinstance(error, RecursionError):
        return APIError(400, "the request is nested too deeply")
    message = str(error) if isinstance(error, EngineError) else "the server failed while it handled this request"
    return APIError(500, message, type="internal_error", headers={"x-should-retry": "false"})


def _validation_error(error: RequestValidationError) -> APIError:
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {found['ctx']['error']} at character {found['loc'][-1]}")
    param = ".".join(str(part) for part in found["loc"][1:])[:100]
    if not param:
        return APIError(400, "the body must be a JSON object")
    complaint = COMPLAINTS.get(found["type"], "is not valid").format(**found.get("ctx", {}))
    is_short = isinstance(found["input"], (str, int, float))
    return APIError(400, f"{param} {complaint}" + (f", got {found['input']!r:.80}" if is_short else ""), param=param)


def _dump(content: Json) -> str:
    """One line of JSON: real characters, no NaN or Infinity, and nothing that a reader may take for a line's end."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(LINE_ENDS)


def _json_response(content: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_dump(content).encode(errors="replace"), status, headers, JSON_TYPE)


def _event(content: Json) -> bytes:
    return f"data: {_dump(content)}\n\n".encode(errors="replace")


async def _error_response(request: Request, error: Exception) -> Response:
    failure = as_api_error(error)
    if failure.status == 404 and isinstance(error, StarletteHTTPException):
        failure = APIError(404, f"there is no {request.url.path[:100]!r} here{_right_path(request.url.path)}")
    elif failure.status == 405:
        failure = APIError(405, f"{request.url.path[:100]} does not answer {request.method}", headers=failure.headers)
    return _json_response(failure.content, failure.status, failure.headers)


def _right_path(path: str) -> str:
    for known in ("/chat/completions", "/completions", "/models"):
        if path.endswith(known):
            return f"; did you mean /v1{known}?"
    return "; the API is under /v1, for example /v1/chat/completions"


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work` while the client is there: cancels it and raises ClientDisconnected when he goes."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events; whatever ends it closes the engine's stream."""

    def __init__(self, events: AsyncIterator[bytes], source: OutputStream) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self.stream_response(send))
        except (ClientDisconnected, OSError):
            logger.info("the client went away: its stream was aborted")
        finally:
            self._source.close()


class _Edge:
    """What holds for every path: request ids, the key, tidy paths, bounded bodies, all errors in OpenAI's shape."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key_digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False
        request_id = _request_id(Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            scope = {**scope, "path": re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"}
            self._check(scope)
            await self._app(_as_json(scope), _bounded(receive), send_with_id)
        except Exception as error:  # the last chance to answer
            if not isinstance(error, APIError):
                logger.exception("request %s failed", request_id)
            if not has_started:
                failure = as_api_error(error)
                response = _json_response(failure.content, failure.status, failure.headers)
                await response(scope, receive, send_with_id)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key_digest is not None and scope["path"] not in OPEN_PATHS and not self._has_key(scope["headers"]):
            raise APIError(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                           type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise APIError(415, "a Content-Encoding is not supported: send the body as it is")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
            raise APIError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the one Authorization header holds the key; how long that takes says nothing about the key."""
        assert self._key_digest is not None
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        is_right = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._key_digest)
        return is_right and scheme.lower() == b"bearer"


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex


def _as_json(scope: Scope) -> Scope:
    """A body is JSON whatever its Content-Type says: many clients say nothing, or text/plain."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", JSON_TYPE.encode())]}


def _bounded(receive: Receive) -> Receive:
    num_bytes = 0

    async def receive_bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return message

    return receive_bounded


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
        return _json_response({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, model: str) -> Response:
        return _json_response(self._model(self._served_name(model)))

    async def health(self) -> Response:
        if self._engine.is_accepting:
            return Response()
        raise APIError(503, "the engine has stopped" if not self._engine.is_healthy else "the server is shutting down",
                       type="service_unavailable")

    async def version(self) -> Response:
        return _json_response({"version": __version__})

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
            return await _until_disconnect(request.receive, self._respond(prepare, body))
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
            return _json_response(answer.body())
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
            yield _event(chunk)
        async for output in source:
            for chunk in answer.chunks(output):
                yield _event(chunk)
        for chunk in answer.closing():
            yield _event(chunk)
    except Exception as error:  # the status is long sent, so the stream itself has to say it
        if not isinstance(error, (EngineError, EngineStopped)):
            logger.exception("stream %s failed", answer.id)
        yield _event(as_api_error(error).content)
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
    app.add_middleware(_Edge, api_key=api_key)
    for kind in (APIError, RequestError, EngineError, EngineStopped, RequestValidationError, StarletteHTTPException,
                 RecursionError):
        app.add_exception_handler(kind, _error_response)
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
    server = _Server(uvicorn.Config(
        build_app(engine, **app_settings), log_config=None, log_level=log_level, timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=FLUSH_TIMEOUT), on_ready)
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
