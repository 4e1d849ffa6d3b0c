"""OpenAI's HTTP interface, asked over real sockets. The ids in names are those of the field cases (see design.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from checkpoints import write_byte_tokenizer, write_checkpoint
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server import hang_up, loads_strictly, parse_events, receive_until, serve_in_thread, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = [CHAT, COMPLETIONS]
EOS = {"258": 100}  # logit_bias that makes the dummy end at once
LETTER_A = {"65": 100}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server():
    with serve_in_thread() as running:
        yield running


@pytest.fixture(scope="module")
def small():
    """A context of 64 tokens."""
    with serve_in_thread(max_model_len=64) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request):
    """DRAIN: after every test the servers it used are idle, their blocks free, and they answer as before."""
    yield
    for name in ("server", "small"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_drained()


def body_for(path, **fields):
    """A small, greedy request to either endpoint."""
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    return {"model": "dummy", **start, "max_tokens": 5, "temperature": 0, **fields}


def ask(server, path, **fields):
    response = server.post(path, body_for(path, **fields))
    assert response.status_code == 200, response.text
    return loads_strictly(response.content)


def ask_stream(server, path, **fields):
    response = server.post(path, body_for(path, stream=True, **fields))
    assert response.status_code == 200, response.text
    return parse_events(response.content)


def ask_wrongly(server, path, body, status=400, **kwargs):
    """The error object of a request that must fail."""
    response = server.post(path, body, **kwargs)
    return error_of(response, status)


def error_of(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    content = loads_strictly(response.content)
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["message"]
    return content["error"]


def text_of(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


def join_stream(chunks):
    """What a client makes of the chunks: {index: (text, finish_reason, logprobs)}."""
    found = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, reason, logprobs = found.get(choice["index"], ("", None, None))
        text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        assert reason is None, "a chunk after the finish"
        if choice["logprobs"] is not None:
            logprobs = {key: (logprobs or {}).get(key, []) + value for key, value in choice["logprobs"].items()
                        if value is not None}
        found[choice["index"]] = (text, choice["finish_reason"], logprobs)
    return found


def join_body(body):
    return {choice["index"]: (text_of(choice), choice["finish_reason"], choice["logprobs"] and {
        key: value for key, value in choice["logprobs"].items() if value is not None}) for choice in body["choices"]}


# ---- streams ----


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("options", [..., None, {}, {"include_usage": False}, {"include_usage": None}])
def test_SS_01_without_include_usage_no_chunk_has_empty_choices(server, path, options):
    fields = {} if options is ... else {"stream_options": options}
    chunks = ask_stream(server, path, **fields)
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in chunks)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("is_continuous", [False, True])
def test_SS_01_include_usage_adds_one_last_chunk_with_the_whole_usage(server, path, is_continuous):
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    *chunks, last = ask_stream(server, path, stream_options=options)
    assert last["choices"] == [] and last["usage"] == ask(server, path)["usage"] | last["usage"]
    assert last["usage"]["completion_tokens"] == 5
    assert all(chunk["choices"] for chunk in chunks)
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    if is_continuous:
        assert counts == sorted(counts) and counts[-1] == 5
    else:
        assert not any(counts)


def test_SS_02_the_role_comes_once_and_first_and_content_is_never_null(server):
    first, *rest = [chunk["choices"][0] for chunk in ask_stream(server, CHAT)]
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert all("role" not in choice["delta"] and isinstance(choice["delta"].get("content", ""), str) for choice in rest)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("fields", "reason"), [
    ({}, "length"), ({"logit_bias": EOS}, "stop"), ({"logit_bias": LETTER_A, "stop": "AAA"}, "stop"),
    ({"logit_bias": LETTER_A, "stop_token_ids": [65]}, "stop"),
])
def test_SS_03_finish_reason_is_null_until_exactly_one_last_value(server, path, fields, reason):
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in ask_stream(server, path, **fields)]
    assert reasons == [None] * (len(reasons) - 1) + [reason]


@pytest.mark.parametrize(("fields", "stop_reason"), [
    ({"logit_bias": EOS}, None), ({"logit_bias": LETTER_A, "stop": ["x", "AAA"]}, "AAA"),
    ({"logit_bias": LETTER_A, "stop_token_ids": [65]}, 65),
])
def test_stop_reason_tells_what_stopped_it(server, fields, stop_reason):
    assert ask(server, CHAT, **fields)["choices"][0]["stop_reason"] == stop_reason
    assert ask_stream(server, CHAT, **fields)[-1]["choices"][0]["stop_reason"] == stop_reason


def test_SS_04_two_hundred_streams_all_end_with_done(server):
    def stream(number):
        path = ENDPOINTS[number % 2]
        fields = {"max_tokens": 1 + number % 50, "temperature": 1, "seed": number, "n": 1 + number % 3 // 2}
        fields |= [{}, {"logit_bias": EOS}, {"stream_options": {"include_usage": True}},
                   {"stop": ["a", "b"]}][number % 4]
        chunks = ask_stream(server, path, **fields)
        return len(join_stream(chunks)) == fields["n"] and all(reason for _, reason, _ in join_stream(chunks).values())

    with ThreadPoolExecutor(20) as pool:
        assert all(pool.map(stream, range(200)))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("fields", "status", "code"), [
    ({"max_tokens": 5000}, 400, "context_length_exceeded"), ({"model": "nope"}, 404, "model_not_found"),
    ({"top_p": 5}, 400, None), ({"prompt": None, "messages": None}, 400, None), ({"logit_bias": {"999": 1}}, 400, None),
    ({"n": 200}, 400, None), ({"stop_token_ids": [-1]}, 400, None),
    ({"response_format": {"type": "text"}, "n": 0}, 400, None),
])
def test_SS_06_an_error_before_the_first_token_is_an_http_error_in_a_stream_too(server, path, fields, status, code):
    plain = ask_wrongly(server, path, body_for(path, **fields), status)
    assert ask_wrongly(server, path, body_for(path, stream=True, **fields), status) == plain
    assert plain["code"] == code and plain["type"] == "invalid_request_error"


def test_SS_08_and_09_a_stream_is_made_of_strict_events_with_constant_heads(server):
    bias = {str(byte): 100 for byte in "é".encode()}  # text outside ASCII
    response = server.post(CHAT, body_for(CHAT, stream=True, logit_bias=bias, max_tokens=40, temperature=1, seed=1))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = parse_events(response.content)
    assert "é" in join_stream(chunks)[0][0] and "é".encode() in response.content
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-") and chunks[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("char", ["\x85", "\u2028", "\u2029", "\r\n", "\x00", "\U0001f600"])
def test_SS_09_no_character_of_the_text_breaks_an_event(server, char):
    (first, *_) = ask_stream(server, COMPLETIONS, prompt=f"a{char}b", echo=True)
    assert first["choices"][0]["text"] == f"a{char}b"


def test_SS_09_the_first_bytes_arrive_before_the_generation_ends(server):
    may_go_on = threading.Event()
    waits: list[bool] = []  # whether the engine was told to go on, for each of its steps after the tenth

    def hold(_: object) -> None:
        steps.append(1)
        if len(steps) > 10:
            waits.append(may_go_on.wait(20))

    steps: list[int] = []
    server.engine.observers.append(hold)
    try:
        body = body_for(CHAT, stream=True, max_tokens=50, ignore_eos=True)
        with server.client.stream("POST", CHAT, json=body) as response:
            parts = response.iter_bytes()
            assert b'"role":"assistant"' in next(parts)
            assert server.engine.has_unfinished()
            may_go_on.set()
            assert b"[DONE]" in b"".join(parts)
        assert all(waits)
    finally:
        may_go_on.set()
        server.engine.observers.remove(hold)
    server.wait_drained()


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("fields", [
    {"max_tokens": 40}, {"temperature": 1, "seed": 5, "n": 3}, {"logprobs": 2},
    {"stop": ["A", "B", "\x1b"], "max_tokens": 60},
    {"logprobs": 0, "n": 2}, {"logit_bias": EOS}, {"logit_bias": EOS, "logprobs": 1}, {"echo": True, "logprobs": 2},
    {"echo": True, "prompt": ["Hé", "\U0001f600 b"], "n": 2}, {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"logit_bias": {"240": 99}, "logprobs": 1},
    {"include_stop_str_in_output": True, "logit_bias": LETTER_A, "stop": "AA"},
], ids=json.dumps)
def test_a_stream_joins_to_what_the_whole_answer_says(server, path, fields):
    if path == CHAT:
        fields = {key: value for key, value in fields.items() if key not in ("echo", "prompt")}
        if "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        if fields.get("max_tokens") == 0:
            fields["max_tokens"] = 1
    whole = ask(server, path, **fields)
    *chunks, last = ask_stream(server, path, stream_options={"include_usage": True}, **fields)
    assert join_stream(chunks) == join_body(whole)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][key] for key in counts] == [whole["usage"][key] for key in counts]


# ---- chat ----


def test_a_chat_answer_has_the_shape_of_openais(server):
    body = ask(server, CHAT)
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == "dummy" and isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["logprobs"] is None
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)


def test_cached_tokens_tell_what_the_prefix_cache_gave(server):
    prompt = "a prompt of its own, long enough for blocks"
    usages = [ask(server, COMPLETIONS, prompt=prompt)["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 32]


def test_content_parts_are_joined_and_developer_means_system(server):
    parts = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
             {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    assert join_body(ask(server, CHAT, messages=parts)) == join_body(ask(server, CHAT, messages=plain))
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert ask_wrongly(server, CHAT, body_for(CHAT, messages=picture))["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("messages", [
    [], None, "hi", {}, 5, [{}], [[]], [[[]]], [None], ["x"], [{"role": "user"}], [{"content": "x"}],
    [{"role": "wizard", "content": "x"}], [{"role": ["user"], "content": "x"}], [{"role": {}, "content": "x"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}], [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
])
def test_AP_03_incomplete_messages_are_named(server, messages):
    error = ask_wrongly(server, CHAT, {"model": "dummy", "messages": messages})
    assert error["param"].startswith("messages")
    if isinstance(messages, list) and messages and "ud800" not in str(messages):
        assert re.match(r"messages\[\d\]", error["param"])


def test_AP_03_absent_messages_are_named(server):
    assert ask_wrongly(server, CHAT, {"model": "dummy"})["param"] == "messages"


@pytest.mark.parametrize(("fields", "num_tokens"), [
    ({"max_completion_tokens": 5}, 5), ({"max_completion_tokens": 5, "max_tokens": 9}, 5), ({"max_tokens": 7}, 7),
    ({"max_completion_tokens": None, "max_tokens": 6}, 6), ({"max_completion_tokens": 6, "max_tokens": None}, 6),
    ({"max_completion_tokens": None, "max_tokens": None}, 64 - 21), ({}, 64 - 21),
])
def test_CC_01_max_completion_tokens_wins_over_max_tokens(small, fields, num_tokens):
    body = {"model": "dummy", "messages": MESSAGES, "logit_bias": LETTER_A, "temperature": 0, **fields}
    answer = loads_strictly(small.post(CHAT, body).content)
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_final_message_can_be_continued(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "messages": messages}
    chat = ask(server, CHAT, **fields)
    assert chat["usage"]["prompt_tokens"] == 21 + len("Well, ")
    assert ask_wrongly(server, CHAT, body_for(CHAT, **(fields | {"add_generation_prompt": True})))["param"] == (
        "continue_final_message")


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
])
def test_what_would_change_the_answer_but_is_not_there_is_refused_by_name(server, fields, param):
    error = ask_wrongly(server, CHAT, body_for(CHAT, **fields))
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize("fields", [
    {"tools": [], "tool_choice": "auto"}, {"tools": None, "tool_choice": None}, {"response_format": {"type": "text"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, {"response_format": None},
    {"structured_outputs": None}, {"bad_words": []}, {"modalities": ["text"]}, {"stop": None, "seed": None, "n": None},
    {"logprobs": None, "top_logprobs": None}, {"logprobs": False, "top_logprobs": 0}, {"logit_bias": None},
    {"temperature": None, "top_p": None, "stream": None}, {"stream_options": None}, {"temperature": 1, "top_p": 1},
])
def test_fields_that_ask_for_nothing_are_fine(server, fields):
    ask(server, CHAT, **fields)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_AP_14_fields_of_other_servers_and_unknown_ones_are_ignored(server, path, caplog):
    caplog.set_level(logging.INFO, "vllm_mini.api_server")
    extras = {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "foo": {"bar": [1]},
              "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "x", "verbosity": "low",
              "reasoning_effort": "low", "prediction": None, "no_stop_trim": False, "separate_reasoning": True,
              "return_hidden_states": False, "skip_special_tokens": True, path: 1}
    plain = ask(server, path)
    assert join_body(ask(server, path, **extras)) == join_body(plain)
    ask(server, path, **extras)
    assert sum(path in record.getMessage() for record in caplog.records) == 1  # mentioned, once
    if path == CHAT:
        message = {"role": "user", "content": "Hi", "name": "me", "id": 1, "metadata": {}, "refusal": None}
        ask(server, path, messages=[message])


@pytest.mark.parametrize(("field", "values"), [
    ("temperature", [-1, 2.1, "hot", True, [], {}]), ("top_p", [0, -1, 1.1, "x"]), ("n", [0, -1, 129, 1.5, "2", True]),
    ("top_k", [-2, 1.5, 2**31, 2**70]), ("presence_penalty", [3, "x"]), ("frequency_penalty", [-3]),
    ("seed", [2**64, 1.5]),
    ("repetition_penalty", [0, -1]), ("min_p", [2]), ("stop", [5, [5], [""], "", ["x"] * 17, {}, ["x" * 2000]]),
    ("stream", ["yes", 1]), ("stop_token_ids", [5, ["a"], [2**70], [999]]), ("min_tokens", [-1, 6, "x"]),
    ("ignore_eos", ["x"]), ("stream_options", [{}, 5]), ("truncate_prompt_tokens", [0, -1]),
    ("model", [5, None, [], {}]),
    ("max_tokens", [-1, 1.5, "5", True, 1e9, 2**63, 10**100]), ("prompt_logprobs", [-1, 21]), ("logit_bias", [5, "x"]),
])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_bad_value_is_a_400_that_names_its_field(server, path, field, values):
    for value in values:
        error = ask_wrongly(server, path, body_for(path, **{field: value}))
        assert field in error["message"] or error["code"] == "context_length_exceeded", error
        assert error["param"] in (field, "prompt", "messages"), error
    ask(server, path)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400, "1" * 4299])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "max_tokens", "seed", "top_k",
                                   "logit_bias"])
def test_numbers_that_are_none_or_far_too_large_are_refused(server, field, literal):
    value = f'{{"5": {literal}}}' if field == "logit_bias" else literal
    content = f'{{"model": "dummy", "prompt": "a", "{field}": {value}}}'
    error = error_of(server.client.post(COMPLETIONS, content=content))
    assert len(error["message"]) <= 1000


# ---- sampling fields ----


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("bias", "named"), [
    ({"999999": 5}, "999999"), ({"-1": 100}, "-1"), ({"abc": 1}, "abc"), ({"5": "x"}, "5"), ({"5": 1000}, "5"),
    ({"5": None}, "5"),
    ([5], None), ({"5": True}, "5"), ({"259": 1}, "259"), ({" 5": 1}, " 5"), ({"5.0": 1}, "5.0"), ({"": 1}, ""),
    ({"5": {}}, "5"),
])
def test_SA_12_logit_bias_outside_the_vocabulary_or_the_range_is_refused_by_key(server, path, bias, named):
    error = ask_wrongly(server, path, body_for(path, logit_bias=bias))
    assert error["param"].startswith("logit_bias") and (named is None or named in error["message"])


def test_SA_12_logit_bias_forces_and_forbids(server):
    (free,) = ask(server, COMPLETIONS, max_tokens=1, logprobs=1, return_token_ids=True)["choices"][0]["token_ids"]
    assert ask(server, COMPLETIONS, logit_bias=LETTER_A)["choices"][0]["text"] == "AAAAA"
    other = ask(server, COMPLETIONS, logit_bias={str(free): -100}, return_token_ids=True, temperature=1, n=16)
    assert all(free not in choice["token_ids"] for choice in other["choices"])


@pytest.mark.parametrize(("path", "fields"), [
    (COMPLETIONS, {"logprobs": 5, "top_k": 1, "temperature": 1}),
    (COMPLETIONS, {"logprobs": 5, "logit_bias": {"65": -100}}),
    (COMPLETIONS, {"logprobs": 5, "min_tokens": 3, "logit_bias": EOS}),
    (COMPLETIONS, {"logprobs": 5, "logit_bias": LETTER_A}),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "top_k": 1}),
    (CHAT, {"logprobs": True, "top_logprobs": 5, "logit_bias": EOS}),
])
def test_SA_14_impossible_tokens_make_no_infinity(server, path, fields):
    for logprobs in (join_body(ask(server, path, **fields))[0][2],
                     join_stream(ask_stream(server, path, **fields))[0][2]):
        chosen = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs["content"]]
        assert all(-9999 < logprob <= 0 for logprob in chosen)


def test_SA_15_chat_logprobs_have_openais_form(server):
    for fields, num_top in (({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)):
        content = ask(server, CHAT, **fields)["choices"][0]["logprobs"]["content"]
        assert len(content) == 5
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
            top = [other["logprob"] for other in entry["top_logprobs"]]
            assert len(top) == num_top and top == sorted(top, reverse=True)
    error = ask_wrongly(server, CHAT, body_for(CHAT, logprobs=False, top_logprobs=3))
    assert error["param"] == "top_logprobs"


@pytest.mark.parametrize(("path", "field", "values", "limit"), [
    (CHAT, "top_logprobs", [-1, 21, 100000, 1.5, True, "3"], "20"),
    (COMPLETIONS, "logprobs", [6, 100000, -1, 1.5, True], "5"),
])
def test_SA_16_too_many_alternatives_are_refused_with_field_and_limit(server, path, field, values, limit):
    for value in values:
        fields = {field: value, **({"logprobs": True} if path == CHAT else {})}
        error = ask_wrongly(server, path, body_for(path, **fields))
        assert error["param"] == field and field in error["message"]
        if type(value) is int and value > 0:
            assert limit in error["message"]
    ask(server, path)


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("temperature", [0, 2])
def test_SA_17_every_token_has_its_logprob_the_first_one_too(server, max_tokens, temperature):
    fields = {"max_tokens": max_tokens, "temperature": temperature, "logprobs": 2, "seed": 3, "ignore_eos": True,
              "prompt": f"SA-17, {max_tokens} {temperature}: two blocks"}
    uncached, whole = (join_body(ask(server, COMPLETIONS, **fields))[0][2] for _ in range(2))
    assert uncached["tokens"] == whole["tokens"]
    assert uncached["token_logprobs"] == pytest.approx(whole["token_logprobs"], abs=1e-4)
    assert join_stream(ask_stream(server, COMPLETIONS, **fields))[0][2] == whole
    assert [len(values) for values in whole.values()] == [max_tokens] * 4
    assert all(math.isfinite(logprob) for logprob in whole["token_logprobs"])
    assert all(logprob in top.values() for logprob, top in zip(whole["token_logprobs"], whole["top_logprobs"]))


def test_seeded_answers_repeat_and_choices_differ(server):
    fields = {"temperature": 1, "seed": 9, "n": 3, "max_tokens": 12}
    first, second = ask(server, COMPLETIONS, **fields), ask(server, COMPLETIONS, **fields)
    assert join_body(first) == join_body(second)
    assert len({text for text, _, _ in join_body(first).values()}) == 3


# ---- completions ----


def test_PC_07_echo_with_logprobs_is_complete_and_the_same_with_a_warm_cache(server):
    fields = {"prompt": "exactly thirty-three bytes long..", "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = (ask(server, COMPLETIONS, **fields)["choices"][0] for _ in range(2))
    assert first == second
    logprobs = first["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 34
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(logprob) for logprob in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"max_tokens": 1}, {}])
def test_AP_01_max_tokens_null_is_the_default(small, path, fields):
    body = body_for(path, logit_bias=LETTER_A) | fields
    if not fields:
        del body["max_tokens"]
    usage = loads_strictly(small.post(path, body).content)["usage"]
    default = 16 if path == COMPLETIONS else 64 - 21
    assert usage["completion_tokens"] == (fields.get("max_tokens") or default)


def test_AP_01_max_tokens_zero_gives_the_prompt_or_nothing_in_completions_and_a_400_in_chat(server):
    (choice,) = ask(server, COMPLETIONS, max_tokens=0)["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "length"
    echo = ask(server, COMPLETIONS, max_tokens=0, echo=True, logprobs=1)
    assert echo["choices"][0]["text"] == "Hello" and len(echo["choices"][0]["logprobs"]["token_logprobs"]) == 5
    assert echo["usage"]["completion_tokens"] == 0
    assert ask_wrongly(server, CHAT, body_for(CHAT, max_tokens=0))["param"] == "max_tokens"


@pytest.mark.parametrize(("prompt", "param"), [
    ("", "prompt"), ([""], "prompt[0]"), ([], "prompt"), ([[]], "prompt[0]"), (["a", ""], "prompt[1]"),
    ([[65], []], "prompt[1]"),
    (None, "prompt"), (5, "prompt"), ({}, "prompt"), ([5.5], "prompt"), ([None], "prompt"), ([["a"]], "prompt[0]"),
    ([-1], "prompt"),
    ([259], "prompt"), ([True], "prompt"), ([[65], [999]], "prompt[1]"), (["a", 5], "prompt[1]"), ([2**70], "prompt"),
    ("\ud800", "prompt"), (["a"] * 3000, "prompt"),
])
def test_AP_02_an_empty_or_malformed_prompt_is_refused_by_name(server, prompt, param):
    error = ask_wrongly(server, COMPLETIONS, {"model": "dummy", "prompt": prompt})
    assert error["param"] == param
    ask(server, COMPLETIONS)


def test_prompts_may_be_texts_or_ids_and_choices_are_numbered_through(server):
    texts = ask(server, COMPLETIONS, prompt=["Hello", "you"], n=2)
    ids = ask(server, COMPLETIONS, prompt=[list(b"Hello"), list(b"you")], n=2)
    assert join_body(texts) == join_body(ids)
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert texts["choices"][2]["text"] == ask(server, COMPLETIONS, prompt="you")["choices"][0]["text"]
    assert texts["usage"]["prompt_tokens"] == 8 and texts["usage"]["completion_tokens"] == 20
    assert join_body(ask(server, COMPLETIONS, prompt=list(b"Hello"))) == join_body(ask(server, COMPLETIONS))


@pytest.mark.parametrize("prompt", ["Hello, world", "é \U0001f600!", list(b"Hello, world")])
@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("num_logprobs", [None, 0, 2])
def test_AP_11_echo_gives_the_prompt_once_and_first(server, prompt, max_tokens, num_logprobs):
    fields = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": num_logprobs}
    text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    (choice,) = ask(server, COMPLETIONS, **fields)["choices"]
    chunks = ask_stream(server, COMPLETIONS, **fields)
    assert choice["text"].startswith(text) and chunks[0]["choices"][0]["text"] == text
    if num_logprobs is not None:
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(text.encode()) + max_tokens}
        assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Hello", "a\U0001f600b", list("\U0001f600é".encode()),
                                    "<|im_start|>user\nHi<|im_end|>"])
@pytest.mark.parametrize("bias", [{}, {str(byte): 50 for byte in "\U0001f600a".encode()}, EOS])
def test_AP_12_text_offsets_point_at_the_tokens(server, echo, prompt, bias):
    fields = {"prompt": prompt, "echo": echo, "logprobs": 1, "max_tokens": 12, "logit_bias": bias, "temperature": 1,
              "seed": 4}
    (choice,) = ask(server, COMPLETIONS, **fields)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0
    for token, offset in zip(tokens, offsets):
        assert choice["text"][offset:].startswith(token)
    assert choice["text"].startswith("".join(tokens))  # all but half a character at the very end
    assert join_stream(ask_stream(server, COMPLETIONS, **fields))[0][2]["text_offset"] == offsets


def test_AP_17_logprobs_zero_reports_the_chosen_tokens(server):
    for logprobs in (join_body(ask(server, COMPLETIONS, logprobs=0, max_tokens=3))[0][2],
                     join_stream(ask_stream(server, COMPLETIONS, logprobs=0, max_tokens=3))[0][2]):
        assert len(logprobs["token_logprobs"]) == 3 and all(len(top) == 1 for top in logprobs["top_logprobs"])


def test_prompt_logprobs_have_vllms_form_and_are_refused_in_a_stream(server):
    (choice,) = ask(server, COMPLETIONS, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 4
    for token_id, entry in zip(b"ello", rest):
        assert entry[str(token_id)]["decoded_token"] == chr(token_id)
        assert sum(one["rank"] is not None for one in entry.values()) == 2
    error = ask_wrongly(server, COMPLETIONS, body_for(COMPLETIONS, prompt_logprobs=1, stream=True))
    assert error["param"] == "prompt_logprobs"


def test_suffix_and_best_of_are_refused_unless_they_ask_for_nothing(server):
    ask(server, COMPLETIONS, suffix=None, best_of=1)
    ask(server, COMPLETIONS, suffix="", best_of=2, n=2)
    for fields in ({"suffix": "x"}, {"best_of": 3}):
        assert ask_wrongly(server, COMPLETIONS, body_for(COMPLETIONS, **fields))["param"] in fields


def test_a_prompt_can_be_truncated_from_the_left(server):
    body = ask(server, COMPLETIONS, prompt="Hello", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert body["usage"]["prompt_tokens"] == 2 and body["choices"][0]["text"].startswith("lo")


# ---- limits ----


@pytest.mark.parametrize("max_tokens", [1, None])
def test_AP_04_the_context_error_has_the_true_numbers(small, max_tokens):
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    body = {"model": "dummy", "temperature": 0, **fields}
    assert small.post(COMPLETIONS, body | {"prompt": "x" * 63}).json()["usage"]["completion_tokens"] == 1
    for length in (64, 65, 500):
        for path, start, extra in ((COMPLETIONS, {"prompt": "x" * length}, 0),
                                   (CHAT, {"messages": [{"role": "user", "content": "x" * length}]}, 19)):
            error = ask_wrongly(small, path, body | start)
            assert error["code"] == "context_length_exceeded" and error["param"] == next(iter(start))
            assert error["message"].startswith("This model's maximum context length is 64 tokens. However, ")
            assert str(length + extra) in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_AP_05_a_prompt_and_its_output_must_fit_together(small, path, stream):
    start = {"prompt": "x" * 50} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x" * 31}]}
    body = {"model": "dummy", "stream": stream, "logit_bias": LETTER_A, **start}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = small.post(path, body | {"max_tokens": 14} | options)
    answer = parse_events(response.content)[-1] if stream else loads_strictly(response.content)
    assert answer["usage"]["prompt_tokens"] == 50 and answer["usage"]["total_tokens"] == 64
    for max_tokens in (15, 1000):
        error = ask_wrongly(small, path, body | {"max_tokens": max_tokens})
        assert error["code"] == "context_length_exceeded"
        assert str(50 + max_tokens) in error["message"] and "64" in error["message"]
    response = small.post(path, body | options)
    answer = parse_events(response.content)[-1] if stream else loads_strictly(response.content)
    assert answer["usage"]["total_tokens"] == 64


def test_what_never_fits_the_cache_is_refused_with_its_own_code():
    with serve_in_thread(num_kv_blocks=4) as server:
        error = ask_wrongly(server, CHAT, body_for(CHAT, max_completion_tokens=60))
        assert error["code"] == "kv_capacity_exceeded" and error["param"] == "max_completion_tokens"
        assert ask(server, CHAT)["usage"]["completion_tokens"] == 5
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 64


# ---- errors and paths ----


def test_AP_06_every_failure_has_openais_shape(server):
    post = server.client.post
    error = error_of(post(CHAT, content='{"model":'))
    assert "JSON" in error["message"]
    assert error_of(post(CHAT, json=body_for(CHAT, temperature="hot")))["param"] == "temperature"
    assert error_of(post(CHAT, json={"messages": MESSAGES}))["param"] == "model"
    assert error_of(server.client.get(CHAT), 405)["message"]
    assert error_of(server.client.delete("/v1/models"), 405)["message"]
    assert "/v1/chat/completions" in error_of(post("/chat/completions", json={}), 404)["message"]
    for path in ("/", "/v1", "/v2/models", "/redoc", "/%ff", "/v1/chat/completions/x",
                 "/..%2f..%2fetc/passwd"):
        error_of(server.client.get(path), 404)


@pytest.mark.parametrize(("name", "status", "code"), [
    ("nope", 404, "model_not_found"), ("", 404, "model_not_found"), (None, 400, None), (..., 400, None),
    ("DUMMY", 404, "model_not_found"),
    ("\ud800", 404, "model_not_found"), ("dummy", 200, None),
])
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_AP_07_only_the_served_model_answers(server, path, name, status, code, stream):
    body = body_for(path, model=name, stream=stream)
    if name is ...:
        del body["model"]
    response = server.client.post(path, content=json.dumps(body))
    if status != 200:
        error = error_of(response, status)
        assert error["param"] == "model" and error["code"] == code
    else:
        assert response.status_code == 200


def test_AP_07_models_are_listed_and_described():
    settings = {"served_model_names": ["org/one", "two"], "model_path": "/some/where"}
    with serve_in_thread(app_settings=settings) as server:
        listed = server.client.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["org/one", "two"]
        for name in ("org/one", "two", "org%2Fone"):
            model = Model.model_validate(server.client.get(f"/v1/models/{name}").json(), strict=True)
            assert model.id in ("org/one", "two")
        assert error_of(server.client.get("/v1/models/nope"), 404)["code"] == "model_not_found"
        for name, shown in (("org/one", "org/one"), ("two", "two"), ("/some/where", "org/one")):
            assert ask(server, CHAT, model=name)["model"] == shown
        assert "/some/where" not in ask_wrongly(server, CHAT, body_for(CHAT, model="x"), 404)["message"]


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/v1//models"), ("GET", "/v1/models/"), ("GET", "//v1/models//"), ("POST", "/v1//chat/completions"),
    ("POST", "/v1/chat/completions/"), ("POST", "//v1//completions//"), ("GET", "/health/"),
])
def test_CC_03_trailing_and_double_slashes_work(server, method, path):
    body = body_for(CHAT if "chat" in path else COMPLETIONS) if method == "POST" else None
    response = server.client.request(method, f"{server.url}{path}", json=body)
    assert response.status_code == 200 and not response.history


GOOD = json.dumps(body_for(COMPLETIONS)).encode()


@pytest.mark.parametrize(("content", "headers", "status"), [
    (b"", {}, 400), (b"null", {}, 400), (b"[]", {}, 400), (b'"x"', {}, 400), (b"12", {}, 400), (b"{}", {}, 400),
    (b"\xef\xbb\xbf" + GOOD, {}, 200), (GOOD.replace(b"Hello", b"\xe9"), {}, 400),
    (GOOD, {"content-type": "text/plain"}, 200),
    (GOOD, {"content-type": ""}, 200), (GOOD, {"content-type": "multipart/form-data"}, 200), (b"\x1f\x8b\x08", {}, 400),
    (GOOD, {"content-encoding": "gzip"}, 415), (GOOD[:-1] + b', "max_tokens": 2}', {}, 200), (GOOD + b"x", {}, 400),
    (b"\x00" * 10, {}, 400), (GOOD.decode().encode("utf-16"), {}, 200), (b"--x--", {}, 400),
])
def test_AP_16_unusual_bodies_are_read_or_refused(server, content, headers, status):
    response = server.client.post(COMPLETIONS, content=content, headers=headers)
    if status == 200:
        assert response.status_code == 200 and response.json()["choices"]
    else:
        error_of(response, status)


@pytest.mark.parametrize("content", [
    b"[" * 100_000, b'{"model": "dummy", "prompt": "a", "x": ' + b'{"a": ' * 50_000,
    b'{"model": "dummy", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"model": "dummy", "prompt": "a", "logit_bias": ' + b'{"1": ' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"model": "dummy", "prompt": "a", "stop": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"model": "dummy", "prompt": "a", "stream_options": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"model": ' + b"[" * 900 + b"]" * 900 + b', "prompt": "a"}',
    b'{"model": "dummy", "prompt": "a", "max_tokens": ' + b"1" * 1_000_000 + b"}",
], ids=lambda content: content[:60].decode())
def test_SE_07_nested_and_endless_json_is_refused_quickly(server, content):
    error_of(server.client.post(COMPLETIONS, content=content))
    assert server.client.get("/health").status_code == 200


def test_SE_07_nesting_in_a_chat_is_refused_or_ignored(server):
    for field in ("chat_template_kwargs", "tools", "metadata", "response_format", "messages"):
        content = ('{"model": "dummy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
                   f'"tool_choice": "none", "{field}": ' + '{"a": ' * 950 + "1" + "}" * 950 + "}")
        assert server.client.post(CHAT, content=content).status_code in (200, 400)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_before_it_is_parsed(server, is_chunked):
    content = b'{"model": "dummy", "prompt": "' + b"x" * (9 * 2**20) + b'"}'
    response = server.client.post(COMPLETIONS, content=iter([content]) if is_chunked else content)
    error_of(response, 413)
    ask(server, COMPLETIONS)


def test_a_request_id_is_echoed_or_made(server):
    assert server.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {server.chat().headers["x-request-id"], server.client.get("/nope").headers["x-request-id"]}
    assert len(made) == 2
    for bad in ("a b", "x" * 200, "é".encode()):
        assert server.client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] not in ("", bad)
    assert server.chat(stream=True).headers["x-request-id"]


def test_health_version_and_openapi_answer(server):
    assert server.client.get("/health").content == b""
    assert server.client.get("/version").json() == {"version": "0.1.0"}
    assert CHAT in server.client.get("/openapi.json").json()["paths"]


def test_SE_11_no_error_shows_python_or_paths(server):
    long = "x" * 3000
    errors = [server.client.get("/nope"), server.client.get(CHAT), server.client.post(CHAT, content="{"),
              server.chat(messages=[{}])]
    errors += [server.client.post(COMPLETIONS, content=b"[" * 99999), server.complete("\ud800"),
               server.chat(stream_options=[], stream=True)]
    fields = ("temperature", "n", "stop", "logit_bias", "stream_options", "max_tokens", "model", "messages", "seed",
              "chat_template_kwargs", "top_logprobs", "stream")
    errors += [server.chat(**{field: value}) for field in fields
               for value in ({"a": object.__name__}, [None, {}], long, -5, 1.5)]
    assert len(errors) > 60
    for response in errors:
        if response.status_code == 200:
            continue
        error_of(response, response.status_code)
        assert response.status_code < 500
        for word in ("/usr", "/home", "site-packages", "Traceback", 'File "', "object at", "<class", "vllm_mini.",
                     "Error(", "pydantic"):
            assert word not in response.text


# ---- the key ----


@pytest.fixture(scope="module")
def keyed():
    with serve_in_thread(app_settings={"api_key": "kéy"}) as running:
        yield running


@pytest.mark.parametrize(("headers", "status"), [
    ([], 401), ([b"Bearer "], 401), ([b"Bearer"], 401), ([b""], 401), ([b"Bearer k\xc3\xa9yx"], 401),
    ([b"Bearer k"], 401),
    ([b"Basic k\xc3\xa9y"], 401), ([b"Bearer \xff"], 401), ([b"k\xc3\xa9y"], 401), ([b"Bearer k\xe9y"], 401),
    ([b"Bearer k\xc3\xa9y", b"Bearer x"], 401), ([b"Bearer x", b"Bearer k\xc3\xa9y"], 401),
    ([b"Bearer " + b"x" * 50_000], 401),
    ([b"Bearer k\xc3\xa9y"], 200), ([b"bearer k\xc3\xa9y"], 200), ([b"Bearer   k\xc3\xa9y "], 200),
])
@pytest.mark.parametrize("path", ["/v1/models", "//v1//models/", "/openapi.json"])
def test_SE_01_only_the_key_opens(keyed, path, headers, status):
    answer = keyed.get_raw(path, b"".join(b"Authorization: " + value + b"\r\n" for value in headers))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 401:
        error = loads_strictly(content)["error"]
        assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"


def test_SE_01_health_is_open_and_a_huge_header_is_refused(keyed):
    for path in ("/health", "//health/", "/version"):
        assert keyed.get_raw(path, b"").startswith(b"HTTP/1.1 200 ")
    for headers in (b"Authorization: Bearer " + b"x" * 70_000 + b"\r\n", b"a: b\r\n" * 200):
        assert keyed.get_raw("/v1/models", headers).startswith(b"HTTP/1.1 431 ")
    with contextlib.suppress(ConnectionResetError):  # the answer need not outrun the closing of the connection
        answer = keyed.get_raw("/v1/models", b"Authorization: Bearer " + b"x" * 1_000_000 + b"\r\n")
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert keyed.client.get("/health").status_code == 200


# ---- clients that leave ----


LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 1, "seed": 1}


def count_steps(engine):
    """Watch an engine's steps from now on."""
    steps = []
    original = engine.worker.execute
    engine.worker.execute = lambda output: steps.append(1) or original(output)
    return steps


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 4}])
def test_AB_01_and_06_hanging_up_in_a_stream_frees_everything(server, caplog, reset, fields):
    caplog.set_level(logging.INFO, "vllm_mini.api_server")
    steps = count_steps(server.engine)
    connection = server.connect(CHAT, body_for(CHAT, stream=True, **(LONG | fields)))
    receive_until(connection, b'"content":"')
    hang_up(connection, reset=reset)
    server.wait_drained()
    assert len(steps) < 1500
    wait_until(lambda: any("aborted" in record.getMessage() for record in caplog.records))


