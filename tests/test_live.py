"""The live view: records equal the engine they were taken from, feeds and traces bring all of them, nobody else gets any."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_device import VOCAB_SIZE, FakeDevice, make_scheduler
from rich.console import Console
from server import Server, hang_up, serve_app, serve_in_thread, serve_process, wait_until

from vllm_mini import live_server
from vllm_mini.async_engine import AsyncLLMEngine
from vllm_mini.cli import main
from vllm_mini.config import ConfigError, EngineConfig
from vllm_mini.engine import LLMEngine, StepError
from vllm_mini.live import LiveRecorder
from vllm_mini.live_server import FeedResponse, LiveFeed, LiveSettings
from vllm_mini.replay import build_replay_app
from vllm_mini.scheduler import SchedulerOutput, SequenceOutput
from vllm_mini.sequence import SamplingParams
from vllm_mini.top import Screen, feed
from vllm_mini.trace import LiveState, Record, TraceWriter, read_trace, to_perfetto


class Watched:
    """An engine on a fake device, all records of it, and what they come to."""

    def __init__(self, num_blocks: int = 24, *, errors: dict[tuple[int, int], int] | None = None, hide_text: bool = False,
                 **config: Any) -> None:
        scheduler = make_scheduler(num_blocks, **config)
        self.engine = LLMEngine(scheduler, FakeDevice(scheduler.block_manager, errors=errors), None, vocab_size=VOCAB_SIZE)
        self.recorder = LiveRecorder(self.engine, hide_text=hide_text)
        self.records: list[Record] = []
        self.records.append(through_json(self.recorder.open(self._take)))
        self.state = LiveState(self.records[0])

    def _take(self, record: Record) -> None:
        record = through_json(record)
        self.records.append(record)
        self.state.apply(record)

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        self.engine.add_request(name, prompt, SamplingParams(**{"max_tokens": 8, "seed": 1, **params}))

    def step(self) -> None:
        """What the engine's thread does, and a comparison after each half of it."""
        self.recorder.between_steps()
        assert_same(self.state, self.engine)
        if self.engine.has_unfinished():
            self.engine.step()
            assert_same(self.state, self.engine)

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.step()
        self.step()

    @property
    def steps(self) -> list[Record]:
        return [record for record in self.records if record["type"] == "step"]


def through_json(record: Record) -> Record:
    return json.loads(json.dumps(record, allow_nan=False))


def assert_same(state: LiveState, engine: LLMEngine) -> None:
    """The state that records tell of is the engine's own."""
    scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
    assert state.ref_counts == blocks.ref_counts
    assert state.free == list(blocks.free_blocks), "the free list, in its order"
    assert state.cached == set(blocks.cached_blocks.values())
    assert state.tables == blocks.block_tables
    assert state.step == scheduler.num_steps
    for queue in ("running", "swapped", "waiting"):
        assert state.totals[queue] == [seq.seq_id for seq in getattr(scheduler, queue)]
    assert state.totals["num_preemptions"] == scheduler.num_preemptions
    assert state.totals["num_prefix_hits"] == blocks.num_prefix_hits
    for seq in scheduler.unfinished():
        told = state.seqs[seq.seq_id]
        assert (told["status"], told["num_tokens"], told["num_computed_tokens"], told["num_cached_tokens"]) == (
            seq.status.value, seq.num_tokens, seq.num_computed_tokens, seq.num_cached_tokens)
        assert told["num_host_blocks"] == len(seq.host_blocks)


def prompt(*lengths: int, seed: int = 0) -> list[int]:
    """Tokens drawn from the seed, so that prompts of one seed begin alike."""
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(sum(lengths))]


