"""Real servers for tests: one in a thread, whose engine can be looked into, or a process started as a user would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn

from vllm_mini.api_server import build_app
from vllm_mini.async_engine import AsyncLLMEngine
from vllm_mini.config import EngineConfig
from vllm_mini.engine import LLMEngine

DEADLINE = 30.0  # seconds; nothing here should come near it


def wait_until(condition: Callable[[], Any], *, timeout: float = DEADLINE, what: str = "") -> Any:
    """Poll until the condition holds; returns its value. AssertionError at the deadline."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        time.sleep(0.01)
    return value


class Server:
    """A server in this process: `url` for clients, `engine` for a look at what they left behind."""

    def __init__(self, engine: LLMEngine, url: str) -> None:
        self.engine = engine
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs) if body is not None else self.client.post(path, **kwargs)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "dummy", "messages": [{"role": "user", "content": content}], "max_tokens": 5, **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "dummy", "prompt": prompt, "max_tokens": 5, **fields})

    def wait_drained(self, timeout: float = 5.0) -> None:
        """Nobody is served, and every block is free or merely remembered."""
        scheduler = self.engine.scheduler
        wait_until(lambda: not scheduler.has_unfinished() and not scheduler.block_manager.num_used_blocks,
                   timeout=timeout, what="drained")
        scheduler.check()


@contextlib.contextmanager
def serve_in_thread(engine: LLMEngine | None = None, *, app_settings: dict[str, Any] | None = None, **config: Any
                    ) -> Iterator[Server]:
    """A server on a free port around an engine, or around a new one of these settings (model "dummy" unless named)."""
    engine = engine or LLMEngine.from_config(EngineConfig(**{"model": "dummy", "num_kv_blocks": 512, **config}))
    app = build_app(AsyncLLMEngine(engine), **{"served_model_names": ["dummy"], **(app_settings or {})})
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    running = Server(engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        thread.join()


class ServerProcess:
    """`vllm-mini serve` as a process of its own; what it logs is read as it comes."""

    def __init__(self, *args: str, **environment: str) -> None:
        command = [sys.executable, "-m", "vllm_mini", "serve", *args]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
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
def serve_process(*args: str, **environment: str) -> Iterator[ServerProcess]:
    """A server process on a free port, killed at the end if it still lives."""
    server = ServerProcess(*args, "--port", "0", **environment)
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


def loads_strictly(text: str | bytes) -> Any:
    """JSON without the NaN and Infinity that Python would let pass."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