def test_AB_06_hanging_up_frees_every_prompt_of_a_batch(server):
    steps = count_steps(server.engine)
    connection = server.connect(COMPLETIONS, body_for(COMPLETIONS, stream=True, prompt=["a", "b"], n=2, **LONG))
    connection.recv(65536)
    hang_up(connection)
    server.wait_drained()
    assert len(steps) < 1500


@pytest.mark.parametrize("stream", [False, True])
def test_AB_02_hanging_up_before_the_first_byte_frees_everything(server, stream):
    steps = count_steps(server.engine)
    connections = [server.connect(CHAT, body_for(CHAT, stream=stream, **LONG)) for _ in range(10)]
    wait_until(lambda: server.engine.scheduler.running)
    for connection in connections:
        hang_up(connection)
    server.wait_drained()
    assert len(steps) < 1500


def test_AB_03_hanging_up_while_queued_leaves_the_queue():
    with serve_in_thread(max_num_seqs=1) as server:
        waiting = server.engine.scheduler.waiting
        steps = count_steps(server.engine)
        first = server.connect(CHAT, body_for(CHAT, **LONG))
        wait_until(lambda: server.engine.scheduler.running)
        connections = []
        for number in range(5):
            connections.append(server.connect(COMPLETIONS, body_for(COMPLETIONS, prompt=f"r{number}")))
            wait_until(lambda number=number: len(waiting) == number + 1)
        for index in (1, 3):
            hang_up(connections[index])
        wait_until(lambda: len(waiting) == 3)
        assert server.engine.scheduler.running  # the first one still runs
        hang_up(first)
        for index in (0, 2, 4):
            assert b'"finish_reason":"length"' in receive_until(connections[index], b'"usage"')
            hang_up(connections[index])
        server.wait_drained()
        assert len(steps) < 1500


