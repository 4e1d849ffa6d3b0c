"""The load generator: what it counts, against a server that says exactly what a test scripts, and against our own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from server import serve_app, serve_in_thread

from vllm_mini import LLM, cli
from vllm_mini.bench import Answer, Load, PromptMaker, Server, bench_latency, bench_serve, bench_throughput, summarize
from vllm_mini.config import ConfigError
from vllm_mini.tokenizer import Tokenizer

PAUSE = 0.05  # seconds that a scripted server takes before each of its pauses
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}


def text(content, finish_reason=None):
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]}


def delta(finish_reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


class FakeServer:
    """`script` is what each answer is made of: events, PAUSEs, raw bytes, or a status that refuses the request."""

    def __init__(self, *script, takes_ids=True, takes_usage=True):
        self.script, self.takes_ids, self.takes_usage = script, takes_ids, takes_usage
        self.bodies, self.keys = [], []
        self.num_open = self.most_open = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.answer)
        self.app.post("/v1/chat/completions")(self.answer)

    async def models(self):
        return {"data": [{"id": "fake"}]}

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        is_refused = (not self.takes_ids and isinstance(body.get("prompt"), list)) or (
            not self.takes_usage and "stream_options" in body)
        status = 400 if is_refused else next((part for part in self.script if isinstance(part, int)), 200)
        if status != 200:
            return JSONResponse({"error": {"message": "not like this"}}, status)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self):
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        for part in self.script:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                yield part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n"
        self.num_open -= 1


def prompts(num_prompts, input_len=8, output_len=4, **options):
    return PromptMaker(Tokenizer.from_model("dummy"), 0).prompts(num_prompts, input_len, output_len, **options)


def ask(*script, endpoint="/v1/completions"):
    """The answer of a server with this script."""
    with serve_app(FakeServer(*script).app) as url:
        return asyncio.run(Server(url, endpoint, "fake").ask(prompts(1)[0]))


def load(fake, num_prompts=4, settings=None, **server):
    """All answers of a fake under load, and the server as it turned out."""
    settings = settings or Load()
    with serve_app(fake.app) as url:
        settled, answers, seconds = asyncio.run(bench_serve(
            Server(url, **server), prompts(1 + settings.num_warmups + num_prompts), settings))
    return settled, answers, seconds


# ---- what is timed and counted ----


def test_the_chunk_with_only_a_role_is_not_the_first_token():
    answer = ask(delta(role="assistant", content=""), PAUSE, delta(content="a"), PAUSE, delta(content="b"),
                 delta("stop"), USAGE, b"data: [DONE]\n\n", endpoint="/v1/chat/completions")
    assert not answer.error and PAUSE <= answer.ttft < 2 * PAUSE
    assert len(answer.itls) == 1 and PAUSE * 0.8 <= answer.itls[0] < 2 * PAUSE


def test_reasoning_and_tool_calls_are_output_too():
    for fields in ({"reasoning_content": "hm"}, {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}):
        answer = ask(delta(**fields), PAUSE, delta(content="a"), delta("stop"), USAGE, b"data: [DONE]\n\n",
                     endpoint="/v1/chat/completions")
        assert answer.ttft < PAUSE and len(answer.itls) == 1


def test_tokens_are_what_the_usage_says_not_chunks():
    answer = ask(text("two words"), text(" more"), text("", "length"), USAGE, b"data: [DONE]\n\n")
    assert (answer.prompt_len, answer.output_len, answer.is_counted) == (7, 9, True)


def test_without_usage_chunks_are_counted_and_it_is_said():
    answer = ask(text("a"), text("b"), text("", "length"), b"data: [DONE]\n\n")
    assert (answer.output_len, answer.is_counted, answer.error) == (2, False, "")
    assert summarize([answer], 1.0)["counted_by"] == "chunks"


def test_the_usage_that_comes_late_is_no_part_of_the_latency():
    answer = ask(text("a", "length"), PAUSE, USAGE, b"data: [DONE]\n\n")
    assert answer.latency < PAUSE and answer.output_len == 9


def test_one_output_token_has_no_time_per_output_token():
    one = Answer(5, output_len=1, ttft=0.5, latency=0.5, is_counted=True)
    two = Answer(5, output_len=3, ttft=0.5, latency=0.9, is_counted=True)
    assert one.tpot is None
    assert summarize([one], 1.0)["mean_tpot_ms"] == 0
    assert summarize([one, two], 1.0)["mean_tpot_ms"] == pytest.approx(200)


def test_tokens_without_a_text_come_with_the_end():
    answer = ask(PAUSE, text("", "length"), USAGE, b"data: [DONE]\n\n")
    assert not answer.error and answer.ttft == answer.latency >= PAUSE


# ---- what has failed ----


@pytest.mark.parametrize(("script", "complaint"), [
    ((503,), "HTTP status 503: not like this"),
    ((text("a"), {"error": {"message": "out of luck"}}), "out of luck"),
    ((text("a"), text("b")), "broke off"),
    ((text("a"), text("", "error"), b"data: [DONE]\n\n"), "finish_reason 'error'"),
    ((text("", "stop"), b"data: [DONE]\n\n"), "no token"),
    ((text("", "stop"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}, b"data: [DONE]\n\n"),
     "no token"),
    ((b"data: {nonsense\n\n",), "cannot be read"), ((b"data: 5\n\n",), "cannot be read"),
    ((b'{"choices": [{"text": "not a stream"}]}',), "broke off"),
])
def test_a_request_that_was_not_answered_whole_has_failed(script, complaint):
    answer = ask(*script)
    assert complaint in answer.error
    result = summarize([answer], 1.0)
    assert (result["completed"], result["failed"], result["total_output_tokens"], result["mean_ttft_ms"]) == (0, 1, 0, 0)


def test_a_stream_cut_in_the_middle_has_failed():
    async def run():
        async def cut(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\ndata: {")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await Server(f"http://127.0.0.1:{port}", model="m").ask(prompts(1)[0])

    assert "cannot be read" in asyncio.run(run()).error


def test_an_event_cut_into_pieces_is_put_together():
    raw = b"data: " + json.dumps(text("a", "stop")).encode() + b"\r\n\r\n"
    answer = ask(*(piece for byte in range(0, len(raw), 9) for piece in (raw[byte : byte + 9], 0.001)), USAGE,
                 b"data: [DONE]\n\n")
    assert not answer.error and answer.output_len == 9


# ---- sums ----


def test_the_sums_are_those_of_vllm_bench():
    answers = [Answer(10, output_len=5, ttft=0.1, latency=0.5, itls=[0.1] * 4, is_counted=True),
               Answer(20, output_len=11, ttft=0.3, latency=1.3, itls=[0.1] * 10, is_counted=True),
               Answer(99, output_len=99, ttft=9.0, latency=9.9, itls=[9.0], error="x")]
    result = summarize(answers, 2.0, percentiles=(50.0, 99.0), goodput={"ttft": 200.0})
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 16)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (1, 8, 23)
    assert result["mean_ttft_ms"] == pytest.approx(200) and result["std_ttft_ms"] == pytest.approx(100)
    assert result["p99_ttft_ms"] == pytest.approx(298) and result["p50_e2el_ms"] == result["median_e2el_ms"]
    assert result["mean_tpot_ms"] == pytest.approx(100) and result["mean_itl_ms"] == pytest.approx(100)
    assert result["request_goodput"] == 0.5 and result["errors"] == {"x": 1}


def test_no_answer_at_all_divides_nothing_by_zero():
    result = summarize([], 0.0)
    assert result["request_throughput"] == 0 and result["p99_itl_ms"] == 0


# ---- prompts and arrivals ----


def test_prompts_have_their_exact_length_as_ids_and_as_text():
    tokenizer = Tokenizer.from_model("dummy")
    for prompt in prompts(20, 50, 10, range_ratio=0.2, prefix_len=30):
        assert 70 <= len(prompt.token_ids) <= 90 and 8 <= prompt.output_len <= 12
        assert tokenizer.encode(prompt.text) == prompt.token_ids


def test_real_prompts_keep_their_length_when_sent_as_text(smollm2_path):
    tokenizer = Tokenizer.from_model(smollm2_path)
    for prompt in PromptMaker(tokenizer, 1).prompts(5, 300, 1):
        assert len(prompt.token_ids) == 300 and tokenizer.encode(prompt.text) == prompt.token_ids


def test_prompts_share_the_prefix_and_nothing_else_and_repeat_with_the_seed():
    first, second = (prompt.token_ids for prompt in prompts(2, 40, 1, prefix_len=16))
    assert first[:16] == second[:16] and first[16:] != second[16:]
    assert prompts(2, 40, 1, prefix_len=16)[1].token_ids == second


def test_requests_arrive_at_the_rate_that_was_asked_for():
    times = Load(request_rate=10.0).arrivals(200)
    assert times == sorted(times) and times[-1] == pytest.approx(20)

    def spread(burstiness):
        at = Load(request_rate=10.0, burstiness=burstiness).arrivals(200)
        return statistics.pstdev(later - earlier for earlier, later in itertools.pairwise(at))

    assert spread(100.0) < spread(1.0) / 3 < spread(0.2) / 3
    assert Load().arrivals(3) == [0, 0, 0]


# ---- what a server accepts ----


GOOD = (text("a"), text("b", "length"), USAGE, b"data: [DONE]\n\n")


def test_token_ids_are_sent_and_text_where_they_are_refused():
    for takes_ids, kind in ((True, list), (False, str)):
        fake = FakeServer(*GOOD, takes_ids=takes_ids)
        settled, answers, _ = load(fake)
        assert settled.sends_ids is takes_ids and settled.model == "fake"
        assert all(isinstance(body["prompt"], kind) for body in fake.bodies[-4:]) and not any(one.error for one in answers)


def test_a_server_that_knows_no_stream_options_is_asked_without():
    fake = FakeServer(*GOOD, takes_usage=False)
    settled, _, _ = load(fake)
    assert not settled.asks_usage and all("stream_options" not in body for body in fake.bodies[-4:])


def test_the_probe_and_the_warmups_are_not_counted_and_have_prompts_of_their_own():
    fake = FakeServer(*GOOD)
    _, answers, _ = load(fake, 3, Load(num_warmups=2))
    assert len(answers) == 3 and len(fake.bodies) == 6
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 6


def test_no_more_requests_are_open_than_allowed():
    fake = FakeServer(PAUSE, *GOOD)
    _, _, seconds = load(fake, 6, Load(max_concurrency=2))
    assert fake.most_open == 2 and seconds > 3 * PAUSE


@pytest.mark.parametrize(("key", "header"), [("secret", "Bearer secret"), (None, None)])
def test_the_key_is_sent_where_there_is_one(key, header):
    fake = FakeServer(*GOOD)
    load(fake, 1, api_key=key)
    assert set(fake.keys) == {header}


def test_a_base_url_may_end_in_v1():
    with serve_app(FakeServer(*GOOD).app) as url:
        assert not asyncio.run(Server(f"{url}/v1/", model="m").ask(prompts(1)[0])).error


def test_a_server_that_refuses_everything_is_said_to():
    with pytest.raises(ConfigError, match="not like this"):
        load(FakeServer(400))


# ---- the commands ----


def bench(*args, capsys):
    """A command's exit code, stdout and stderr."""
    code = cli.main(["bench", *args])
    return code, *capsys.readouterr()


