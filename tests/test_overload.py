"""More than the server can take: of requests, connections, bytes, time and patience. Each limit is a clear refusal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server import Server, hang_up, parse_events, receive_until, serve_in_thread, serve_process, wait_until
from vllm_mini import api_server, http_connection, http_edge

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "dummy", "prompt": "Hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "dummy", "prompt": "Hello", "max_tokens": 5, "temperature": 0, **fields}


async def post_all(server: Server, bodies: list[dict[str, Any]], path: str = COMPLETIONS) -> list[httpx.Response]:
    """All at once, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(client.post(path, json=body) for body in bodies))


class Watch:
    """Asks something over and over on a thread, and keeps what came and how long it took."""

    def __init__(self, look: Any, period: float = 0.0) -> None:
        self.found: list[Any] = []
        self.seconds: list[float] = []
        self._look, self._period = look, period
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._period):
            begin = time.perf_counter()
            self.found.append(self._look())
            self.seconds.append(time.perf_counter() - begin)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_in_thread() as running:
        yield running


# ---- the queue ----


def test_OV_01_beyond_the_queue_limit_requests_are_refused_at_once() -> None:
    with serve_in_thread(max_num_seqs=2, max_waiting=10) as server:
        expected = server.complete(max_tokens=200, ignore_eos=True, temperature=0).json()["choices"]
        waiting = server.engine.scheduler.waiting
        with Watch(lambda: len(waiting), period=0.001) as watch:
            answers = asyncio.run(post_all(server, [completion(max_tokens=200, ignore_eos=True)] * 100))
        accepted = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 10 <= len(accepted) < 50
        assert all(answer.json()["choices"] == expected for answer in accepted)
        for answer in refused:
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert max(watch.found) <= 10
        assert server.complete().status_code == 200
        server.wait_drained()


def test_OV_01_n_choices_count_as_n_and_a_stream_is_refused_the_same_way() -> None:
    with serve_in_thread(max_num_seqs=4, max_waiting=4) as server:
        running = server.connect(COMPLETIONS, {**LONG, "n": 4})
        receive_until(running, b"data: ")
        waiting = server.connect(COMPLETIONS, {**LONG, "n": 3})
        wait_until(lambda: server.engine.scheduler.waiting)
        for stream in (False, True):
            refused = server.complete(n=2, stream=stream)
            assert refused.status_code == 429 and "3 of at most 4" in refused.json()["error"]["message"]
            assert refused.headers["content-type"] == "application/json"
        last = server.connect(COMPLETIONS, LONG)
        wait_until(lambda: len(server.engine.scheduler.waiting) == 2)
        assert server.complete().status_code == 429
        too_wide = server.complete(["a"] * 5)
        assert too_wide.status_code == 429  # the queue is full; once it is not:
        for connection in (running, waiting, last):
            hang_up(connection)
        server.wait_drained()
        too_wide = server.complete(["a"] * 5)
        assert too_wide.status_code == 400 and "5 choices" in too_wide.json()["error"]["message"]


def test_CC_09_openai_python_repeats_only_what_may_succeed_later() -> None:
    with serve_in_thread(max_num_seqs=1, max_waiting=1, app_settings={"api_key": "key"}) as server:
        hits: list[int] = []
        http_client = openai.DefaultHttpxClient(event_hooks={"request": [lambda _: hits.append(1)]})
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=2, http_client=http_client)

        def count(error: type[Exception], key: str = "key", **fields: Any) -> int:
            hits.clear()
            with pytest.raises(error):
                client.with_options(api_key=key).completions.create(**{"model": "dummy", "prompt": "Hi", **fields})
            return len(hits)

        assert count(openai.BadRequestError, temperature=7) == 1
        assert count(openai.NotFoundError, model="nope") == 1
        assert count(openai.AuthenticationError, key="wrong") == 1
        assert count(openai.BadRequestError, prompt="x" * 5000) == 1
        execute = server.engine.worker.execute

        def execute_slowly(output: Any) -> Any:
            time.sleep(0.005)
            return execute(output)

        server.engine.worker.execute = execute_slowly  # type: ignore[method-assign]
        busy = client.completions.create(model="dummy", prompt="Hi", max_tokens=1900, stream=True,
                                         extra_body={"ignore_eos": True})
        queued = threading.Thread(target=client.completions.create,
                                  kwargs={"model": "dummy", "prompt": "Hi", "max_tokens": 1})
        queued.start()
        wait_until(lambda: server.engine.scheduler.waiting)
        begin = time.monotonic()
        assert count(openai.RateLimitError) == 3
        assert time.monotonic() - begin > 1.9  # Retry-After, twice
        busy.close()
        queued.join()
        http_client.close()


# ---- time ----


