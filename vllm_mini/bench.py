"""Load for a server that speaks OpenAI's protocol, and for our engine without one. Flags, names and sums are `vllm bench`'s.

Knows no terminal. What one token is, the server's usage says; chunks are counted only where a server tells nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from vllm_mini.config import ConfigError
from vllm_mini.sequence import SamplingParams
from vllm_mini.tokenizer import Tokenizer

if TYPE_CHECKING:
    from vllm_mini.llm import LLM

__all__ = ["Answer", "Load", "Prompt", "PromptMaker", "Server", "bench_latency", "bench_serve", "bench_throughput",
           "summarize"]

METRICS = ("ttft", "tpot", "itl", "e2el")
SILENCE_TIMEOUT = 600.0  # seconds without a byte of an answer, after which a request has failed
MAX_LINE = 2**24  # bytes of an event
LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)
PROBE_LEN = 2  # output tokens of the request that finds out what a server accepts

Json = dict[str, Any]


# ---- prompts ----


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str  # of as many tokens, where the tokenizer allows
    output_len: int  # tokens to ask for


class PromptMaker:
    """Random prompts of an exact length: of tokens that stay themselves when their joined text is encoded again."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        texts = [(token_id, tokenizer.token_text(token_id)) for token_id in range(tokenizer.vocab_size)]
        words = [token_id for token_id, text in texts if re.fullmatch(r" [A-Za-z]+", text)]
        letters = [token_id for token_id, text in texts if re.fullmatch(r"[A-Za-z]", text)]
        self._token_ids = words if len(words) > 100 else letters
        if not self._token_ids:
            raise ConfigError("this tokenizer has no plain words or letters to make random prompts of")

    def token_ids(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._token_ids, k=num_tokens)

    def prompts(self, num_prompts: int, input_len: int, output_len: int, *, range_ratio: float = 0.0,
                prefix_len: int = 0) -> list[Prompt]:
        """Lengths are uniform within +-range_ratio of those given; all begin with the same prefix_len tokens."""
        prefix = self.token_ids(prefix_len)
        found = []
        for _ in range(num_prompts):
            ids = prefix + self.token_ids(self._length(input_len, range_ratio))
            found.append(Prompt(ids, self._tokenizer.decode(ids), self._length(output_len, range_ratio)))
        return found

    def _length(self, middle: int, ratio: float) -> int:
        return max(1, self._random.randint(int(middle * (1 - ratio)), int(np.ceil(middle * (1 + ratio)))))


# ---- one request ----


