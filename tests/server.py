"""Real servers for tests: one in a thread, whose engine can be looked into, or a process started as a user would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from vllm_mini.api_server import build_app, server_config
from vllm_mini.async_engine import AsyncLLMEngine
from vllm_mini.config import EngineConfig
from vllm_mini.engine import LLMEngine

DEADLINE = 30.0  # seconds; nothing here should come near it
SETTINGS: dict[str, Any] = {"model": "dummy", "num_kv_blocks": 512, "dtype": "float32"}  # exact, whoever else is served


def wait_until(condition: Callable[[], Any], *, timeout: float = DEADLINE, what: str = "") -> Any:
    """Poll until the condition holds; returns its value. AssertionError at the deadline."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        time.sleep(0.01)
    return value


class Server:
    """`url` and `client` to ask it with; `engine` to look at what clients left behind, if it is in this process."""

    def __init__(self, engine: LLMEngine | None, url: str) -> None:
        self._engine = engine
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE)

    @property
    def engine(self) -> LLMEngine:
        assert self._engine is not None
        return self._engine

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, content=json.dumps(body), **kwargs)

    def connect(self, path: str, body: Any) -> socket.socket:
        """Send a request and leave the rest to the caller, who may hang up at any time."""
        content = json.dumps(body).encode()
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=DEADLINE)
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def get_raw(self, path: str, headers: bytes) -> bytes:
        """The raw answer to a GET with headers that a well-behaved client would not send."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            head = f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n".encode()
            connection.sendall(head + headers + b"\r\n")
            return receive_until(connection, b"")

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "dummy", "messages": [{"role": "user", "content": content}], "max_tokens": 5, **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "dummy", "prompt": prompt, "max_tokens": 5, **fields})

    def wait_drained(self, timeout: float = 10.0) -> None:
        """Nobody is served, and every block is free or merely remembered."""
        scheduler = self.engine.scheduler
        wait_until(lambda: not scheduler.has_unfinished() and not scheduler.block_manager.num_used_blocks,
                   timeout=timeout, what="drained")
        scheduler.check()


@contextlib.contextmanager
def serve_in_thread(
    engine: LLMEngine | None = None, *, app_settings: dict[str, Any] | None = None, max_waiting: int | None = None,
    **config: Any,
) -> Iterator[Server]:
    """A server on a free port around an engine, or around a new one of these settings (model "dummy" unless named)."""
    engine = engine or LLMEngine.from_config(EngineConfig(**{**SETTINGS, **config}))
    app = build_app(AsyncLLMEngine(engine, max_waiting=max_waiting),
                    **{"served_model_names": ["dummy"], **(app_settings or {})})
    with serve_app(app) as url:
        running = Server(engine, url)
        try:
            yield running
        finally:
            running.client.close()


@contextlib.contextmanager
def serve_app(app: FastAPI) -> Iterator[str]:
    """Any application on a free port, served by a thread; its address."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle's delays on
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(app, "warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class ServerProcess:
    """`vllm-mini serve` as a process of its own; what it logs is read as it comes."""

    def __init__(self, *args: str, prelude: str = "", **environment: str) -> None:
        """`prelude` is Python that runs first, to spoil something."""
        command = [sys.executable, "-c", f"{prelude}\nimport sys\nfrom vllm_mini.cli import main\nsys.exit(main())"]
        if not prelude:
            command = [sys.executable, "-m", "vllm_mini"]
        self.process = subprocess.Popen([*command, "serve", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True,
                                        env={**os.environ, **environment})
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for_url(self) -> str:
        """The address that it says it serves at."""
        def find() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log
            return re.search(r"serving at (http://\S+)/v1", self.log)

        return wait_until(find, what="the server's address")[1]

    def connect(self) -> Server:
        """Its client side, once it serves."""
        return Server(None, self.wait_for_url())

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = DEADLINE) -> int:
        """The exit code."""
        code = self.process.wait(timeout)
        self._reader.join()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def serve_process(*args: str, prelude: str = "", **environment: str) -> Iterator[ServerProcess]:
    """A server process on a free port (unless one is given), killed at the end if it still lives."""
    server = ServerProcess(*args, *([] if "--port" in args else ["--port", "0"]), prelude=prelude, **environment)
    try:
        yield server
    finally:
        server.close()


def parse_events(raw: bytes) -> list[Any]:
    """The events of a stream, strictly read: one `data:` line each, JSON but for the last, which is [DONE]."""
    text = raw.decode()
    assert text.endswith("\n\n"), text[-80:]
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and len(event.splitlines()) == 1 for event in events), text
    assert [event for event in events if event == "data: [DONE]"] == events[-1:], text
    return [loads_strictly(event.removeprefix("data: ")) for event in events[:-1]]


def receive_until(connection: socket.socket, end: bytes) -> bytes:
    """What a connection brings up to the first `end`, or up to its close."""
    received = b""
    while not end or end not in received:
        part = connection.recv(1 << 20)
        if not part:
            break
        received += part
    return received


def hang_up(connection: socket.socket, *, reset: bool = False) -> None:
    """Close a connection politely (FIN) or not (RST)."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def loads_strictly(text: str | bytes) -> Any:
    """JSON without the NaN and Infinity that Python would let pass."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