@pytest.mark.parametrize("seed", range(24))
def test_records_equal_the_engine_after_every_step_of_a_random_load(seed: int) -> None:
    draw = random.Random(seed)
    config: dict[str, Any] = {"enable_prefix_caching": draw.random() < 0.8, "max_num_seqs": draw.choice([4, 8]),
                              "max_num_batched_tokens": draw.choice([8, 16, 64])}
    if draw.random() < 0.5:
        config |= {"preemption_mode": "swap", "num_host_blocks": draw.choice([2, 8])}
    errors = {(seed, 0): 14} if draw.random() < 0.3 else None
    watched = Watched(16, errors=errors, **config)
    names = itertools.count()
    open_names: list[str] = []
    for _ in range(60):
        if draw.random() < 0.4:
            name = str(next(names))
            n = draw.choice([1, 1, 1, 3])
            watched.add(name, prompt(draw.randint(1, 20), seed=draw.randrange(3)), n=n, max_tokens=draw.randint(1, 24),
                        seed=draw.choice([seed, 99]))
            open_names.append(name)
        if open_names and draw.random() < 0.1:
            watched.engine.abort_request(open_names.pop(draw.randrange(len(open_names))))
        watched.step()
    watched.run()
    assert_trace_holds(watched.records, watched.engine.scheduler.block_manager.num_blocks)


def assert_trace_holds(records: list[Record], num_blocks: int) -> None:
    """Every block that was taken is freed once; reference counts are the tables that name a block; tokens add up."""
    state = LiveState(records[0])
    held: dict[int, list[int]] = {}
    num_taken = num_freed = 0
    for record in records[1:]:
        count = Counter(block_id for table in held.values() for block_id in table)
        for kind, seq_id, *block_ids in record.get("events", ()):
            table = held.setdefault(seq_id, [])
            before = list(table)
            if kind in ("allocate", "share", "fork", "swap_in"):
                table += block_ids
            elif kind == "copy":
                table[table.index(block_ids[0])] = block_ids[1]
            elif kind in ("release", "swap_out"):
                assert block_ids == table[: len(block_ids)]
                table.clear()
            taken, dropped = Counter(table) - Counter(before), Counter(before) - Counter(table)
            if kind in ("allocate", "swap_in", "copy"):
                assert all(count[block_id] == 0 for block_id in taken), f"{kind} of a block that somebody holds"
            for block_id in taken:
                num_taken += count[block_id] == 0
                count[block_id] += 1
            for block_id in dropped:
                count[block_id] -= 1
                num_freed += count[block_id] == 0
        state.apply(record)
        assert state.ref_counts == [count[block_id] for block_id in range(num_blocks)]
        assert {seq_id: table for seq_id, table in held.items() if table} == state.tables
    assert num_taken == num_freed > 0
    assert_tokens_add_up(records, state)


def assert_tokens_add_up(records: list[Record], state: LiveState) -> None:
    """What was computed of a sequence that never had to make way, with what was cached, is all but its last token."""
    computed: Counter[int] = Counter()
    preempted = {seq_id for record in records for seq_id in record.get("preempted", ())}
    for record in records:
        for seq_id, _, start, num_tokens, num_known_tokens in record.get("scheduled", ()):
            assert 0 < num_tokens <= num_known_tokens - start
            computed[seq_id] += num_tokens
    for seq in state.seqs.values():
        if seq["finish_reason"] in ("length", "stop"):
            assert seq["num_tokens"] <= seq["max_num_tokens"]
            if seq["index"] == 0 and seq["id"] not in preempted:
                assert seq["num_cached_tokens"] + computed[seq["id"]] == seq["num_tokens"] - 1


def test_two_requests_with_one_prompt_share_blocks_counted_twice() -> None:
    watched = Watched()
    watched.add("a", prompt(9))
    watched.add("b", prompt(10))
    watched.step()
    shared = [block_id for block_id, count in enumerate(watched.state.ref_counts) if count == 2]
    assert len(shared) == 2  # blocks of 4 tokens
    assert all(shared == watched.state.tables[seq_id][:2] for seq_id in (0, 1))
    assert watched.state.seqs[1]["num_cached_tokens"] == 8