def serve_args(url, *more):
    return ["serve", "--base-url", url, "--tokenizer", "dummy", "--num-prompts", "6", "--random-input-len", "30",
            "--random-output-len", "5", *more]


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_our_own_server_counts_what_was_asked_for(endpoint, capsys, tmp_path):
    with serve_in_thread() as server:
        code, out, err = bench(*serve_args(
            server.url, "--endpoint", endpoint, "--ignore-eos", "--save-result", "--save-detailed", "--result-dir",
            str(tmp_path), "--result-filename", "r.json", "--metric-percentiles", "50,99"), capsys=capsys)
        server.wait_drained()
    assert code == 0 and "Successful requests:" in out and "P99 TTFT (ms):" in out and "error" not in err
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["output_lens"] == [5] * 6 and result["counted_by"] == "usage" and result["model_id"] == "dummy"
    assert result["input_lens"] == [30] * 6 if endpoint == "/v1/completions" else min(result["input_lens"]) > 30
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"] <= result["duration"] * 1000


def test_failed_requests_are_counted_named_and_end_with_code_1(capsys):
    fake = FakeServer(*GOOD)
    answers = iter([GOOD, *([GOOD, (text("a"),)] * 3)])

    async def alternate():
        for part in next(answers):
            yield part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n"

    fake._events = alternate
    with serve_app(fake.app) as url:
        code, out, err = bench(*serve_args(url), capsys=capsys)
    assert code == 1 and "3 of 6 requests failed: the stream broke off" in err
    assert [line.split()[-1] for line in out.splitlines() if line.startswith(("Successful", "Failed"))] == ["3", "3"]


