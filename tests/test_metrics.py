"""What /metrics says: at rest, under load, after clients that left, and that it costs next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server import Server, hang_up, receive_until, serve_in_thread, wait_until
from vllm_mini.config import EngineConfig
from vllm_mini.engine import LLMEngine, StepSnapshot
from vllm_mini.metrics import Metrics
from vllm_mini.sequence import SamplingParams

NUM_BLOCKS = 512
LONG = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
              "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
              "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
              "request_generation_tokens", "request_params_n", "request_params_max_tokens", "request_num_preemptions",
              "iteration_tokens_total", "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
              "kv_block_reuse_gap_seconds")


@pytest.fixture
def server() -> Iterator[Server]:
    with serve_in_thread(num_kv_blocks=NUM_BLOCKS) as running:
        yield running


class Scrape:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    @classmethod
    def of(cls, server: Server) -> Scrape:
        response = server.client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return cls(response.text)

    def __getitem__(self, name: str) -> float:
        """The one value of this name; without a prefix it is vLLM's."""
        return self.get(name)

    def get(self, name: str, **labels: str) -> float:
        full = name if ":" in name else f"vllm:{name}"
        found = [sample for sample in self.samples if sample.name == full and labels.items() <= sample.labels.items()]
        assert len(found) == 1, f"{full} {labels}: {found}"
        assert found[0].labels["model_name"] == "dummy" and found[0].labels["engine"] == "0"
        return found[0].value

    @property
    def blocks(self) -> tuple[float, float, float]:
        return (self["vllm_mini:kv_blocks_used"], self["vllm_mini:kv_blocks_cached"], self["vllm_mini:kv_blocks_free"])