def test_forked_answers_copy_the_block_they_write_to() -> None:
    watched = Watched()
    watched.add("a", prompt(6), n=4)
    watched.step()
    assert sorted(watched.state.ref_counts)[-2:] == [4, 4]
    watched.step()
    copies = [event for event in watched.steps[1]["events"] if event[0] == "copy"]
    assert len(copies) == 3
    assert {event[2] for event in copies} == {watched.state.tables[3][1]}, "the last one keeps the block"
    watched.run()


@pytest.mark.parametrize(("config", "cause", "numbers"), [
    ({"max_num_seqs": 1}, "max_num_seqs", [1, 0]),
    ({"max_num_batched_tokens": 8}, "budget", [9, 0]),
    ({"num_blocks": 4}, "blocks", [4, 1]),  # 3 for its tokens and 1 that the runner may need
    ({"enable_continuous_batching": False}, "batch", [0, 0]),
])
def test_a_record_says_why_the_first_in_line_waits(config: dict[str, Any], cause: str, numbers: list[int]) -> None:
    watched = Watched(config.pop("num_blocks", 24), **config)
    watched.add("a", prompt(8, seed=1), max_tokens=2)
    if cause == "batch":
        watched.step()
    watched.add("b", prompt(9, seed=2), max_tokens=2)
    watched.add("c", prompt(2), max_tokens=2)
    watched.step()
    if cause == "blocks":  # the third block of a is taken for its second token
        assert watched.steps[-1]["refusal"] == [1, "blocks", 4, 2]
    else:
        assert watched.steps[-1]["refusal"] == [1, cause, *numbers]
    assert watched.state.totals["waiting"] == [1, 2]
    watched.run()
    assert watched.steps[-1]["refusal"] is None


def test_a_step_that_preempted_says_so_and_the_victim_comes_back() -> None:
    watched = Watched(6, enable_prefix_caching=False)
    for name in ("a", "b"):
        watched.add(name, prompt(8, seed=ord(name)), max_tokens=12)
    watched.run()
    at = next(index for index, step in enumerate(watched.steps) if step["preempted"])
    assert watched.steps[at]["refusal"] == [1, "preemption", 0, 0]
    assert watched.steps[at]["swapped"] == [1]
    assert any(step["resumed"] == [1] for step in watched.steps[at:])


def test_a_half_computed_prompt_that_is_swapped_out_gives_all_its_blocks_back() -> None:
    watched = Watched(9, preemption_mode="swap", num_host_blocks=8, max_num_batched_tokens=2)
    watched.add("a", prompt(8), max_tokens=12)
    watched.add("b", prompt(20, seed=1), max_tokens=2)
    watched.run()
    swapped_out = next(event for step in watched.steps for event in step["events"] if event[0] == "swap_out")
    assert 0 < len(swapped_out[2:]) < 5, "only what was computed is copied"
    assert_trace_holds(watched.records, 9)


def test_static_batching_lets_nobody_join() -> None:
    watched = Watched(enable_continuous_batching=False)
    for name, max_tokens in (("a", 3), ("b", 6)):
        watched.add(name, prompt(4, seed=ord(name)), max_tokens=max_tokens)
    watched.step()
    watched.add("c", prompt(4), max_tokens=3)
    watched.run()
    runners = [[item[0] for item in step["scheduled"]] for step in watched.steps]
    assert runners == [[0, 1]] * 3 + [[1]] * 3 + [[2]] * 3


def test_nothing_is_read_while_nobody_looks() -> None:
    scheduler = make_scheduler()
    engine = LLMEngine(scheduler, FakeDevice(scheduler.block_manager), None, vocab_size=VOCAB_SIZE)
    looks = itertools.count()
    recorder = LiveRecorder(engine, clock=lambda: float(next(looks)))
    num_looks = next(looks)

    def run(name: str) -> None:
        engine.add_request(name, prompt(5), SamplingParams(max_tokens=4))
        while engine.has_unfinished():
            recorder.between_steps()
            engine.step()

    run("unseen")
    assert next(looks) == num_looks + 1
    records: list[Record] = []
    state = LiveState(recorder.open(records.append))
    run("seen")
    recorder.close(records.append)
    for record in records:
        state.apply(record)
    assert_same(state, engine)
    num_records = len(records)
    run("unseen again")
    assert len(records) == num_records > 4


