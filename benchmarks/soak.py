"""A storm of clients that answer slowly, hang, leave, abort and send garbage, and a check that nothing of it stays.

    python benchmarks/soak.py --clients 500 --idle-connections 500 --seconds 600

Starts `vllm-mini serve`, asks one greedy question, lets the clients loose, and asks again. Afterwards every block must be
free or cached, no queue may hold anything, memory must be within 5% of what it was after the first tenth of the storm, and
the greedy answer must be the same. Prints the figures as JSON; exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil

MAX_HANG = 5.0  # seconds that a client hangs with half a request or does not read
RSS_TOLERANCE = 0.05
TEXTS = ["Hi", "Name a colour.", "What is the capital of France?", "Write a poem about the sea. " * 12, "你好，你是谁？",
         "🙂🙃" * 20]
GARBAGE = [b"\x00\xff" * 200, b"GET\r\n\r\n", b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
           b"GET / HTTP/1.1\r\n" + b"a" * 9000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))]
BAD_BODIES: list[bytes] = [b"{", b"[" * 50_000, b"null", b'{"model": "x"}', b'{"messages": []}', b"\xff\xfe",
                           b'{"model": "%s", "messages": [{"role": "user", "content": "x"}], "temperature": -1}',
                           b'{"model": "%s", "messages": [{"role": "user", "content": "x"}], "n": 1000000}',
                           b'{"model": "%s", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10000000}']


class Storm:
    """Clients of one server, and what they met."""

    def __init__(self, port: int, model: str, seed: int) -> None:
        self.port, self.model = port, model
        self.counts: Counter[str] = Counter()
        self.health: list[float] = []  # seconds
        self.broken: list[str] = []  # promises
        self._random = random.Random(seed)
        self._actions: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.chat, 6), (self.stream, 6), (self.leave_stream, 5), (self.leave_before_the_answer, 4),
            (self.read_slowly, 2), (self.send_garbage, 3), (self.send_bad_body, 3), (self.hang_in_body, 2),
            (self.break_off_in_body, 3), (self.break_off_in_headers, 2), (self.tokenize, 2), (self.ask_nowhere, 1)]

    async def run_client(self, until: float) -> None:
        """One client after another in the same place, each doing one thing."""
        actions, weights = zip(*self._actions)
        while time.monotonic() < until:
            action = self._random.choices(actions, weights)[0]
            self.counts[action.__name__] += 1
            try:
                await asyncio.wait_for(action(), 300)
            except (OSError, asyncio.IncompleteReadError, EOFError):
                self.counts["connections that the server closed"] += 1
            except asyncio.TimeoutError:
                self.broken.append(f"{action.__name__} had no end within 300 s")
            await asyncio.sleep(self._random.random() * 0.5)

    async def watch(self, until: float) -> None:
        """/health, twice a second."""
        while time.monotonic() < until:
            started = time.monotonic()
            status, _ = await self._ask("GET", "/health")
            self.health.append(time.monotonic() - started)
            if status != 200:
                self.broken.append(f"/health said {status}")
            await asyncio.sleep(0.5)

    async def keep_idle(self, until: float) -> None:
        """A connection that asks something now and then."""
        while time.monotonic() < until:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with self._connect() as (reader, writer):
                    while time.monotonic() < until:
                        writer.write(self._request("GET", "/v1/models"))
                        await _read_answer(reader)
                        self.counts["questions on idle connections"] += 1
                        await asyncio.sleep(20 + self._random.random() * 20)

    async def chat(self) -> None:
        await self._expect("/v1/chat/completions", self._chat_body(n=self._random.choice([1, 1, 1, 3])), {200, 429})

    async def stream(self) -> None:
        async with self._connect() as (reader, writer):
            writer.write(self._request("POST", "/v1/chat/completions", self._chat_body(stream=True)))
            status, content = await _read_answer(reader)
            self._count(status, {200, 429})
            if status == 200 and not content.rstrip().endswith(b"data: [DONE]"):
                self.broken.append("a stream ended without [DONE]")

    async def leave_stream(self) -> None:
        async with self._connect() as (reader, writer):
            writer.write(self._request("POST", "/v1/chat/completions",
                                       self._chat_body(stream=True, max_tokens=500, ignore_eos=True)))
            for _ in range(self._random.randrange(12)):
                if not await asyncio.wait_for(reader.readline(), 60):
                    break
            self.counts["aborts"] += 1

    async def leave_before_the_answer(self) -> None:
        async with self._connect() as (_, writer):
            writer.write(self._request("POST", "/v1/chat/completions", self._chat_body(max_tokens=500, ignore_eos=True)))
            await writer.drain()
            await asyncio.sleep(self._random.random())
            self.counts["aborts"] += 1

    async def read_slowly(self) -> None:
        async with self._connect() as (reader, writer):
            writer.write(self._request("POST", "/v1/chat/completions", self._chat_body(stream=True, max_tokens=60)))
            for _ in range(5):
                await asyncio.sleep(self._random.random() * MAX_HANG / 3)
                if not await reader.read(100):
                    break
            self.counts["aborts"] += 1

    async def send_garbage(self) -> None:
        async with self._connect() as (reader, writer):
            writer.write(self._random.choice(GARBAGE))
            await asyncio.wait_for(reader.read(), MAX_HANG) if self._random.random() < 0.5 else None
            self.counts["faults"] += 1

    async def send_bad_body(self) -> None:
        body = self._random.choice(BAD_BODIES)
        await self._expect("/v1/chat/completions", body.replace(b"%s", self.model.encode()), {400, 404, 429})
        self.counts["faults"] += 1

    async def hang_in_body(self) -> None:
        await self._break_off(0.5, self._random.random() * MAX_HANG)

    async def break_off_in_body(self) -> None:
        await self._break_off(0.7, 0)

    async def break_off_in_headers(self) -> None:
        await self._break_off(0.1, 0)

    async def tokenize(self) -> None:
        text = self._random.choice(TEXTS) * self._random.choice([1, 1, 100])
        await self._expect("/tokenize", json.dumps({"model": self.model, "prompt": text}).encode(), {200})

    async def ask_nowhere(self) -> None:
        await self._expect("/v1/nowhere", b"{}", {404})
        self.counts["faults"] += 1

    async def _break_off(self, share: float, hang: float) -> None:
        request = self._request("POST", "/v1/chat/completions", self._chat_body())
        async with self._connect() as (_, writer):
            writer.write(request[: int(len(request) * share)])
            await writer.drain()
            await asyncio.sleep(hang)
            self.counts["faults"] += 1

    async def _expect(self, path: str, body: bytes, statuses: set[int]) -> None:
        status, _ = await self._ask("POST", path, body)
        self._count(status, statuses)

    def _count(self, status: int, statuses: set[int]) -> None:
        self.counts[f"status {status}"] += 1
        if status not in statuses:
            self.broken.append(f"status {status} where one of {sorted(statuses)} was due")

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        async with self._connect() as (reader, writer):
            writer.write(self._request(method, path, body))
            return await _read_answer(reader)

    def _chat_body(self, **fields: object) -> bytes:
        text = f"{self._random.randrange(1000)} {self._random.choice(TEXTS)}"
        body = {"model": self.model, "messages": [{"role": "user", "content": text}],
                "max_tokens": self._random.randrange(1, 9), "temperature": self._random.choice([0, 1]), **fields}
        return json.dumps(body).encode()

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        return (f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n").encode() + body

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body, of a known length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" not in head:
        length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
        return status, await reader.readexactly(int(length or 0))
    content = b""
    while (size := int(await reader.readline(), 16)):
        content += (await reader.readexactly(size + 2))[:-2]
    return status, content


async def greedy_answer(storm: Storm) -> str:
    body = {"model": storm.model, "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": "Tell me about the sea."}]}
    _, content = await storm._ask("POST", "/v1/chat/completions", json.dumps(body).encode())
    return json.loads(content)["choices"][0]["message"]["content"]


async def read_gauges(storm: Storm) -> dict[str, float]:
    _, content = await storm._ask("GET", "/metrics")
    rows = [line.rsplit(" ", 1) for line in content.decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in rows}


async def wait_until_idle(storm: Storm, broken: list[str]) -> dict[str, float]:
    for _ in range(120):
        gauges = await read_gauges(storm)
        busy = [name for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped",
                                  "vllm_mini:kv_blocks_used") if gauges[name]]
        if not busy:
            return gauges
        await asyncio.sleep(0.5)
    broken.append(f"a minute after the storm, {', '.join(busy)} are not 0")
    return gauges


async def weather(storm: Storm, server: psutil.Process, args: argparse.Namespace) -> dict[str, object]:
    before = await greedy_answer(storm)
    started = time.monotonic()
    until = started + args.seconds
    rss: list[tuple[float, int]] = []

    async def measure() -> None:
        while time.monotonic() < until:
            rss.append((time.monotonic() - started, server.memory_info().rss))
            await asyncio.sleep(1)

    await asyncio.gather(measure(), storm.watch(until), *(storm.run_client(until) for _ in range(args.clients)),
                         *(storm.keep_idle(until) for _ in range(args.idle_connections)))
    gauges = await wait_until_idle(storm, storm.broken)
    after = await greedy_answer(storm)
    if after != before:
        storm.broken.append("the greedy answer changed")
    warm = statistics.median(value for at, value in rss if args.seconds * 0.1 <= at <= args.seconds * 0.2)
    final = server.memory_info().rss
    if final > warm * (1 + RSS_TOLERANCE):
        storm.broken.append(f"memory grew from {warm / 2**20:.0f} to {final / 2**20:.0f} MiB")
    health = sorted(storm.health)
    return {"seconds": args.seconds, "clients": args.clients, "idle connections": args.idle_connections,
            "counts": dict(sorted(storm.counts.items())), "requests": sum(
                count for name, count in storm.counts.items() if name.startswith("status")) + storm.counts["aborts"],
            "aborts": storm.counts["aborts"], "faults": storm.counts["faults"],
            "health p99 ms": round(1000 * health[int(len(health) * 0.99)], 1),
            "rss MiB": {"warm": round(warm / 2**20), "peak": round(max(value for _, value in rss) / 2**20),
                        "after": round(final / 2**20)},
            "tokens generated": gauges["vllm:generation_tokens_total"], "preemptions": gauges["vllm:num_preemptions_total"],
            "greedy answer is the same": after == before, "broken": sorted(set(storm.broken))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--idle-connections", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", help="(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-kv-blocks", type=int, default=300, help="few, so that sequences are preempted (default: 300)")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm-mini"), "serve", "--port", str(port), "--num-kv-blocks",
               str(args.num_kv_blocks), "--max-waiting", "200", "--uvicorn-log-level", "error", *(
                   ["--model", args.model] if args.model else [])]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    try:
        storm = Storm(port, args.model or "SmolLM2-135M-Instruct", args.seed)
        report = asyncio.run(_after_start(storm, process, args))
    finally:
        process.terminate()
        exit_code = process.wait(60)
    report["exit code of the server"] = exit_code
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 1 if report["broken"] or exit_code else 0


async def _after_start(storm: Storm, process: subprocess.Popen[bytes], args: argparse.Namespace) -> dict[str, object]:
    for _ in range(240):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await storm._ask("GET", "/health"))[0] == 200:
                return await weather(storm, psutil.Process(process.pid), args)
        if process.poll() is not None:
            raise SystemExit("the server ended")
        await asyncio.sleep(0.5)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main())
