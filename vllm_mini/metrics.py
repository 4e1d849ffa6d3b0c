"""What /metrics shows, under vLLM's names and with its buckets, so that boards and tools made for it work unchanged.

Gauges are read from the engine when somebody asks, so they cannot be stale. Counters and histograms are fed by what an
observer of the engine's steps sees and by how requests come and go; each choice of n counts as one request. Does not
know HTTP.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from vllm_mini.engine import LLMEngine, StepSnapshot, TokenOutput

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ENGINE = "0"  # the label that tells engines of one server apart; here is one
FINISH_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
                160.0, 640.0, 2560.0)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                   960.0, 1920.0, 7680.0)
BLOCK_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
                 600.0, 1200.0, 1800.0)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class _Histogram:
    """Counts in buckets, for one set of labels; its owner sees to threads."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        total, buckets = 0, []
        for bound, count in zip((*map(float, self._bounds), float("inf")), self._counts):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


@dataclass
class _Timeline:
    """One request's times, in seconds of time.monotonic(). A choice is in `last_tokens` while it has begun but not ended."""

    arrival: float
    num_open: int
    scheduled: float = 0.0
    num_preemptions: int = 0
    first_tokens: dict[int, float] = field(default_factory=dict)
    last_tokens: dict[int, float] = field(default_factory=dict)