def test_AB_08_a_dropped_stream_does_not_disturb_the_next_request(server):
    expected = ask(server, COMPLETIONS)["choices"]
    for _ in range(30):
        connection = server.connect(CHAT, body_for(CHAT, stream=True, **LONG))
        connection.recv(4096)
        hang_up(connection)
        assert ask(server, COMPLETIONS)["choices"] == expected


def test_a_reader_that_stalls_holds_up_nobody(server):
    connection = server.connect(CHAT, body_for(CHAT, stream=True, logprobs=True, top_logprobs=20, **LONG))
    assert ask(server, COMPLETIONS)
    server.wait_drained(timeout=30)  # the answer is computed though nobody reads it
    assert b"data: [DONE]" in receive_until(connection, b"[DONE]")
    hang_up(connection)


def test_a_half_sent_request_holds_up_nobody(server):
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert ask(server, CHAT)


# ---- openai-python ----


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_CC_04_openai_python_reads_chats_whole_and_in_a_stream(client):
    fields = {"model": "dummy", "messages": MESSAGES, "max_completion_tokens": 8, "n": 2, "seed": 1, "logprobs": True,
              "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    ChatCompletion.model_validate_json(whole.model_dump_json(), strict=True)
    assert [len(choice.logprobs.content) for choice in whole.choices] == [8, 8]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    texts = {0: "", 1: ""}
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            ChatCompletionChunk.model_validate_json(chunk.model_dump_json(), strict=True)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert chunk.usage.completion_tokens == 16
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_CC_04_openai_pythons_stream_helper_builds_the_same_answer(client):
    fields = {"model": "dummy", "messages": MESSAGES, "logit_bias": LETTER_A, "stop": "AAAAAAAA"}
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**fields)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop" and final.usage.completion_tokens == 8