def test_a_sink_that_fails_takes_no_step_down(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()

    def fail(record: Record) -> None:
        raise OSError("no room")

    watched.recorder.open(fail)
    watched.add("a", prompt(5), max_tokens=3)
    watched.recorder.between_steps()
    while watched.engine.has_unfinished():
        watched.engine.step()
    assert "nothing is recorded from here on" in caplog.text


def test_a_failed_step_is_told_with_all_that_it_took_down(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.add("a", prompt(9), max_tokens=4)
    watched.run()
    watched.add("b", prompt(9, seed=1))
    watched.step()

    def fail(output: SchedulerOutput) -> list[SequenceOutput]:
        raise OSError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(watched.engine.worker, "execute", fail)
        with pytest.raises(StepError):
            watched.engine.step()
    watched.add("c", prompt(9), max_tokens=2)
    watched.step()
    assert not watched.engine.scheduler.block_manager.num_prefix_hits, "the index was cleared"
    watched.run()


def test_hidden_texts_are_in_no_record() -> None:
    engine = LLMEngine.from_config(EngineConfig(model="dummy", num_kv_blocks=16, block_size=4, max_model_len=64))
    records: list[Record] = []
    recorder = LiveRecorder(engine, hide_text=True)
    records.append(recorder.open(records.append))
    engine.add_request("r", "xylophone", SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={ord("q"): 100.0}))
    while engine.has_unfinished():
        recorder.between_steps()
        engine.step()
    told = json.dumps(records)
    assert records[0]["shows_text"] is False
    assert records[1]["tokens"] == {0: 9}
    assert '"x"' not in told and '"q"' not in told
    hashes = [block_hash.hex()[:8] for block_hash in engine.scheduler.block_manager.cached_blocks]
    assert hashes and not any(block_hash in told for block_hash in hashes)


# ---- the feed ----


class Feed:
    """A page's side of the feed, read by a thread of its own."""

    def __init__(self, url: str, base: str = "", **headers: str) -> None:
        self.records: list[Record] = []
        self.state: LiveState | None = None
        host, port = url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=30)
        self._connection.request("GET", f"{base}/live/feed", headers=headers)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException), self._connection.getresponse() as response:
            for line in response:
                if line.startswith(b"data: "):
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, record: Record) -> None:
        if record["type"] == "snapshot" and self.state is None:
            self.state = LiveState(record)
        elif self.state is not None:
            self.state.apply(record)
        self.records.append(record)

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["type"] == kind]

    def wait(self, kind: str, count: int = 1) -> list[Record]:
        wait_until(lambda: len(self.of(kind)) >= count, what=f"{count} records {kind}")
        return self.of(kind)

    @property
    def watcher(self) -> str:
        return self.wait("hello")[0]["watcher"]

    def close(self) -> None:
        """Hang up, at once."""
        with contextlib.suppress(OSError, AttributeError):  # the server may have been first
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()


@contextlib.contextmanager
def watching(server: Server, base: str = "", **headers: str) -> Iterator[Feed]:
    watcher = Feed(server.url, base, **headers)
    try:
        yield watcher
    finally:
        watcher.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_in_thread(num_kv_blocks=64, app_settings={"live": LiveSettings()}) as running:
        yield running


def test_the_feed_begins_with_a_snapshot_and_goes_on_without_a_gap(server: Server) -> None:
    server.complete("before anybody looked")
    with watching(server) as watcher:
        watcher.wait("snapshot")
        for text in ("one", "two"):
            assert server.complete(text, max_tokens=6, ignore_eos=True).status_code == 200
        server.wait_drained()
        wait_until(lambda: watcher.state and watcher.state.step == server.engine.scheduler.num_steps)
        assert_same(watcher.state, server.engine)
        assert len(watcher.of("snapshot")) == 1
        ids = [record["id"] for record in watcher.records if "id" in record]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert len(watcher.of("step")) == 12
        assert {seq["finish_reason"] for seq in watcher.state.seqs.values()} == {"length"}


