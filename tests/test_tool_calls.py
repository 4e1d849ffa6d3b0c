"""Function calls: asked for in a template's format, enforced by masks, found in text, streamed as OpenAI's clients do it."""

from __future__ import annotations

import json
import random

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server import parse_events, serve_in_thread

from vllm_mini.sequence import MAX_GRAMMAR_LENGTH, RequestError, StructuredOutputsParams
from vllm_mini.tool_calls import FORMATS, ToolCallParser, Tools, check_tools, join_deltas, tool_format

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
# As in Qwen2.5's and Hermes' files, and in Llama 3.1's; cut down to what is about tools.
HERMES = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- "# Tools\n\nYou may call one or more functions.\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within " }}
    {{- "<tool_call></tool_call> XML tags:\n" }}
    {{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name }}
        {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA = r"""{%- if tools is not none %}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}{{- t | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""
XML = r"""{{ 'If you call, reply:\n<tool_call>\n<function=example_function_name>\n<parameter=x>\n1\n</parameter>' }}"""


class Weather(pydantic.BaseModel):
    """The arguments that get_weather takes."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(max_length=8)
    days: int = pydantic.Field(ge=1, le=9)


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather", "parameters": Weather.model_json_schema()}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED_NOW = {"type": "function", "function": {"name": "now"}}
HERMES_FORMAT, LLAMA_FORMAT = FORMATS
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "}<\\"{", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "}<\\"{", "days": 2}'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "}<\\"{", "days": 2}}'


def make_tools(tool_format=HERMES_FORMAT, **settings):
    return Tools([WEATHER, NOW], tool_format, **settings)


def parse(text, tools=None, pieces=None):
    """The message that a text makes, fed in pieces."""
    parser = ToolCallParser(tools or make_tools())
    pieces = [text] if pieces is None else pieces
    deltas = [delta for index, piece in enumerate(pieces)
              for delta in parser.feed(piece, is_last=index == len(pieces) - 1)]
    message = join_deltas(deltas)
    return message.get("content"), [tuple(call["function"].values()) for call in message.get("tool_calls", ())]


# ---- formats ----

@pytest.mark.parametrize(("template", "expected"), [
    (HERMES, HERMES_FORMAT), (LLAMA, LLAMA_FORMAT), (XML, None), (None, None), ("{{ messages }}", None),
    (HERMES.replace(r"\"name\": <function-name>, \"arguments\": <args-json-object>",
                    r"\"arguments\": <args-dict>, \"name\": <function-name>"), HERMES_FORMAT),
    ('<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>', HERMES_FORMAT),
])
def test_the_format_is_read_from_the_words_of_the_template(template, expected):
    assert tool_format(template) is expected


# ---- parsing ----

PARSED = [
    ("Just text.", "Just text.", []),
    ("  spaces stay \n", "  spaces stay \n", []),
    ("", None, []),
    (CALL, None, [("get_weather", ARGUMENTS)]),
    (f"Let me see.\n\n{CALL}\n", "Let me see.", [("get_weather", ARGUMENTS)]),
    (f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>', None,
     [("get_weather", ARGUMENTS), ("now", "{}")]),
    (f"{CALL} And more.", " And more.", [("get_weather", ARGUMENTS)]),
    ('<tool_call>{"arguments": {"a": [1, 2]}, "name": "now"}</tool_call>', None, [("now", '{"a": [1, 2]}')]),
    ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', None, [("now", "{}")]),
    ('<tool_call>{"name": "not_offered", "arguments": {}}</tool_call>', None, [("not_offered", "{}")]),
    ("<tool_call>what?</tool_call> ok", "<tool_call>what?</tool_call> ok", []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ("<tool_cal", "<tool_cal", []),
    ("a < b <tool", "a < b <tool", []),
    ('<tool_call>\n{"name": "now", "argu', '<tool_call>\n{"name": "now", "argu', []),
    ('<tool_call>\n{"name": "now", "arguments": {"a": "b', None, [("now", '{"a": "b')]),
    ('<tool_call>\n{"name": "now", "arguments": {}', None, [("now", "{}")]),
    ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool', None, [("now", "{}")]),
]
LLAMA_PARSED = [
    ("Just text.", "Just text.", []),
    (LLAMA_CALL, None, [("get_weather", ARGUMENTS)]),
    (f'\n{LLAMA_CALL}; {{"name": "now", "parameters": {{}}}}', None, [("get_weather", ARGUMENTS), ("now", "{}")]),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    (f'{{"answer": "{"long " * 100}"}}', f'{{"answer": "{"long " * 100}"}}', []),
    ('{"parameters": {}, "name": "now"}', None, [("now", "{}")]),
    (f"See: {LLAMA_CALL}", f"See: {LLAMA_CALL}", []),
    ("  ", "  ", []),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), [
    *((make_tools(), *case) for case in PARSED), *((make_tools(LLAMA_FORMAT), *case) for case in LLAMA_PARSED)])
