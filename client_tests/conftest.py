"""One server with the real model, started as a person starts it, for clients that live in an environment of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = os.environ.get("VLLM_MINI", str(ROOT / ".venv/bin/vllm-mini"))
KEY = "secret"
MODEL = "SmolLM2-135M-Instruct"


@contextlib.contextmanager
def serve(*arguments: str) -> Iterator[str]:
    """A server of its own, at this URL; it must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([COMMAND, "serve", "--port", str(port), *arguments])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The base URL, without /v1, of the real model behind a key."""
    with serve("--api-key", KEY, "--dtype", "float32") as url:
        yield url