def test_ME_01_clients_that_left_are_gone_from_the_feed_though_no_step_follows(server: Server) -> None:
    with watching(server) as watcher:
        watcher.wait("snapshot")
        connection = server.connect("/v1/completions", {"model": "dummy", "prompt": "x", "max_tokens": 500, "stream": True,
                                                        "ignore_eos": True})
        watcher.wait("step", 3)
        hang_up(connection, reset=True)
        server.wait_drained()
        wait_until(lambda: watcher.state.totals["running"] == [], what="an empty queue on the feed")
        assert watcher.records[-1]["type"] == "change"
        assert_same(watcher.state, server.engine)
        assert [seq["finish_reason"] for seq in watcher.state.seqs.values()] == ["abort"]


def test_a_watcher_that_comes_back_gets_what_it_missed_or_a_new_snapshot(server: Server) -> None:
    with watching(server) as first:
        first.wait("snapshot")
        server.complete("one", max_tokens=4, ignore_eos=True)
        missed = first.wait("step", 4)[1]["id"]
        with watching(server, **{"last-event-id": str(missed)}) as again:
            wait_until(lambda: [record["id"] for record in again.of("step")] == [missed + 1, missed + 2])
            assert not again.of("snapshot")
        for unknown in ("999999", "-1", "x"):
            with watching(server, **{"last-event-id": unknown}) as lost:
                lost.wait("snapshot")


def test_a_watcher_that_fell_too_far_behind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "MAX_RECORDS", 8)
    with serve_in_thread(num_kv_blocks=64, app_settings={"live": LiveSettings()}) as small, watching(small) as watcher:
        first = watcher.wait("snapshot")[0]["id"]
        small.complete("one", max_tokens=40, ignore_eos=True)
        watcher.wait("step", 40)
        with watching(small, **{"last-event-id": str(first)}) as late:
            late.wait("snapshot")
            assert not late.of("step")


def test_a_watcher_that_does_not_read_is_given_a_snapshot_when_it_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "MAX_RECORDS", 8)

    async def watch() -> list[str]:
        scheduler = make_scheduler()
        engine = AsyncLLMEngine(LLMEngine(scheduler, FakeDevice(scheduler.block_manager), None, vocab_size=VOCAB_SIZE))
        recorder = LiveRecorder(engine.engine)
        engine.between_steps.append(recorder.between_steps)
        engine.start()
        events = LiveFeed(engine, recorder, {}).open_stream()
        kinds = [kind_of(await anext(events)) for _ in range(3)]
        async for _ in await engine.add("r", prompt(5), SamplingParams(max_tokens=30)):
            pass
        kinds.append(kind_of(await anext(events)))
        await engine.shutdown()
        kinds += [kind_of(content) async for content in events]
        return kinds

    def kind_of(content: bytes) -> str:
        return json.loads(content.split(b"data: ")[1])["type"]

    assert asyncio.run(watch()) == ["hello", "pace", "snapshot", "snapshot", "end"]


def test_only_so_many_may_watch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "MAX_WATCHERS", 1)
    with watching(server) as watcher:
        watcher.wait("snapshot")
        refused = server.client.get("/live/feed")
        assert refused.status_code == 503
        assert "1 pages watch already" in refused.json()["error"]["message"]


def test_a_pause_holds_the_tokens_a_step_lets_one_through_and_leaving_ends_it(server: Server) -> None:
    with watching(server) as watcher:
        watcher.wait("snapshot")
        pace = {"watcher": watcher.watcher}
        assert server.post("/live/pace", {**pace, "num_steps": 0}).status_code == 204
        answer: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answer.append(server.complete("x", max_tokens=5, ignore_eos=True)))
        asking.start()
        watcher.wait("change")  # it has arrived
        num_steps = server.engine.scheduler.num_steps
        for count in (1, 2):
            server.post("/live/pace", {**pace, "num_steps": 1})
            watcher.wait("step", count)
            assert server.engine.scheduler.num_steps == num_steps + count
        assert watcher.state.seqs[watcher.state.totals["running"][0]]["num_tokens"] == 3
        assert not answer
    asking.join(30)  # nobody holds it any more
    assert answer[0].json()["usage"]["completion_tokens"] == 5


