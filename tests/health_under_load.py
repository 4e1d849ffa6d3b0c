"""How long /health takes while a long prompt is prefilled beside many streams, on the real model.

    python -m tests.health_under_load [--streams 32] [--prompt-tokens 4000] [MODEL]

starts `vllm-mini serve` as a process of its own and exits 1 where the 99th percentile is beyond 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator

from tests.server import Server, receive_until, serve_process

LIMIT = 0.100  # seconds
PATIENCE = 600  # seconds that one step, the longest here, may take
PERIOD = 0.010  # seconds between two looks


class HealthWatch:
    """Asks for /health over and over, on a thread and a connection of its own."""

    def __init__(self, server: Server) -> None:
        self.seconds: list[float] = []
        self._url = server.url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        host, port = self._url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            while not self._is_over.wait(PERIOD):
                begin = time.perf_counter()
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
                assert receive_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
                self.seconds.append(time.perf_counter() - begin)

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[max(0, math.ceil(share * len(self.seconds)) - 1)]


@contextlib.contextmanager
def open_streams(server: Server, model: str, number: int) -> Iterator[None]:
    """Inside, so many streams have begun; they are dropped at the end."""
    body = {"model": model, "max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 0}
    connections = [server.connect("/v1/completions", {**body, "prompt": f"{index}. A story of {index} friends:"})
                   for index in range(number)]
    for connection in connections:
        connection.settimeout(PATIENCE)
    readers = [threading.Thread(target=receive_until, args=(connection, b"")) for connection in connections]
    for connection, reader in zip(connections, readers):
        receive_until(connection, b"data: ")
        reader.start()
    yield
    for connection, reader in zip(connections, readers):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()


def measure(server: Server, model: str, num_streams: int, num_prompt_tokens: int) -> HealthWatch:
    """Watches from the arrival of the long prompt to its first token."""
    prompt = [7 + index % 1000 for index in range(num_prompt_tokens)]
    with open_streams(server, model, num_streams), HealthWatch(server) as watch:
        begin = time.perf_counter()
        connection = server.connect("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True})
        connection.settimeout(PATIENCE)
        assert b"error" not in receive_until(connection, b"[DONE]")
        print(f"prefill of {num_prompt_tokens} tokens beside {num_streams} streams: {time.perf_counter() - begin:.1f} s")
        connection.close()
    return watch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    args = parser.parse_args()
    with serve_process(*([args.model] if args.model else [])) as process:
        server = process.connect()
        model = server.client.get("/v1/models").json()["data"][0]["id"]
        watch = measure(server, model, args.streams, args.prompt_tokens)
        server.client.close()
    p50, p99, worst = (1000 * watch.percentile(share) for share in (0.5, 0.99, 1.0))
    print(f"/health: {len(watch.seconds)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.1f} ms")
    return int(watch.percentile(0.99) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