def test_a_text_is_parted_alike_however_it_is_cut_into_pieces(tools, text, content, calls):
    assert parse(text, tools) == (content, calls)
    assert parse(text, tools, [*text, ""]) == (content, calls)
    rng = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        assert parse(text, tools, pieces) == (content, calls)


def test_arguments_are_passed_on_as_they_come():
    parser = ToolCallParser(make_tools())
    assert parser.feed('<tool_call>\n{"name": "now", "arguments": {"a"')[1:] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}]
    assert parser.feed(': "x') == [{"tool_calls": [{"index": 0, "function": {"arguments": ': "x'}}]}]


def test_without_parallel_calls_only_the_first_is_kept():
    assert parse(f"{CALL}\n{CALL}", make_tools(parallel=False)) == (None, [("get_weather", ARGUMENTS)])


# ---- what is refused ----

@pytest.mark.parametrize(("tools", "tool_choice", "param"), [
    ({"a": 1}, None, "tools"), ("tools", None, "tools"), ([NOW] * 129, None, "tools"), ([5], None, "tools[0]"),
    ([NOW, {"type": "code"}], None, "tools[1]"), ([{"type": "function"}], None, "tools[0].function"),
    ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "x" * 65}}], None, "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "a", "description": 5}}], None, "tools[0].function.description"),
    ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
    ([NOW], "always", "tool_choice"), ([NOW], {"type": "function"}, "tool_choice"), ([NOW], 5, "tool_choice"),
    ([NOW], {"type": "function", "function": {}}, "tool_choice.function"),
    ([NOW], {"type": "function", "function": {"name": "then"}}, "tool_choice.function.name"),
    (None, "required", "tool_choice"), ([], NAMED_NOW, "tool_choice"),
])
def test_malformed_tools_are_refused_with_the_path_to_the_fault(tools, tool_choice, param):
    with pytest.raises(RequestError) as caught:
        check_tools(tools, tool_choice, None)
    assert caught.value.param == param and str(caught.value).startswith(param)


def test_parallel_tool_calls_must_be_true_or_false():
    with pytest.raises(RequestError, match="parallel_tool_calls"):
        check_tools([NOW], None, "no")


def test_schemas_beyond_the_limit_are_refused_where_they_would_be_enforced():
    large = {"type": "function", "function": {"name": "f", "parameters": {"const": "a" * MAX_GRAMMAR_LENGTH}}}
    assert Tools([large], HERMES_FORMAT).structure(None) is None
    with pytest.raises(RequestError, match=str(MAX_GRAMMAR_LENGTH)) as caught:
        Tools([large], HERMES_FORMAT, "required").structure(None)
    assert caught.value.param == "tools"


# ---- the server ----

@pytest.fixture(scope="module")
def hermes():
    with serve_in_thread(chat_template=HERMES, max_model_len=2048) as running:
        yield running
        running.wait_drained()


@pytest.fixture(scope="module")
def llama():
    with serve_in_thread(chat_template=LLAMA, max_model_len=2048) as running:
        yield running
        running.wait_drained()


@pytest.fixture(scope="module")
def plain():
    with serve_in_thread() as running:
        yield running
        running.wait_drained()


@pytest.fixture(params=["hermes", "llama"])
def server(request):
    return request.getfixturevalue(request.param)


def post(server, status=200, **fields):
    response = server.post(CHAT, {"model": "dummy", "messages": MESSAGES, "max_tokens": 500, "temperature": 1, "seed": 4,
                                  "tools": [WEATHER, NOW], **fields})
    assert response.status_code == status, response.text
    return response


def say(text):
    """What makes the random model say just this."""
    return {"structured_outputs": {"choice": [text]}}


def check_calls(message):
    for call in message["tool_calls"]:
        assert call["id"].startswith("call_") and call["type"] == "function"
        arguments = call["function"]["arguments"]
        if call["function"]["name"] == "now":
            assert json.loads(arguments) == {}
        else:
            assert call["function"]["name"] == "get_weather" and Weather.model_validate_json(arguments)


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_has_the_format_and_arguments_of_its_function(server, seed):
    (choice,) = post(server, tool_choice="required", parallel_tool_calls=False, seed=seed).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1
    check_calls(choice["message"])


def test_a_named_function_is_the_one_that_is_called(server):
    for choice in post(server, tool_choice=NAMED_NOW, n=4).json()["choices"]:
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
        check_calls(choice["message"])


def test_several_calls_may_be_required_at_once(hermes):
    body = post(hermes, tool_choice="required", tools=[NOW], logit_bias={"10": 50, "258": -100, "256": -100}, max_tokens=400)
    (choice,) = body.json()["choices"]
    assert len(choice["message"]["tool_calls"]) > 1
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == len(choice["message"]["tool_calls"])