def test_a_slow_pace_is_kept(server: Server) -> None:
    with watching(server) as watcher:
        watcher.wait("snapshot")
        server.post("/live/pace", {"watcher": watcher.watcher, "steps_per_second": 4})
        assert watcher.wait("pace", 2)[1]["steps_per_second"] == 4
        server.complete("x", max_tokens=6, ignore_eos=True)
        times = [record["time"] for record in watcher.wait("step", 6)]
        assert times[-1] - times[0] > 1.0
        assert min(record["seconds"] for record in watcher.of("step")) < 0.2, "waiting is no part of a step"


@pytest.mark.parametrize("body", [{"watcher": "nobody"}, {"watcher": "nobody", "num_steps": 0}])
def test_only_a_watcher_may_set_the_pace(server: Server, body: Record) -> None:
    refused = server.post("/live/pace", body)
    assert refused.status_code == 409
    assert refused.json()["error"]["param"] == "watcher"


@pytest.mark.parametrize("fields", [
    {"num_steps": -1}, {"num_steps": 1.5}, {"steps_per_second": 0}, {"steps_per_second": "fast"}])
def test_a_pace_that_is_none_is_refused_by_name(server: Server, fields: Record) -> None:
    refused = server.post("/live/pace", {"watcher": "x", **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(fields))


def test_a_feed_ends_with_its_engine() -> None:
    with serve_process("--model", "dummy", "--num-kv-blocks", "64") as process:
        watcher = Feed(process.wait_for_url())
        watcher.wait("snapshot")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        wait_until(lambda: watcher.has_ended)
        assert watcher.records[-1]["type"] == "end"
        assert "Traceback" not in process.log
        watcher.close()


# ---- who gets it ----


def test_with_a_key_the_page_is_open_and_the_feed_is_not() -> None:
    with serve_in_thread(app_settings={"live": LiveSettings(), "api_key": "secret"}) as locked:
        assert "<canvas" in locked.client.get("/").text
        assert locked.client.get("/web/app.js").headers["content-type"].startswith("text/javascript")
        for method, path in (("GET", "/live/feed"), ("POST", "/live/pace"), ("POST", "/live/sandbox"),
                             ("GET", "/sandbox/live/feed"), ("GET", "/web/../live/feed"), ("GET", "/web/%2e%2e/live/feed")):
            assert locked.client.request(method, path, content="{}").status_code == 401, path
        with watching(locked, authorization="Bearer secret") as watcher:
            watcher.wait("snapshot")


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
                                     {"host": "evil.example"}, {"origin": "http://localhost:1"}])
@pytest.mark.parametrize(("method", "path"), [("GET", "/live/feed"), ("POST", "/live/pace"), ("POST", "/live/sandbox")])
def test_other_sites_get_nothing(server: Server, headers: dict[str, str], method: str, path: str) -> None:
    refused = server.client.request(method, path, content='{"watcher": "x"}', headers=headers)
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"


def test_the_page_brings_all_it_needs_and_lets_nobody_frame_it(server: Server) -> None:
    page = server.client.get("/")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for name in live_server.WEB.iterdir():
        content = server.client.get(f"/web/{name.name}")
        assert content.status_code == 200
        assert content.content == name.read_bytes()
        addresses = content.text.replace("http://www.w3.org/", "")
        assert "http://" not in addresses and "https://" not in addresses, f"{name.name} needs something from elsewhere"
    assert server.client.get("/web/nothing.js").status_code == 404


@pytest.mark.parametrize(("options", "status"), [
    ([], 200), (["--no-live"], 404), (["--host", "0.0.0.0"], 404), (["--host", "0.0.0.0", "--live"], 200)])