def test_several_observers_see_the_same_steps() -> None:
    first: list[StepSnapshot] = []
    second: list[StepSnapshot] = []
    engine = LLMEngine.from_config(EngineConfig(model="dummy", num_kv_blocks=64), on_step=first.append)
    engine.observers.append(second.append)
    engine.add_request("request", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    assert len(first) == 4
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_ME_01_no_gauge_stays_where_a_lost_client_left_it(server: Server) -> None:
    body = {"model": "dummy", "prompt": "Hello", **LONG}
    connections = [server.connect("/v1/completions", body) for _ in range(30)]
    for connection in connections:
        receive_until(connection, b"data: ")
    busy = Scrape.of(server)
    assert busy["num_requests_running"] == 30 and busy["kv_cache_usage_perc"] > 0
    for connection in connections:
        hang_up(connection)
    server.wait_drained(timeout=3)
    idle = Scrape.of(server)
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"):
        assert idle[name] == 0, name
    assert idle.get("request_success_total", finished_reason="abort") == 30
    assert server.client.get("/load").json() == {"server_load": 0}


def test_ME_03_prefix_hits_are_counted_in_tokens_as_in_the_usage() -> None:
    with serve_in_thread(num_kv_blocks=NUM_BLOCKS, block_size=16) as server:
        prompts = [list(range(50))] * 3 + [list(range(100, 120))]
        usages = [server.complete(prompt).json()["usage"] for prompt in prompts]
        found = Scrape.of(server)
    assert found["prefix_cache_queries_total"] == found["prompt_tokens_total"] == 170
    assert found["prefix_cache_hits_total"] == found["prompt_tokens_cached_total"] == 96
    assert sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) == 96
    assert found["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)


def test_ME_03_what_a_preempted_sequence_finds_again_is_no_hit() -> None:
    with serve_in_thread(num_kv_blocks=20, block_size=4) as server:
        prompts = [[index] * 8 for index in range(6)]
        usage = server.complete(prompts, max_tokens=40, ignore_eos=True).json()["usage"]
        found = Scrape.of(server)
    assert found["num_preemptions_total"] > 0
    assert found["request_num_preemptions_sum"] == found["num_preemptions_total"]
    assert found["prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert found["prefix_cache_queries_total"] == found["prompt_tokens_total"] == 48


def test_ME_05_usage_is_what_sequences_hold_and_cached_blocks_are_counted_apart(server: Server) -> None:
    assert Scrape.of(server).blocks == (0, 0, NUM_BLOCKS)
    scheduler = server.engine.scheduler
    block_size = scheduler.block_manager.block_size
    seen: list[tuple[float, tuple[float, float, float]]] = []
    metrics = Metrics(server.engine, model_name="dummy")

    def look(_: StepSnapshot) -> None:
        if len(scheduler.running) == 1 and len(scheduler.running[0].block_table) == 10:
            found = Scrape(metrics.render().decode())
            seen.append((found["kv_cache_usage_perc"], found.blocks))

    server.engine.observers.append(look)
    assert server.complete(list(range(10 * block_size - 4)), max_tokens=4, ignore_eos=True).status_code == 200
    server.engine.observers.remove(look)
    assert seen and {share for share, _ in seen} == {10 / NUM_BLOCKS}
    assert all(used == 10 and sum(blocks) == NUM_BLOCKS for _, blocks in seen for used in blocks[:1])
    before = Scrape.of(server)
    for _ in range(50):
        assert server.complete("x" * 5000).status_code == 400
    after = Scrape.of(server)
    assert after["kv_cache_usage_perc"] == before["kv_cache_usage_perc"] == 0
    used, cached, free = after.blocks
    assert (used, cached) == (0, 9) and free == NUM_BLOCKS - 9


def test_ME_06_the_number_of_series_never_grows(server: Server) -> None:
    def series() -> int:
        return len(Scrape.of(server).samples)

    at_start = series()
    for number in range(50):
        assert server.chat(model=f"nope{number}").status_code == 404
        headers = {"x-request-id": f"id-{number}"}
        body = {"model": "dummy", "prompt": f"{number}", "max_tokens": 1, "user": f"{number}"}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
    assert series() == at_start


def test_ME_06_metrics_answer_at_once_in_a_burst_and_without_the_key() -> None:
    with serve_in_thread(app_settings={"api_key": "key"}) as server:
        headers = {"authorization": "Bearer key"}
        body = {"model": "dummy", "prompt": ["burst"] * 64, "max_tokens": 60, "ignore_eos": True}
        server.client.headers.update(headers)
        connection = server.connect("/v1/completions", body)  # without a key: refused
        assert receive_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 401")
        connection.close()
        seconds = []
        burst = threading.Thread(target=server.post, args=("/v1/completions", body))
        burst.start()
        while burst.is_alive():
            begin = time.perf_counter()
            Scrape.of(server)
            seconds.append(time.perf_counter() - begin)
        burst.join()
        assert sorted(seconds)[len(seconds) // 2] < 0.2
        del server.client.headers["authorization"]
        assert Scrape.of(server)["generation_tokens_total"] == 64 * 60


def test_the_histograms_count_choices_tokens_and_steps(server: Server) -> None:
    for fields in ({"max_tokens": 1}, {"max_tokens": 6}, {"max_tokens": 4, "n": 3}):
        assert server.complete("Hello there", ignore_eos=True, **fields).status_code == 200
    found = Scrape.of(server)
    num_tokens = 1 + 6 + 3 * 4
    assert found["generation_tokens_total"] == num_tokens
    for name in HISTOGRAMS:
        buckets = [sample.value for sample in found.samples if sample.name == f"vllm:{name}_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"{name}_count"], name
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
                 "request_generation_tokens"):
        assert found[f"{name}_count"] == 5, name
    assert found["inter_token_latency_seconds_count"] == num_tokens - 5
    assert found["request_time_per_output_token_seconds_count"] == 4
    assert found["request_generation_tokens_sum"] == num_tokens
    assert found["request_prompt_tokens_count"] == found["request_params_n_count"] == 3
    assert found["request_params_n_sum"] == 5 and found["request_params_max_tokens_sum"] == 11
    assert found["iteration_tokens_total_sum"] == found["prompt_tokens_total"] + num_tokens - 5 - found[
        "prompt_tokens_cached_total"]
    assert found.get("request_success_total", finished_reason="length") == 5
    assert found["cache_config_info"] == 1
    longest = found["e2e_request_latency_seconds_sum"]
    parts = found["request_queue_time_seconds_sum"] + found["request_prefill_time_seconds_sum"] + found[
        "request_decode_time_seconds_sum"]
    assert parts == pytest.approx(longest)


def test_a_refused_request_is_no_abort_and_a_rejected_one_is_counted() -> None:
    with serve_in_thread(max_num_seqs=1, max_waiting=1) as server:
        assert server.complete("x", n=2).status_code == 400
        connections: list[Any] = [server.connect("/v1/completions", {"model": "dummy", "prompt": "a", **LONG})]
        receive_until(connections[0], b"data: ")
        connections.append(server.connect("/v1/completions", {"model": "dummy", "prompt": "b", **LONG}))
        wait_until(lambda: server.engine.scheduler.waiting)
        assert server.complete("c").status_code == 429
        found = Scrape.of(server)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (1, 1)
        assert found["admission_rejections_total"] == 1
        for connection in connections:
            hang_up(connection)
        server.wait_drained()
        wait_until(lambda: Scrape.of(server).get("request_success_total", finished_reason="abort") == 2)
        assert sum(Scrape.of(server).get("request_success_total", finished_reason=reason)
                   for reason in ("stop", "length", "error")) == 0


def test_a_step_of_256_choices_is_noted_in_less_than_a_hundredth_of_its_time() -> None:
    """On any machine a step of so many costs 10 ms and more; two milliseconds leave room for a busy one."""
    engine = LLMEngine.from_config(EngineConfig(model="dummy", num_kv_blocks=2048))
    metrics = Metrics(engine, model_name="dummy")
    snapshots: list[StepSnapshot] = []
    engine.observers.append(snapshots.append)
    for number in range(256):
        metrics.arrived(f"{number}", 1)
        engine.add_request(f"{number}", [number], SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    seconds = []
    for snapshot in snapshots:
        begin = time.perf_counter()
        metrics.on_step(snapshot)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds[1:-1]) < 0.002