def test_CC_04_openai_python_reads_completions_and_models(client):
    fields = {"model": "dummy", "prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2, "temperature": 0}
    whole = client.completions.create(**fields)
    Completion.model_validate_json(whole.model_dump_json(), strict=True)
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-") and len(whole.choices) == 2
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert client.completions.create(**fields, echo=True).choices[0].logprobs.token_logprobs[0] is None  # as OpenAI's
    assert [model.id for model in client.models.list()] == ["dummy"]
    assert client.models.retrieve("dummy").owned_by == "vllm-mini"


@pytest.mark.parametrize(("error", "fields", "code", "param"), [
    (openai.NotFoundError, {"model": "nope"}, "model_not_found", "model"),
    (openai.BadRequestError, {"temperature": 5}, None, "temperature"),
    (openai.BadRequestError, {"max_tokens": 99999}, "context_length_exceeded", "messages"),
    (openai.BadRequestError, {"messages": []}, None, "messages"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_AP_06_openai_python_raises_the_right_error_with_its_message(client, error, fields, code, param, stream):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "dummy", "messages": MESSAGES, "stream": stream, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.body["message"] in str(caught.value) and caught.value.request_id


def test_openai_pythons_other_clients_work(server, keyed):
    async def ask_at_once():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            async def stream(number):
                chunks = await client.chat.completions.create(model="dummy", messages=MESSAGES, max_tokens=9,
                                                              seed=number, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            async def whole(number):
                answer = await client.chat.completions.create(model="dummy", messages=MESSAGES, max_tokens=9,
                                                              seed=number)
                return answer.choices[0].message.content

            return await asyncio.gather(*map(stream, range(8))), await asyncio.gather(*map(whole, range(8)))

    streamed, answered = asyncio.run(ask_at_once())
    assert streamed == answered and len(set(answered)) > 4
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0) as client:  # noqa: SIM117
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


# ---- an engine that fails ----


def test_a_failed_step_is_a_500_before_the_first_token_and_an_error_event_after_it(caplog):
    with serve_in_thread() as server:
        execute = server.engine.worker.execute
        failures = [RuntimeError("secret in /home/x")]
        may_fail = threading.Event()

        def fail_once(output):
            if may_fail.is_set() and failures:
                raise failures.pop()
            return execute(output)

        server.engine.worker.execute = fail_once
        with server.client.stream("POST", CHAT, json=body_for(CHAT, stream=True, **LONG)) as response:
            received = b""
            for part in response.iter_bytes():
                received += part
                may_fail.set()
        *chunks, last = parse_events(received)
        assert chunks and last["error"]["type"] == "internal_error" and "secret" not in str(last)
        failures.append(RuntimeError("again"))
        response = server.chat()
        error = error_of(response, 500)
        assert error["type"] == "internal_error" and response.headers["x-should-retry"] == "false"
        assert server.chat().status_code == server.client.get("/health").status_code == 200
        server.wait_drained()


def test_a_dead_engine_answers_500_and_is_not_healthy(caplog):
    with serve_in_thread() as server:
        def die(output):
            raise SystemExit(1)

        server.engine.worker.execute = die
        assert error_of(server.chat(), 500)["type"] == "internal_error"
        assert error_of(server.client.get("/health"), 503)
        assert error_of(server.chat(stream=True), 500)


# ---- templates and settings of the model ----


def test_TK_03_a_model_without_a_template_chats_only_with_one_given(tmp_path):
    write_checkpoint(tmp_path)
    write_byte_tokenizer(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    template = json.loads(settings_file.read_text())["chat_template"]
    settings = {key: value for key, value in json.loads(settings_file.read_text()).items() if key != "chat_template"}
    settings_file.write_text(json.dumps(settings))
    with serve_in_thread(model=str(tmp_path)) as server:
        error = ask_wrongly(server, CHAT, body_for(CHAT))
        assert error["param"] == "messages" and "--chat-template" in error["message"]
        assert ask(server, COMPLETIONS)
    with serve_in_thread(model=str(tmp_path), chat_template=template) as server:
        rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert ask(server, CHAT)["choices"][0]["message"]["content"] == ask(
            server, COMPLETIONS, prompt=rendered)["choices"][0]["text"]


STRICT_TEMPLATE = """{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}
{% endfor %}{{ messages[0].content.unknown.thing if use_unknown else '' }}{{ 1 // 0 if divide else '' }}"""


def test_TK_04_a_templates_own_words_reach_the_client():
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    with serve_in_thread(chat_template=STRICT_TEMPLATE) as server:
        for messages, words in (([system, user], "no system role here"), ([user, user], "roles must alternate")):
            for stream in (False, True):
                error = ask_wrongly(server, CHAT, body_for(CHAT, messages=messages, stream=stream))
                assert words in error["message"] and error["param"] == "messages"
        for name in ("use_unknown", "divide"):
            assert ask_wrongly(server, CHAT, body_for(CHAT, chat_template_kwargs={name: True}))["param"] == "messages"
        assert ask(server, CHAT)


def test_CF_06_the_models_own_defaults_hold_until_a_request_says_otherwise(tmp_path):
    write_checkpoint(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(
        {"temperature": 1e-6, "top_p": 0.9, "repetition_penalty": 10.0, "max_new_tokens": 7}))
    with serve_in_thread(model=str(tmp_path)) as server:
        def complete(**fields):
            return ask(server, COMPLETIONS, **({"max_tokens": None, "temperature": None, "seed": 1} | fields))

        assert complete()["usage"]["completion_tokens"] == 7
        assert ask(server, CHAT, max_tokens=None)["usage"]["completion_tokens"] == 7
        assert complete(max_tokens=9)["usage"]["completion_tokens"] == 9
        assert join_body(complete()) == join_body(complete(temperature=0, repetition_penalty=10.0))
        plain = complete(temperature=1, top_p=1, repetition_penalty=1, max_tokens=40)
    with serve_in_thread(model=str(tmp_path), generation_config="none") as server:
        assert complete()["usage"]["completion_tokens"] == 16
        assert join_body(complete(temperature=1, max_tokens=40)) == join_body(plain)


def test_a_model_without_a_tokenizer_takes_ids_and_says_so(tmp_path):
    write_checkpoint(tmp_path)
    with serve_in_thread(model=str(tmp_path)) as server:
        body = ask(server, COMPLETIONS, prompt=[1, 2, 3], logprobs=1, echo=True)
        assert body["usage"]["completion_tokens"] == 5 and len(body["choices"][0]["logprobs"]["token_logprobs"]) == 8
        assert "tokenizer" in ask_wrongly(server, COMPLETIONS, body_for(COMPLETIONS))["message"]
        assert "tokenizer" in ask_wrongly(server, CHAT, body_for(CHAT))["message"]


# ---- the real model ----


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    with serve_in_thread(model=str(smollm2_path), dtype="float32", num_kv_blocks=256, max_model_len=1024) as running:
        yield running


def test_a_real_model_answers_a_question_whole_and_in_a_stream(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="-", max_retries=0) as client:
        fields = {"model": "dummy", "messages": messages, "temperature": 0, "max_tokens": 30}
        whole = client.chat.completions.create(**fields).choices[0]
        assert "Paris" in whole.message.content and whole.finish_reason == "stop"
        chunks = list(client.chat.completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_a_real_tokenizers_offsets_and_echo_are_exact(smollm2):
    prompt = "Q: Où est 東京? 😀\n"
    (choice,) = ask(smollm2, COMPLETIONS, prompt=prompt, echo=True, logprobs=2, max_tokens=8)["choices"]
    assert choice["text"].startswith(prompt)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"] and len(tokens) == len(choice["logprobs"]["token_logprobs"])
    assert all(choice["text"][offset:].startswith(token) for token, offset in zip(tokens, offsets))
    assert offsets == sorted(offsets) and choice["logprobs"]["token_logprobs"][0] is None
    chunks = ask_stream(smollm2, COMPLETIONS, prompt=prompt, echo=True, logprobs=2, max_tokens=8)
    assert join_stream(chunks) == join_body({"choices": [choice]})


def test_AP_02_a_real_model_without_a_first_token_refuses_an_empty_prompt(smollm2):
    for prompt in ("", [""], [], [[]], ["a", ""]):
        assert ask_wrongly(smollm2, COMPLETIONS, {"model": "dummy", "prompt": prompt})["param"].startswith("prompt")
    assert ask(smollm2, COMPLETIONS, max_tokens=1)
    smollm2.wait_drained()


# ---- a model that is spoiled ----


@pytest.fixture
def spoiled(server):
    """From the fifth step on, the model's logits are not numbers; afterwards they are again."""
    weight = server.engine.worker.model.model.norm.weight
    good, steps = weight.clone(), []

    def spoil(_: object) -> None:
        steps.append(1)
        if len(steps) == 5:
            weight.fill_(math.nan)

    server.engine.observers.append(spoil)
    yield
    server.engine.observers.remove(spoil)
    weight.copy_(good)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_weights_that_are_no_numbers_give_errors_and_not_tokens(server, spoiled, path):
    with server.client.stream("POST", path, json=body_for(path, stream=True, max_tokens=50)) as response:
        events = response.read().decode()
    assert response.status_code == 200  # it had begun well
    *_, last, done = [line.removeprefix("data: ") for line in events.splitlines() if line]
    assert loads_strictly(last)["error"]["type"] == "internal_error" and done == "[DONE]"
    error = ask_wrongly(server, path, body_for(path), status=500)
    assert error["type"] == "internal_error" and error["message"]
    assert server.client.get("/health").status_code == 200


def test_a_server_whose_weights_are_numbers_again_answers_as_before(server):
    before = ask(server, COMPLETIONS, prompt="Hello again", max_tokens=20)
    weight = server.engine.worker.model.model.norm.weight
    good = weight.clone()
    weight.fill_(math.nan)
    ask_wrongly(server, COMPLETIONS, body_for(COMPLETIONS, prompt="Hello again"), status=500)
    weight.copy_(good)
    assert ask(server, COMPLETIONS, prompt="Hello again", max_tokens=20)["choices"] == before["choices"]