def test_the_page_is_on_where_only_this_machine_can_connect(options: list[str], status: int) -> None:
    with serve_process("--model", "dummy", "--num-kv-blocks", "64", *options) as process:
        assert httpx.get(process.wait_for_url().replace("0.0.0.0", "127.0.0.1")).status_code == status
        assert ("watch it at" in process.log) == (status == 200)
        assert ("shows all prompts" in process.log) == ("--live" in options)


# ---- the sandbox ----


def test_a_sandbox_is_another_engine(server: Server) -> None:
    num_steps = server.engine.scheduler.num_steps
    assert server.client.get("/sandbox/v1/models").status_code == 409
    started = server.post("/live/sandbox", {"num_kv_blocks": 12, "enable_prefix_caching": False})
    assert started.json()["num_kv_blocks"] == 12
    with watching(server, "/sandbox") as watcher:
        snapshot = watcher.wait("snapshot")[0]
        assert (snapshot["num_blocks"], snapshot["prefix_caching"]) == (12, False)
        body = {"model": "sandbox", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
        answer = server.post("/sandbox/v1/completions", body)
        assert answer.json()["usage"]["completion_tokens"] == 3
        watcher.wait("step", 3)
        server.post("/live/sandbox", {"num_kv_blocks": 14})
        wait_until(lambda: watcher.of("end"), what="the end of the old sandbox's feed")
    assert server.engine.scheduler.num_steps == num_steps
    assert server.complete().status_code == 200


@pytest.mark.parametrize(("fields", "named"), [
    ({"num_kv_blocks": 0}, "num_kv_blocks"), ({"num_kv_blocks": 10**9}, "num_kv_blocks"),
    ({"block_size": "x"}, "block_size"), ({"preemption_mode": "x"}, "preemption_mode")])
def test_a_sandbox_that_cannot_be_is_refused_by_name(server: Server, fields: Record, named: str) -> None:
    refused = server.post("/live/sandbox", fields)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]


def test_a_sandbox_without_chunks_takes_whole_prompts(server: Server) -> None:
    server.post("/live/sandbox", {"enable_chunked_prefill": False, "max_num_batched_tokens": 16, "max_model_len": 128})
    with watching(server, "/sandbox") as watcher:
        watcher.wait("snapshot")
        server.post("/sandbox/v1/completions", {"model": "sandbox", "prompt": "x" * 60, "max_tokens": 1})
        assert watcher.wait("step")[0]["scheduled"][0][1:] == ["prefill", 0, 60, 60]