def test_a_server_that_is_not_there_is_one_line_and_code_1(capsys):
    code, out, err = bench(*serve_args("http://127.0.0.1:9"), capsys=capsys)
    assert code == 1 and not out and "connection refused" in err and "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize("args", [
    ["--num-prompts", "0"], ["--request-rate", "0"], ["--random-range-ratio", "1"], ["--percentile-metrics", "x"],
    ["--metric-percentiles", "101"], ["--goodput", "itl:5"], ["--max-concurrency", "-1"], ["--backend", "x"],
])
def test_a_value_that_cannot_be_exits_2_and_names_the_option(args, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "serve", *args])
    assert caught.value.code == 2 and args[0] in capsys.readouterr().err


def test_an_unknown_option_is_met_with_the_right_one(capsys):
    with contextlib.suppress(SystemExit):
        cli.main(["bench", "serve", "--num-prompt", "5"])
    assert "did you mean --num-prompts?" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://x"])
def test_an_address_that_is_none_is_refused(address, capsys):
    code, _, err = bench(*serve_args(address), capsys=capsys)
    assert code == 1 and "is not an address" in err


def test_throughput_and_latency_run_the_engine_to_full_lengths():
    llm = LLM("dummy", num_kv_blocks=64, enable_prefix_caching=False)
    result = bench_throughput(llm, prompts(4, 20, 6), progress=False)
    assert (result["num_requests"], result["total_num_tokens"]) == (4, 4 * 26)
    assert result["tokens_per_second"] == pytest.approx(4 * 26 / result["elapsed_time"])
    result = bench_latency(llm, prompts(2, 8, 3), num_warmups=1, num_iters=3)
    assert len(result["latencies"]) == 3 and result["avg_latency"] == pytest.approx(statistics.mean(result["latencies"]))
    assert result["percentiles"]["10"] <= result["percentiles"]["99"]


def test_the_engine_commands_write_their_results(capsys, tmp_path):
    engine = ["--model", "dummy", "--num-kv-blocks", "64", "--input-len", "8", "--output-len", "2", "--output-json"]
    code, out, _ = bench("throughput", "--num-prompts", "3", *engine, str(tmp_path / "t.json"), capsys=capsys)
    assert code == 0 and out.startswith("Throughput: ")
    assert json.loads((tmp_path / "t.json").read_text())["num_requests"] == 3
    code, out, _ = bench("latency", "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0", *engine,
                         str(tmp_path / "l.json"), capsys=capsys)
    assert code == 0 and out.startswith("Avg latency: ")
    assert len(json.loads((tmp_path / "l.json").read_text())["latencies"]) == 2


def test_a_prompt_that_never_fits_is_one_line(capsys):
    code, _, err = bench("latency", "--model", "dummy", "--num-kv-blocks", "4", "--input-len", "500", capsys=capsys)
    assert code == 1 and "The KV cache holds 64 tokens" in err and err.count("\n") == 1