def test_a_request_that_takes_too_long_ends_with_504_or_an_error_in_its_stream() -> None:
    with serve_in_thread(max_num_seqs=1, app_settings={"request_timeout": 0.4}) as server:
        assert server.complete().status_code == 200
        late = server.complete(max_tokens=1900, ignore_eos=True)
        assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
        error = late.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout") and "0.4 seconds" in error["message"]
        server.wait_drained(timeout=1)
        events = parse_events(server.complete(max_tokens=1900, ignore_eos=True, stream=True).content)
        assert len(events) > 1 and events[-1]["error"]["code"] == "request_timeout"
        server.wait_drained(timeout=1)
        first = server.connect(COMPLETIONS, LONG)
        receive_until(first, b"data: ")
        waited = server.complete(stream=True)  # in the queue, with no event sent
        assert waited.status_code in (200, 504)
        hang_up(first)
        server.wait_drained()


# ---- connections ----


@pytest.mark.parametrize(("stream", "fields"), [(True, {}), (False, {}), (True, {"n": 4}), (False, {"prompt": ["a", "b"]})])
def test_a_client_that_goes_away_has_its_work_stopped_within_two_steps(stream: bool, fields: dict[str, Any]) -> None:
    with serve_in_thread() as server:
        steps: list[Any] = []
        execute = server.engine.worker.execute

        def execute_slowly(output: Any) -> Any:
            steps.append(output)
            time.sleep(0.2)
            return execute(output)

        server.engine.worker.execute = execute_slowly  # type: ignore[method-assign]
        connection = server.connect(COMPLETIONS, {**LONG, "stream": stream, **fields})
        if stream:
            receive_until(connection, b"data: ")
        wait_until(lambda: len(steps) >= 3)
        num_steps = len(steps)
        hang_up(connection)
        server.wait_drained()
        time.sleep(0.5)  # a further step would come now
        assert len(steps) - num_steps <= 2


def test_OV_02_clients_that_never_read_slow_nobody_down_and_hold_little_memory(server: Server) -> None:
    def speed() -> float:
        begin = time.perf_counter()
        assert server.complete(max_tokens=300, ignore_eos=True).json()["usage"]["completion_tokens"] == 300
        return time.perf_counter() - begin

    speed()
    memory = psutil.Process().memory_info().rss
    stalled = [server.connect(CHAT, {"model": "dummy", "messages": [{"role": "user", "content": "x"}], "stream": True,
                                     "max_tokens": 1900, "ignore_eos": True, "logprobs": True, "top_logprobs": 20})
               for _ in range(5)]
    wait_until(lambda: len(server.engine.scheduler.running) == 5)
    server.wait_drained(timeout=60)  # they are computed to their end
    alone = min(speed() for _ in range(3))
    assert psutil.Process().memory_info().rss - memory < 100 * 2**20
    for connection in stalled:
        hang_up(connection)
    assert alone < 3 * min(speed() for _ in range(3)) + 0.5


