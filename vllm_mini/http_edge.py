"""What holds for every path: request ids, the key, bounded bodies, and every error in OpenAI's shape. Knows no endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_mini.async_engine import EngineBusy, EngineError, EngineStopped
from vllm_mini.sequence import RequestError

__all__ = ["ERROR_RESPONSE", "MAX_HEADER_BYTES", "APIError", "ClientDisconnected", "Edge", "as_api_error",
           "error_response", "event", "json_bytes", "json_response", "until_disconnect"]

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20  # parsing JSON holds up the event loop, for 0.1 s where this much is numbers
MAX_HELD_BYTES = 32 * MAX_BODY_BYTES  # of the bodies of all requests in progress
BODY_TIMEOUT = 30.0  # seconds without a byte of a body that is still to come
MAX_HEADER_BYTES = 64 * 2**10
MAX_HEADERS = 100
OPEN_PATHS = ("/health", "/ping", "/version", "/load", "/metrics")  # need no key: they say nothing of what is asked
PAGE_PATHS = re.compile(r"/(web/[^/]+)?")  # the live page, which has to be there to ask for the key
RETRY_AFTER = {"retry-after": "1"}  # seconds
HANG_UP = {"connection": "close"}  # with an answer to a body that was not read to its end
JSON_TYPE = "application/json"
MAX_MESSAGE = 1000  # characters; a number from the request may have thousands of digits
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # some clients would split an event at these
UNREADABLE = "the body cannot be read: it is not UTF-8, is nested too deeply or holds a number of too many digits"
COMPLAINTS = {  # pydantic's names for what is wrong
    "missing": "is missing", "string_type": "must be a string", "bool_type": "must be true or false",
    "int_type": "must be an integer", "float_type": "must be a number", "dict_type": "must be an object",
    "model_type": "must be an object", "model_attributes_type": "must be an object",
    "greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}"}
ERROR_RESPONSE = {  # as OpenAPI describes it
    "description": "An error in OpenAI's shape",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                       "code": {"type": ["string", "null"]}}}}}}}}

Json = dict[str, Any]
Result = TypeVar("Result")


class APIError(HTTPException):
    """An error as OpenAI's clients expect it. FastAPI lets an HTTPException pass wherever it is raised."""

    def __init__(
        self, status: int, message: str, *, type: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:
        message = message[:MAX_MESSAGE]
        super().__init__(status, message)
        self.headers: dict[str, str] = headers or {}
        self.status = status
        self.content = {"error": {"message": message, "type": type, "param": param, "code": code}}


def as_api_error(error: Exception) -> APIError:
    """Any exception in OpenAI's words. Nothing of Python, of paths or of other people's data gets into them."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineBusy):
        return APIError(429, str(error), type="rate_limit_error", code="rate_limit_exceeded", headers=RETRY_AFTER)
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


def dump(content: Json) -> str:
    """One line of JSON: real characters, no NaN or Infinity, and nothing that a reader may take for a line's end."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(LINE_ENDS)


def json_response(content: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(content), status, headers, JSON_TYPE)


def json_bytes(content: Json) -> bytes:
    return dump(content).encode(errors="replace")


def event(content: Json) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"


async def error_response(request: Request, error: Exception) -> Response:
    failure = as_api_error(error)
    if isinstance(error, StarletteHTTPException) and not isinstance(error, APIError):  # the router's
        path = request.url.path[:100]
        if failure.status == 404:
            failure = APIError(404, f"there is no {path!r} here{_right_path(path)}")
        elif failure.status == 405:
            methods = failure.headers.get("Allow", "").split(", ")
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])
            if request.method == "OPTIONS":
                return Response(status_code=204, headers={"allow": allowed})
            failure = APIError(405, f"{path} does not answer {request.method}", headers={"allow": allowed})
    return json_response(failure.content, failure.status, failure.headers)


def _right_path(path: str) -> str:
    for known in ("/chat/completions", "/completions", "/models"):
        if path.endswith(known):
            return f"; did you mean /v1{known}?"
    return "; the API is under /v1, for example /v1/chat/completions"


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
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


class Edge:
    """What holds for every path: request ids, keys, tidy paths, HEAD, bounded bodies, all errors in OpenAI's shape."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._num_held_bytes = 0

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

        body = _Body(receive, self)
        try:
            scope = {**scope, "path": re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/",
                     "method": "GET" if scope["method"] == "HEAD" else scope["method"]}  # uvicorn sends no body to HEAD
            self._check(scope)
            await self._app(_as_json(scope), body.receive, send_with_id)
        except Exception as error:  # the last chance to answer
            if not isinstance(error, APIError):
                logger.exception("request %s failed", request_id)
            if not has_started:
                failure = as_api_error(error)
                response = json_response(failure.content, failure.status, failure.headers)
                await response(scope, receive, send_with_id)
        finally:
            self.hold(-body.num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count what the bodies of all requests take. Raises APIError when it is too much."""
        self._num_held_bytes += num_bytes
        if num_bytes > 0 and self._num_held_bytes > MAX_HELD_BYTES:
            raise APIError(429, f"the bodies of all requests in progress are larger than {MAX_HELD_BYTES} bytes",
                           type="rate_limit_error", code="rate_limit_exceeded", headers=RETRY_AFTER | HANG_UP)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise APIError(431, f"the headers are more than {MAX_HEADERS} or larger than {MAX_HEADER_BYTES} bytes")
        if self._key_digests and not _is_open(scope["path"]) and not self._has_key(scope["headers"]):
            raise APIError(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                           type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise APIError(415, "a Content-Encoding is not supported: send the body as it is")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
            raise APIError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", headers=HANG_UP)

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the one Authorization header holds a key; how long that takes says nothing about the keys."""
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        num_matches = sum(hmac.compare_digest(digest, known) for known in self._key_digests)
        return num_matches > 0 and scheme.lower() == b"bearer"


class _Body:
    """A request's body on its way in: bounded in size, and in the time that it may stand still."""

    def __init__(self, receive: Receive, edge: Edge) -> None:
        self.num_bytes = 0
        self._receive = receive
        self._edge = edge
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:  # what comes is the client's leaving
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), BODY_TIMEOUT)
        except asyncio.TimeoutError:
            raise APIError(408, f"nothing of the body came for {BODY_TIMEOUT:g} seconds", headers=HANG_UP) from None
        self._is_complete = not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self.num_bytes += num_bytes
        self._edge.hold(num_bytes)
        if self.num_bytes > MAX_BODY_BYTES:
            raise APIError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", headers=HANG_UP)
        return message


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or PAGE_PATHS.fullmatch(path) is not None


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex


def _as_json(scope: Scope) -> Scope:
    """A body is JSON whatever its Content-Type says: many clients say nothing, or text/plain."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", JSON_TYPE.encode())]}