@dataclass
class Answer:
    """What one request came to; times in seconds from its start."""

    prompt_len: int  # tokens, as sent or as the server counted
    output_len: int = 0  # tokens, by the server's count; by chunks if not is_counted
    is_counted: bool = False
    ttft: float = 0.0  # to the first chunk that brings something of the answer
    latency: float = 0.0  # to the last chunk
    itls: list[float] = field(default_factory=list)  # between chunks that bring something
    error: str = ""  # empty: the answer came whole
    status: int = 0  # of a refusal

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None where there is none."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass(frozen=True)
class Server:
    """Where to send requests, and in what form."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    api_key: str | None = None
    sends_ids: bool = True  # prompts as token ids; else as text
    asks_usage: bool = True
    fields: Json = field(default_factory=dict)  # more of the body

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {self.base_url!r} is not an address such as http://127.0.0.1:8000")

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def body(self, prompt: Prompt) -> Json:
        text = {"messages": [{"role": "user", "content": prompt.text}]} if self.is_chat else {
            "prompt": prompt.token_ids if self.sends_ids else prompt.text}
        usage = {"stream_options": {"include_usage": True}} if self.asks_usage else {}
        return {"model": self.model, **text, "max_tokens": prompt.output_len, "stream": True, **usage, **self.fields}

    async def models(self) -> list[str]:
        """The names of its models."""
        async with self._open("GET", "/v1/models") as (status, pieces):
            content = b"".join([piece async for piece in pieces])
        if status != 200:
            raise ConfigError(f"{self.base_url} does not list its models ({_complaint(status, content)}): give --model")
        return [str(model["id"]) for model in json.loads(content)["data"]]

    async def ask(self, prompt: Prompt) -> Answer:
        """Send one request and take in its answer. What goes wrong is in `error`."""
        answer = Answer(len(prompt.token_ids))
        start = time.perf_counter()
        try:
            async with self._open("POST", self.endpoint, json.dumps(self.body(prompt)).encode()) as (status, pieces):
                if status == 200:
                    await _read_stream(answer, _lines(pieces), start)
                else:
                    answer.status = status
                    answer.error = _complaint(status, b"".join([piece async for piece in pieces]))
        except asyncio.TimeoutError:
            answer.error = f"no byte came for {SILENCE_TIMEOUT:.0f} s"
        except (EOFError, OSError, ValueError, AttributeError, TypeError, LookupError) as error:
            answer.error = f"the answer cannot be read: {error or type(error).__name__}"
            if isinstance(error, OSError):
                answer.error = f"the connection failed: {_reason(error)}"
        return answer

    @contextlib.asynccontextmanager
    async def _open(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Send a request; its status, and its body piece by piece. One connection each."""
        parts = urlsplit(self.base_url)
        prefix = parts.path.rstrip("/")
        prefix = prefix.removesuffix("/v1") if path.startswith("/v1/") else prefix
        is_tls = parts.scheme == "https"
        reader, writer = await asyncio.wait_for(asyncio.open_connection(
            parts.hostname, parts.port or (443 if is_tls else 80), limit=MAX_LINE,
            ssl=ssl.create_default_context() if is_tls else None), SILENCE_TIMEOUT)
        try:
            key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
            writer.write(f"{method} {prefix}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
                         f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{key}\r\n".encode() + body)
            await writer.drain()
            head = (await _within(reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")
            headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            yield int(head[0].split()[1]), _pieces(reader, headers)
        finally:
            writer.transport.abort()


async def _within(reading: Any) -> bytes:
    return await asyncio.wait_for(reading, SILENCE_TIMEOUT)


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """A body of HTTP/1.1 as it comes. EOFError (IncompleteReadError) where it breaks off."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await _within(reader.readuntil(b"\r\n"))).split(b";")[0], 16):
            yield (await _within(reader.readexactly(size + 2)))[:-2]
    elif "content-length" in headers:
        yield await _within(reader.readexactly(int(headers["content-length"])))
    else:
        while piece := await _within(reader.read(2**16)):
            yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    yield rest


async def _read_stream(answer: Answer, lines: AsyncIterator[bytes], start: float) -> None:
    """Fill in the answer from server-sent events."""
    has_ended, num_chunks = False, 0
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        if line[5:].strip() == b"[DONE]":
            has_ended = True
            break
        event, now = json.loads(line[5:]), time.perf_counter() - start
        if event.get("error"):
            answer.error = f"the stream brought an error: {_message(event)}"
            return
        if usage := event.get("usage"):
            answer.prompt_len, answer.output_len, answer.is_counted = (
                usage.get("prompt_tokens", answer.prompt_len), usage.get("completion_tokens", 0), True)
        for choice in event.get("choices") or ():
            if _brings_output(choice):
                if num_chunks:
                    answer.itls.append(now - answer.latency)
                else:
                    answer.ttft = now
                num_chunks += 1
                answer.latency = now
            if choice.get("finish_reason"):
                has_ended = True
                answer.latency = now
                if choice["finish_reason"] in ("error", "abort"):
                    answer.error = f"it ended with finish_reason {choice['finish_reason']!r}"
    if not answer.is_counted:
        answer.output_len = num_chunks
    if not num_chunks:  # tokens without a text: all came with the end
        answer.ttft = answer.latency
    if not has_ended and not answer.error:
        answer.error = "the stream broke off"
    elif not answer.output_len and not answer.error:
        answer.error = "the answer has no token"


def _brings_output(choice: Json) -> bool:
    """Whether a chunk has something of the answer: a chat's first one often has but the role."""
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("text", "content", "reasoning", "reasoning_content", "tool_calls", "token_ids"))


def _message(content: Any) -> str:
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _reason(error: Exception) -> str:
    """Why a connection failed, without asyncio's words for it."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _complaint(status: int, content: bytes) -> str:
    with contextlib.suppress(ValueError):
        return f"HTTP status {status}: {_message(json.loads(content))}"
    return f"HTTP status {status}: {content.decode(errors='replace')[:200]}"


# ---- a server under load ----


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests arrive."""

    request_rate: float = float("inf")  # requests a second
    burstiness: float = 1.0  # of gamma-distributed pauses; 1: a Poisson process
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0

    def arrivals(self, num_requests: int) -> list[float]:
        """Seconds at which to send each, scaled so that the rate is met exactly."""
        if self.request_rate == float("inf"):
            return [0.0] * num_requests
        drawn = random.Random(self.seed)
        times = np.cumsum([drawn.gammavariate(self.burstiness, 1.0) for _ in range(num_requests)])
        return list(times * (num_requests / self.request_rate / times[-1]))


async def bench_serve(server: Server, prompts: list[Prompt], load: Load,
                      report: Callable[[Answer], None] = lambda _: None) -> tuple[Server, list[Answer], float]:
    """Send the prompts; the server as it turned out, the answers in order, and the seconds it took.

    The first of the prompts finds out what the server accepts, load.num_warmups more warm it up; neither is counted.
    Raises ConfigError where nothing can be measured.
    """
    probe, warmups, prompts = prompts[0], prompts[1 : 1 + load.num_warmups], prompts[1 + load.num_warmups :]
    server = await _settle(server, probe._replace(output_len=min(PROBE_LEN, probe.output_len)))
    gate = asyncio.Semaphore(load.max_concurrency or len(prompts) + len(warmups))

    async def send(prompt: Prompt, at: float) -> Answer:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        async with gate:
            answer = await server.ask(prompt)
        return answer

    async def send_and_report(prompt: Prompt, at: float) -> Answer:
        answer = await send(prompt, at)
        report(answer)
        return answer

    await asyncio.gather(*(send(prompt, 0.0) for prompt in warmups))
    start = time.perf_counter()
    arrivals = load.arrivals(len(prompts))
    answers = await asyncio.gather(*(send_and_report(prompt, start + at) for prompt, at in zip(prompts, arrivals)))
    return server, answers, time.perf_counter() - start


async def _settle(server: Server, prompt: Prompt) -> Server:
    """The server with its model's name, and in the first form that it does not refuse."""
    from_ids = (False,) if server.is_chat else (True, False)
    forms = [(sends_ids, asks_usage) for asks_usage in (True, False) for sends_ids in from_ids]
    first = ""
    try:
        model = server.model or (await server.models())[0]
    except (EOFError, OSError, ValueError, LookupError, TypeError, asyncio.TimeoutError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{server.base_url} cannot be asked for its models: {_reason(error)}") from error
    for sends_ids, asks_usage in forms:
        tried = Server(server.base_url, server.endpoint, model, server.api_key, sends_ids, asks_usage, server.fields)
        answer = await tried.ask(prompt)
        if not answer.error or answer.error == "the answer has no token":  # it was understood
            return tried
        first = first or answer.error
        if answer.status not in (400, 415, 422, 500, 501):
            break
    raise ConfigError(f"{server.base_url}{server.endpoint} does not answer a first request: {first}")


def summarize(answers: list[Answer], duration: float, *, percentiles: tuple[float, ...] = (99.0,),
              goodput: dict[str, float] | None = None) -> Json:
    """The result in `vllm bench serve`'s names; only requests that were answered whole count."""
    done = [answer for answer in answers if not answer.error]
    duration = max(duration, 1e-9)
    num_input, num_output = sum(answer.prompt_len for answer in done), sum(answer.output_len for answer in done)
    result: Json = {
        "duration": duration, "completed": len(done), "failed": len(answers) - len(done),
        "total_input_tokens": num_input, "total_output_tokens": num_output,
        "request_throughput": len(done) / duration, "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "counted_by": "usage" if all(answer.is_counted for answer in done) else "chunks",
        "errors": dict(Counter(answer.error for answer in answers if answer.error).most_common(10))}
    if goodput:
        good = sum(all(_milliseconds(name, [one])[:1] <= [limit] for name, limit in goodput.items()) for one in done)
        result["request_goodput"] = good / duration
    for name in METRICS:
        values = np.array(_milliseconds(name, done) or [0.0])
        result |= {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(np.median(values)),
                   f"std_{name}_ms": float(values.std())}
        result |= {f"p{percent:g}_{name}_ms": float(np.percentile(values, percent)) for percent in percentiles}
    return result


def _milliseconds(name: str, answers: list[Answer]) -> list[float]:
    """All values of a metric; an answer of one token has no time per output token."""
    if name == "itl":
        return [1000 * gap for answer in answers for gap in answer.itls]
    if name == "tpot":
        return [1000 * answer.tpot for answer in answers if answer.tpot is not None]
    return [1000 * (answer.ttft if name == "ttft" else answer.latency) for answer in answers]


# ---- our engine, without HTTP ----


def bench_throughput(llm: LLM, prompts: list[Prompt], *, progress: bool = True) -> Json:
    """All prompts at once, each to its full output."""
    params = [SamplingParams(max_tokens=prompt.output_len, ignore_eos=True) for prompt in prompts]
    start = time.perf_counter()
    results = llm.generate([prompt.token_ids for prompt in prompts], params, progress=progress)
    elapsed = time.perf_counter() - start
    num_output = sum(len(result.outputs[0].token_ids) for result in results)
    total = num_output + sum(len(prompt.token_ids) for prompt in prompts)
    return {"elapsed_time": elapsed, "num_requests": len(prompts), "total_num_tokens": total,
            "requests_per_second": len(prompts) / elapsed, "tokens_per_second": total / elapsed,
            "output_tokens_per_second": num_output / elapsed}


def bench_latency(llm: LLM, prompts: list[Prompt], *, num_warmups: int, num_iters: int) -> Json:
    """Seconds from a batch to its last token, over and over."""
    params = [SamplingParams(max_tokens=prompt.output_len, ignore_eos=True) for prompt in prompts]
    latencies = []
    for _ in range(num_warmups + num_iters):
        start = time.perf_counter()
        llm.generate([prompt.token_ids for prompt in prompts], params, progress=False)
        latencies.append(time.perf_counter() - start)
    latencies = latencies[num_warmups:]
    return {"avg_latency": float(np.mean(latencies)), "latencies": latencies,
            "percentiles": {str(percent): float(np.percentile(latencies, percent)) for percent in LATENCY_PERCENTILES}}