class Metrics(Collector):
    """The numbers of one engine: an observer of its steps, a watcher of its requests, and what Prometheus collects.

    `on_step` is called on the engine's thread, everything else on the event loop.
    """

    def __init__(self, engine: LLMEngine, *, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._lock = threading.Lock()
        self._requests: dict[str, _Timeline] = {}
        self._last_step = time.monotonic()
        self._blocks = _BlockTimes(engine.scheduler.block_manager.num_blocks)
        self._num_finished: Counter[str] = Counter()
        self._num_rejected = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        lengths = _one_two_five(engine.max_model_len)
        self._ttft = _Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS)
        self._inter_token = _Histogram("vllm:inter_token_latency_seconds", "Between two tokens", TOKEN_BUCKETS)
        self._per_token = _Histogram("vllm:request_time_per_output_token_seconds",
                                     "A choice's mean time for each token after its first", TOKEN_BUCKETS)
        self._e2e = _Histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token", REQUEST_BUCKETS)
        self._queue = _Histogram("vllm:request_queue_time_seconds", "From arrival to the first step", REQUEST_BUCKETS)
        self._prefill = _Histogram("vllm:request_prefill_time_seconds", "From the first step to the first token",
                                   REQUEST_BUCKETS)
        self._decode = _Histogram("vllm:request_decode_time_seconds", "From the first token to the last", REQUEST_BUCKETS)
        self._inference = _Histogram("vllm:request_inference_time_seconds", "From the first step to the last token",
                                     REQUEST_BUCKETS)
        self._prompt_length = _Histogram("vllm:request_prompt_tokens", "Tokens of a prompt", lengths)
        self._output_length = _Histogram("vllm:request_generation_tokens", "Tokens of a choice", lengths)
        self._params_n = _Histogram("vllm:request_params_n", "n of a request", (1, 2, 5, 10, 20))
        self._max_tokens = _Histogram("vllm:request_params_max_tokens", "max_tokens of a request, where it has one", lengths)
        self._preemptions = _Histogram("vllm:request_num_preemptions", "How often a request was preempted",
                                       (0, 1, 2, 5, 10, 20, 50))
        self._step_tokens = _Histogram("vllm:iteration_tokens_total", "Tokens that a step computed", STEP_BUCKETS)
        self._histograms = (
            self._ttft, self._inter_token, self._per_token, self._e2e, self._queue, self._prefill, self._decode,
            self._inference, self._prompt_length, self._output_length, self._params_n, self._max_tokens, self._preemptions,
            self._step_tokens, self._blocks.lifetime, self._blocks.idle, self._blocks.reuse)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """The text format that Prometheus reads."""
        return generate_latest(self.registry)

    # ---- how requests come and go ----

    def arrived(self, request_id: str, num_choices: int) -> None:
        with self._lock:
            self._requests[request_id] = _Timeline(time.monotonic(), num_choices)

    def rejected(self) -> None:
        self._num_rejected += 1

    def left(self, request_id: str, cause: str) -> None:
        with self._lock:
            timeline = self._requests.pop(request_id, None)
            if timeline is not None and cause in FINISH_REASONS:
                self._num_finished[cause] += timeline.num_open

    # ---- what a step did ----

    def on_step(self, step: StepSnapshot) -> None:
        """An observer of the engine."""
        now = time.monotonic()
        with self._lock:
            self._step_tokens.observe(step.schedule.num_batched_tokens)
            self._blocks.note(step, now)
            for seq in step.schedule.admitted:
                if (timeline := self._requests.get(seq.request_id)) is not None:
                    timeline.scheduled = max(timeline.arrival, self._last_step)  # its step began when the last one ended
            for seq in step.schedule.preempted:
                if (timeline := self._requests.get(seq.request_id)) is not None:
                    timeline.num_preemptions += 1
            gaps: Counter[float] = Counter()  # most choices got their last token at the same moment
            for output in step.outputs:
                self._note_output(output, now, gaps)
            for gap, times in gaps.items():
                self._inter_token.observe(gap, times)
            for seq in step.finished:
                if seq.index == 0:
                    self._prompt_length.observe(seq.num_prompt_tokens)
                    self._params_n.observe(seq.params.n)
                    if seq.params.max_tokens is not None:
                        self._max_tokens.observe(seq.params.max_tokens)
            self._last_step = now

    def _note_output(self, output: TokenOutput, now: float, gaps: Counter[float]) -> None:
        self._num_output_tokens += len(output.token_ids)
        timeline = self._requests.get(output.request_id)
        is_first = output.num_output_tokens == len(output.token_ids)
        if is_first and output.index == 0:
            self._num_prompt_tokens += output.num_prompt_tokens
            self._num_cached_tokens += output.num_cached_tokens
        if timeline is not None and output.token_ids:
            if is_first:
                timeline.first_tokens[output.index] = now
                self._ttft.observe(now - timeline.arrival)
            else:
                gaps[now - timeline.last_tokens[output.index]] += 1
            timeline.last_tokens[output.index] = now
        if output.finish_reason is not None:
            self._num_finished[output.finish_reason] += 1
            if timeline is not None:
                self._note_end(output, timeline, now)

    def _note_end(self, output: TokenOutput, timeline: _Timeline, now: float) -> None:
        timeline.num_open -= 1
        self._output_length.observe(output.num_output_tokens)
        self._queue.observe(timeline.scheduled - timeline.arrival)
        self._inference.observe(now - timeline.scheduled)
        self._e2e.observe(now - timeline.arrival)
        if output.index == 0:
            self._preemptions.observe(timeline.num_preemptions)
        first = timeline.first_tokens.get(output.index)
        if first is None:  # it had no token at all
            return
        self._prefill.observe(first - timeline.scheduled)
        self._decode.observe(now - first)
        if output.num_output_tokens > 1:
            self._per_token.observe((now - first) / (output.num_output_tokens - 1))

    # ---- for Prometheus ----

    def collect(self) -> Iterator[Metric]:
        """All families, those of the process apart; read without stopping the engine."""
        yield from self._gauges()
        yield from self._counters()
        with self._lock:
            families = [histogram.family(self._labels) for histogram in self._histograms]
        yield from families

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        blocks = scheduler.block_manager
        num_used = blocks.num_used_blocks
        num_cached = sum(blocks.ref_counts[block_id] == 0 for block_id in tuple(blocks.cached_blocks.values()))
        for name, text, value in (
            ("vllm:num_requests_running", "Choices that take part in steps", num_choices(scheduler.running)),
            ("vllm:num_requests_waiting", "Choices that wait for their first step", num_choices(scheduler.waiting)),
            ("vllm:num_requests_swapped", "Choices that were preempted and wait", num_choices(scheduler.swapped)),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1; cached but free ones are not in use",
             num_used / blocks.num_blocks),
            ("vllm_mini:kv_blocks_used", "KV blocks that some sequence holds", num_used),
            ("vllm_mini:kv_blocks_cached", "Free KV blocks that still hold a prefix", num_cached),
            ("vllm_mini:kv_blocks_free", "Free KV blocks that hold nothing", blocks.num_blocks - num_used - num_cached),
        ):
            yield _one(GaugeMetricFamily, name, text, value, self._labels)
        config = {"block_size": blocks.block_size, "num_gpu_blocks": blocks.num_blocks,
                  "num_cpu_blocks": blocks.num_host_blocks, "enable_prefix_caching": blocks.enable_prefix_caching}
        yield _one(GaugeMetricFamily, "vllm:cache_config_info", "How the KV cache is laid out", 1,
                   {**self._labels, **{name: str(value) for name, value in config.items()}})

    def _counters(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        blocks = scheduler.block_manager
        for name, text, value in (
            ("vllm:num_preemptions", "Sequences that had to make way", scheduler.num_preemptions),
            ("vllm:prompt_tokens", "Tokens of prompts that were answered", self._num_prompt_tokens),
            ("vllm:prompt_tokens_cached", "Of these, tokens found in the prefix cache", self._num_cached_tokens),
            ("vllm:generation_tokens", "Tokens generated", self._num_output_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up, once for each request", blocks.num_prefix_queries),
            ("vllm:prefix_cache_hits", "Of these, tokens found; what a preempted one finds again is no hit",
             blocks.num_prefix_hits),
            ("vllm:admission_rejections", "Requests answered with 429", self._num_rejected),
        ):
            yield _one(CounterMetricFamily, name, text, value, self._labels)
        family = CounterMetricFamily("vllm:request_success", "Choices that ended, by reason",
                                     labels=[*self._labels, "finished_reason"])
        for reason in FINISH_REASONS:
            family.add_metric([*self._labels.values(), reason], self._num_finished[reason])
        yield family


class _BlockTimes:
    """How long KV blocks hold a content and how long nobody needs it. Told by the events of steps, at their end."""

    def __init__(self, num_blocks: int) -> None:
        self.lifetime = _Histogram("vllm:kv_block_lifetime_seconds", "From the filling of a block to its eviction",
                                   BLOCK_BUCKETS)
        self.idle = _Histogram("vllm:kv_block_idle_before_evict_seconds", "From a block's last use to its eviction",
                               BLOCK_BUCKETS)
        self.reuse = _Histogram("vllm:kv_block_reuse_gap_seconds", "From a block's last use to the next by another sequence",
                                BLOCK_BUCKETS)
        self._born = [0.0] * num_blocks
        self._last_use = [0.0] * num_blocks

    def note(self, step: StepSnapshot, now: float) -> None:
        for kind, _, block_ids in step.events:
            for block_id in block_ids:
                if kind == "evict":
                    self.lifetime.observe(now - self._born[block_id])
                    self.idle.observe(now - self._last_use[block_id])
                elif kind == "share":
                    self.reuse.observe(now - self._last_use[block_id])
                elif kind in ("allocate", "copy"):
                    self._born[block_id] = now
                self._last_use[block_id] = now


def num_choices(queue: Sequence) -> int:
    """The choices in one of the scheduler's queues, those to be forked counted in; any thread may ask."""
    return sum(1 + seq.num_forks for seq in tuple(queue))


def _one(kind: Callable[..., Metric], name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
    family = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return family


def _one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to a limit."""
    return tuple(bound for exponent in range(len(str(limit))) for bound in (10**exponent, 2 * 10**exponent, 5 * 10**exponent)
                 if bound <= limit)