def test_what_is_said_before_a_call_is_content(hermes):
    (choice,) = post(hermes, **say(f"Let me look.\n{CALL}")).json()["choices"]
    assert choice["message"]["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}


def test_an_answer_without_a_call_is_an_ordinary_one(hermes):
    (choice,) = post(hermes, **say("It is sunny.")).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_tool_choice_none_leaves_tools_out_of_prompt_and_answer(hermes):
    body = post(hermes, tool_choice="none", **say(CALL)).json()
    assert body["choices"][0]["message"]["content"] == CALL and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == post(hermes, tools=None, **say("x")).json()["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] < post(hermes, **say("x")).json()["usage"]["prompt_tokens"]


def test_a_call_that_is_cut_ends_with_length(hermes):
    (choice,) = post(hermes, tool_choice="required", max_tokens=60, tools=[WEATHER]).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("fields", [
    {"tool_choice": "required"}, {"tool_choice": NAMED_NOW, "n": 2}, say(f"Well. {CALL}\n{CALL} Bye."), say("No call."),
    {"tool_choice": "required", "max_tokens": 70, "tools": [WEATHER]}, {**say(f"a{CALL}"), "stop": ["days"]},
    {**say(f"a {CALL}"), "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
], ids=lambda fields: str(fields)[:50])
def test_SS_02_a_stream_joins_to_what_the_whole_answer_says_and_its_content_is_never_null(hermes, fields):
    whole = post(hermes, **fields).json()
    chunks = parse_events(post(hermes, stream=True, stream_options={"include_usage": True}, **fields).content)
    assert all(isinstance(part["delta"].get("content", ""), str) for chunk in chunks for part in chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        joined = join_deltas([part["delta"] for part in parts])
        assert (joined.get("content") or None) == choice["message"]["content"]
        for ours, theirs in zip(joined.get("tool_calls", []), choice["message"].get("tool_calls", []), strict=True):
            assert ours["function"] == theirs["function"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        for part in parts:
            for call in part["delta"].get("tool_calls", ()):
                assert isinstance(call["index"], int) and ("id" in call) == ("name" in call["function"])
        if choice["logprobs"]:
            content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]
            assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]


def test_tools_and_a_response_format_give_a_call_or_json_but_no_other_text(hermes):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": Weather.model_json_schema()}}
    seen = set()
    for seed in range(12):
        message = post(hermes, response_format=schema, seed=seed).json()["choices"][0]["message"]
        seen.add("tool_calls" in message)
        if "tool_calls" in message:
            check_calls(message)
        else:
            Weather.model_validate_json(message["content"])
    assert seen == {True, False}


def test_a_template_without_a_format_for_tools_refuses_them_and_says_so(plain):
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        error = post(plain, 400, **fields).json()["error"]
        assert error["param"] == "tools" and "chat template" in error["message"]
    assert post(plain, tool_choice="none", max_tokens=3)


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}],
      "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required", "allowed_token_ids": [65]}, "allowed_token_ids"),
])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_wrong_tools_are_a_400_that_names_them(hermes, fields, param, is_streamed):
    error = post(hermes, 400, stream=is_streamed, **fields).json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error") and param in error["message"]


def test_TK_05_a_tool_flow_is_rendered_and_null_never_becomes_text(hermes):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    response = hermes.post("/v1/chat/completions/render", {"model": "dummy", "messages": messages, "tools": [WEATHER]})
    prompt = response.json()["prompt"]
    assert '"arguments": {"city": "Paris"}' in prompt and "<|im_start|>tool\nsunny" in prompt
    assert "None" not in prompt and '"name": "get_weather", "description"' in prompt


def test_AP_14_parallel_tool_calls_without_tools_is_ignored(plain):
    assert post(plain, tools=None, parallel_tool_calls=True, max_tokens=2)


# ---- the real model with a template for tools, through OpenAI's client ----

@pytest.fixture(scope="module")
def client(smollm2_path):
    settings = {"dtype": "float32", "num_kv_blocks": 256, "max_model_len": 1024, "chat_template": HERMES}
    with (serve_in_thread(model=str(smollm2_path), **settings) as running,
          openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client):
        yield client
        running.wait_drained()


def test_CC_04_openais_client_reads_calls_whole_and_streamed(client):
    settings = {"model": "dummy", "messages": MESSAGES, "tools": [WEATHER, NOW], "tool_choice": "required",
                "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}
    completion = client.chat.completions.create(**settings)
    ChatCompletion.model_validate_json(completion.model_dump_json(), strict=True)
    whole = completion.choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    with client.chat.completions.stream(**settings) as stream:
        for event in stream:
            if event.type == "chunk":
                ChatCompletionChunk.model_validate_json(event.chunk.model_dump_json(), strict=True)
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.name == call.function.name
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"


def test_openais_parse_gives_the_arguments_as_a_pydantic_object(client):
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    completion = client.chat.completions.parse(
        model="dummy", messages=MESSAGES, tools=[tool], temperature=0, max_tokens=200,
        tool_choice={"type": "function", "function": {"name": "get_weather"}})
    (call,) = completion.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_an_answer_in_another_form_than_json_is_left_alone_when_a_call_may_replace_it():
    structure = StructuredOutputsParams(regex="a+")
    assert make_tools().structure(structure) is structure