# ---- traces ----


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a server that served four requests on a pool that is too small for them."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    options = ("--model", "dummy", "--num-kv-blocks", "12", "--block-size", "4", "--no-live", "--trace", str(path))
    with serve_process(*options) as process:
        asked = process.connect()
        threads = [threading.Thread(target=asked.complete, args=(text,), kwargs={"max_tokens": 20, "ignore_eos": True})
                   for text in ("first one", "second one", "third one")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asked.complete("the last", max_tokens=4, n=2, temperature=1, ignore_eos=True)
        asked.client.close()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    return path


def test_a_trace_is_whole_and_holds(trace: Path) -> None:
    records = list(read_trace(trace))
    assert_trace_holds(records, 12)
    state = LiveState(records[0])
    for record in records[1:]:
        state.apply(record)
    assert sorted(seq["num_tokens"] - seq["num_prompt_tokens"] for seq in state.seqs.values()) == [4, 4, 20, 20, 20]
    assert state.totals["num_preemptions"] > 0
    assert len(state.free) == 12


def test_a_trace_becomes_a_timeline_for_perfetto(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["replay", str(trace), "--perfetto", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert out.read_text() == json.dumps(to_perfetto(read_trace(trace)))
    num_steps = sum(record["type"] == "step" for record in read_trace(trace))
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["tid"] == 0 for event in spans) == num_steps
    assert {event["name"] for event in spans if event["tid"] > 0} == {"prefill", "decode"}
    assert sum(event["args"]["tokens"] for event in spans if event["tid"] == 0) == sum(
        event["args"]["tokens"] for event in spans if event["tid"] > 0)
    assert any(event["name"] == "preempted" for event in events)
    assert all(event["ts"] >= 0 and event.get("dur", 1) > 0 for event in events if event["ph"] in "XiC")
    counters = [event["args"] for event in events if event["name"] == "blocks"]
    assert {sum(counter.values()) for counter in counters} == {12}


def test_a_replay_serves_the_trace_and_nothing_else(trace: Path) -> None:
    with serve_app(build_replay_app(trace)) as url, httpx.Client(base_url=url) as client:
        assert "<canvas" in client.get("/").text
        lines = client.get("/live/feed").text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert events[0]["type"] == "hello" and events[0]["mode"] == "replay"
        assert events[1:-1] == list(read_trace(trace))
        assert events[-1] == {"type": "end", "complete": True}
        assert client.get("/live/feed", headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post("/live/pace", json={}).status_code == 404


@pytest.mark.parametrize(("content", "complaint"), [
    ("", "no trace"), ("nonsense\n", "line 1"), ('{"type":"step"}\n', "does not begin with a snapshot"),
    ('{"type":"snapshot","version":99}\n', "version 99"), ("[1]\n", "does not begin with a snapshot")])
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: str, complaint: str,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    assert main(["replay", str(path), "--perfetto", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert complaint in message and message.count("\n") == 1


def test_a_trace_that_was_cut_off_is_read_up_to_there(trace: Path, tmp_path: Path) -> None:
    whole = trace.read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(whole[:-20])
    assert list(read_trace(cut)) == list(read_trace(trace))[:-1]
    cut.write_text(whole[:-20] + "\n")
    with pytest.raises(ConfigError, match="not a record of a trace"):
        list(read_trace(cut))


def test_a_full_disk_ends_the_trace_and_not_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = TraceWriter(Path("/dev/full"))
    for number in range(3):
        writer.write({"id": number})
    writer.close()
    assert caplog.text.count("the trace ends here") == 1
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceWriter(tmp_path / "no" / "folder")


# ---- in the terminal ----


def test_top_draws_pool_queues_and_numbers_from_the_feed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(server) as watcher:
        watcher.wait("snapshot")
        server.post("/live/pace", {"watcher": watcher.watcher, "num_steps": 1})
        asking = threading.Thread(target=server.complete, args=("something new that is long enough",))
        asking.start()
        watcher.wait("step")
        assert main(["top", server.url, "--once"]) == 0
        drawn = capsys.readouterr().out
        num_used = server.engine.scheduler.block_manager.num_used_blocks
        assert f"{num_used} used" in drawn and num_used == 3
        assert "█" * 3 in drawn
        assert "running" in drawn
    asking.join()


def test_a_screen_follows_the_records() -> None:
    watched = Watched()
    screen = Screen()
    screen.take(watched.records[0])
    watched.add("a", prompt(9), n=2)
    watched.run()
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for record in watched.records[1:]:
        screen.take(record)
    console.print(screen.draw(100))
    console.file.close()
    text = console.export_text()
    assert "0 used" in text and "of 24" in text
    assert "░" in text and "█" not in text


@pytest.mark.parametrize(("url", "complaint"), [
    ("http://127.0.0.1:9", "no server"), ("ftp://x", "not the address"), ("http://", "no server")])
def test_top_says_what_is_wrong_with_an_address(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        next(feed(url))


def test_top_asks_for_the_key() -> None:
    with serve_in_thread(app_settings={"live": LiveSettings(), "api_key": "secret"}) as locked:
        with pytest.raises(ConfigError, match="--api-key"):
            next(feed(locked.url))
        assert next(feed(locked.url + "/v1", "secret"))["type"] == "hello"


def test_a_watcher_that_leaves_while_something_is_written_for_it_is_gone_at_once() -> None:
    """Not only when Python gets round to collecting what it left: its pause would last until then."""
    left = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            left.append("the watcher")

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # its socket takes no more

    async def watch() -> None:
        stream = events()
        await FeedResponse(stream)({"type": "http"}, receive, send)
        assert left == ["the watcher"]

    asyncio.run(watch())