def test_OV_02_a_client_that_takes_nothing_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "WRITE_TIMEOUT", 0.3)
    with serve_in_thread() as server:
        connection = server.connect(COMPLETIONS, {**LONG, "logprobs": 5, "n": 8})
        wait_until(lambda: server.engine.scheduler.running)
        server.wait_drained(timeout=30)
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in receive_until(connection, b"")
        connection.close()


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="needs 4096 open files")
def test_OV_03_a_thousand_streams_at_once_are_all_answered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # what a server usually starts with
    try:
        with serve_process("dummy", "--kv-cache-memory", "64MB") as process:
            server = process.connect()
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
            connections = [server.connect(COMPLETIONS, completion(max_tokens=2, stream=True)) for _ in range(1000)]
            for connection in connections:
                answer = receive_until(connection, b"[DONE]\n\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer
            assert server.client.get("/health").status_code == 200
            for connection in connections:
                connection.close()
            server.client.close()
            assert "too many open files" not in process.log.lower()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_OV_05_the_http_loop_answers_while_300_streams_run() -> None:
    with serve_process("dummy", "--kv-cache-memory", "64MB", "--uvicorn-log-level", "warning") as process:
        server = process.connect()
        paths = iter(["/health", "/metrics", "/v1/models"] * 100_000)

        def look() -> int:
            return httpx.get(server.url + next(paths), timeout=30).status_code

        expected = parse_events(server.complete(max_tokens=30, stream=True, temperature=0).content)
        with Watch(look, period=0.1) as watch:
            answers = asyncio.run(post_all(server, [completion(max_tokens=30, stream=True)] * 300))
        text = "".join(event["choices"][0]["text"] for event in expected)
        for answer in answers:
            events = parse_events(answer.content)
            assert "".join(event["choices"][0]["text"] for event in events) == text
        assert set(watch.found) == {200}
        assert watch.p99 < 1
        server.client.close()


def test_SE_10_half_sent_bodies_hold_nobody_up_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_TIMEOUT", 1.0)
    with serve_in_thread() as server:
        body = json.dumps(completion()).encode()
        address = server.url.removeprefix("http://").split(":")
        connections = [socket.create_connection((address[0], int(address[1])), timeout=20) for _ in range(300)]
        for connection in connections:
            connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                               + body[: len(body) // 2])
        begin = time.monotonic()
        assert server.complete().status_code == 200 and time.monotonic() - begin < 5
        for connection in connections:
            answer = receive_until(connection, b"")
            assert answer.startswith(b"HTTP/1.1 408 ") and b'"type":"invalid_request_error"' in answer
            connection.close()


def test_SE_10_connections_that_say_nothing_or_half_a_head_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "READ_TIMEOUT", 0.5)
    monkeypatch.setattr(api_server, "KEEP_ALIVE", 1)
    with serve_in_thread() as server:
        address = server.url.removeprefix("http://").split(":")
        for beginning in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n",
                          b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he"):
            with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
                connection.sendall(beginning)
                answer = receive_until(connection, b"")
                assert answer.count(b"HTTP/1.1 200") == beginning.count(b"\r\n\r\n")
        slow = server.connect(COMPLETIONS, {**LONG, "max_tokens": 1500})  # a long answer is no silence of the client's
        assert b"[DONE]" in receive_until(slow, b"[DONE]")
        slow.close()


def test_what_is_no_http_gets_a_400_in_openais_shape(server: Server) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        head, _, body = receive_until(connection, b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["type"] == "invalid_request_error"


# ---- bytes ----


def test_SE_02_very_large_requests_are_refused_early_and_keep_nothing(server: Server) -> None:
    big = "x" * (10 * 2**20)
    one = {"role": "user", "content": "x"}
    bodies = [{"messages": [{"role": "user", "content": big}]}, {"messages": [one], "unknown": big},
              {"messages": [one] * 100_000}, {"messages": [{"role": "user", "content": "x " * 2**20}]}]
    memory = psutil.Process().memory_info().rss
    for body in bodies:
        content = json.dumps({"model": "dummy", **body}).encode()
        begin = time.monotonic()
        refused = server.client.post(CHAT, content=content)
        assert refused.status_code in (400, 413) and time.monotonic() - begin < 2
        assert refused.json()["error"]["type"] == "invalid_request_error"
    chunked = server.client.post(CHAT, content=iter([b'{"model": "dummy", "x": "'] + [b"y" * 2**20] * 12))
    assert chunked.status_code == 413
    asyncio.run(post_all(server, [{"model": "dummy", "prompt": "x" * (3 * 2**20)}] * 20))
    assert psutil.Process().memory_info().rss - memory < 500 * 2**20  # the clients' own copies counted in
    ids = server.complete([1] * 1_000_000)
    assert ids.status_code == 400 and ids.json()["error"]["code"] == "context_length_exceeded"
    assert server.complete().status_code == 200


def test_SE_02_all_bodies_together_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "MAX_HELD_BYTES", 3 * 2**20)
    address = server.url.removeprefix("http://").split(":")
    halves = []
    for _ in range(2):
        connection = socket.create_connection((address[0], int(address[1])), timeout=10)
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**21}\r\n\r\n".encode()
                           + b" " * (2**20 + 2**19 - 2**16))
        halves.append(connection)
    refused = wait_until(lambda: (answer := server.complete("x" * 2**18)).status_code == 429 and answer)
    assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["retry-after"] == "1"
    for connection in halves:
        connection.close()
    wait_until(lambda: server.complete("x" * 2**12).status_code != 429)


@pytest.mark.parametrize("fields", [{"n": 129}, {"n": 10_000}, {"n": 2**31}, {"n": 100, "prompt": ["x"] * 5000}])
def test_SE_04_a_huge_n_is_refused_at_once(fields: dict[str, Any]) -> None:
    with serve_in_thread(max_waiting=2048) as server:
        begin = time.monotonic()
        refused = server.complete(**{"prompt": "x", **fields})
        assert refused.status_code == 400 and time.monotonic() - begin < 1
        assert any(limit in refused.json()["error"]["message"] for limit in ("128", "2048"))


def test_tokenizing_a_long_text_does_not_hold_up_the_loop(smollm2_path: Any) -> None:
    from vllm_mini.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_model(smollm2_path)
    assert tokenizer is not None
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    with Watch(lambda: None, period=0.001) as watch:
        begin = time.perf_counter()
        assert len(tokenizer.encode(text)) > 50_000
        seconds = time.perf_counter() - begin
        wait_until(lambda: len(watch.found) > 5)
    assert len(watch.found) > 5 + 20 * seconds  # a lock held all the time would let through none
