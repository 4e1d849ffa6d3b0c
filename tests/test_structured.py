"""Structured output: whatever the model would rather say, the answer has the form that was asked for."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pydantic
import pytest
from checkpoints import write_byte_tokenizer, write_scripted_checkpoint
from server import parse_events, serve_in_thread

from vllm_mini import LLM, RequestError, SamplingParams, StructuredOutputsParams, structured
from vllm_mini.sequence import MAX_GRAMMAR_LENGTH
from vllm_mini.structured import GrammarCompiler
from vllm_mini.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


class Person(pydantic.BaseModel):
    """Small enough that even a random model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=6)
    age: int = pydantic.Field(ge=0, le=99)
    mood: Literal["good", "bad"]


SCHEMA = Person.model_json_schema()
AS_PERSON = StructuredOutputsParams(json=SCHEMA)
FORMATS = [
    (AS_PERSON, Person.model_validate_json),
    (StructuredOutputsParams(regex=r"[a-f]{3,9}-\d\d"), lambda text: re.fullmatch(r"[a-f]{3,9}-\d\d", text)[0]),
    (StructuredOutputsParams(choice=["yes", "no", "möglich 😀"]), ["yes", "no", "möglich 😀"].index),
    (StructuredOutputsParams(grammar='start: "(" start ")" | "x"\n'), lambda text: re.fullmatch(r"\(*x\)*", text)[0]),
]
with_each_format = pytest.mark.parametrize(("structure", "check"), FORMATS, ids=["json", "regex", "choice", "grammar"])


def make_llm(**settings):
    return LLM("dummy", **{"dtype": "float32", "num_kv_blocks": 400, "max_model_len": 512, **settings})


def make_params(structure=AS_PERSON, **settings):
    return SamplingParams(**{"temperature": 1, "seed": 5, "max_tokens": 250, "structured_outputs": structure, **settings})


@pytest.fixture(scope="module")
def llm():
    return make_llm()


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(max_model_len=1024) as running:
        yield running
        running.wait_drained()


def choices_of(llm, params, prompt="Hello"):
    (result,) = llm.generate([prompt], params, progress=False)
    return result.outputs


# ---- the engine ----

@with_each_format
@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_an_answer_has_the_form_that_was_asked_for_and_ends_when_it_is_complete(llm, structure, check, temperature):
    for seed in range(4):
        (choice,) = choices_of(llm, make_params(structure, temperature=temperature, seed=seed))
        check(choice.text)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_any_json_object_is_an_object(llm):
    for seed in range(3):
        (choice,) = choices_of(llm, make_params(StructuredOutputsParams(json_object=True), seed=seed, max_tokens=400,
                                                logit_bias={125: 5}))
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.text), dict)
        assert choice.text.startswith("{")


def test_the_n_choices_of_a_request_go_their_own_ways_through_the_grammar(llm):
    choices = choices_of(llm, make_params(n=5, logprobs=3))
    people = [Person.model_validate_json(choice.text) for choice in choices]
    assert len({person.name for person in people}) > 1
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in choices)


def test_a_batch_gives_what_each_request_gives_alone_and_the_others_do_not_notice(llm):
    params = [make_params(FORMATS[index % 4][0], seed=index) if index % 2 else
              SamplingParams(temperature=1, seed=index, max_tokens=30, ignore_eos=True) for index in range(16)]
    prompts = [f"prompt {index % 5}" for index in range(16)]
    together = [result.outputs[0].token_ids for result in llm.generate(prompts, params, progress=False)]
    assert together == [choices_of(llm, one, prompt)[0].token_ids for prompt, one in zip(prompts, params)]
    unconstrained = make_llm().generate(prompts[::2], params[::2], progress=False)
    assert together[::2] == [result.outputs[0].token_ids for result in unconstrained]


@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "num_host_blocks": 64}], ids=["recompute", "swap"])
def test_a_preempted_sequence_goes_on_in_its_grammar(llm, settings):
    params = [make_params(seed=index, n=1 + index % 2, max_tokens=140) for index in range(12)]
    prompts = [f"prompt {index}" for index in range(12)]
    tight = make_llm(num_kv_blocks=40, block_size=4, max_model_len=160, **settings)
    results = tight.generate(prompts, params, progress=False)
    assert tight.engine.scheduler.num_preemptions > 5
    expected = llm.generate(prompts, params, progress=False)
    assert [[choice.token_ids for choice in result.outputs] for result in results] == [
        [choice.token_ids for choice in result.outputs] for result in expected]
    choices = [choice for result in results for choice in result.outputs]
    assert [Person.model_validate_json(choice.text) for choice in choices if choice.finish_reason == "stop"]
    assert {choice.finish_reason for choice in choices} <= {"stop", "length"}


def test_an_answer_that_is_cut_says_so_and_one_that_is_complete_with_its_last_token_does_not(llm):
    (whole,) = choices_of(llm, make_params())
    (cut,) = choices_of(llm, make_params(max_tokens=len(whole.token_ids) - 1))
    (exact,) = choices_of(llm, make_params(max_tokens=len(whole.token_ids)))
    assert (cut.finish_reason, exact.finish_reason, exact.text) == ("length", "stop", whole.text)


def test_an_end_token_comes_only_where_the_grammar_may_end(llm):
    wants_end = {258: 100.0, 256: 100.0}
    (choice,) = choices_of(llm, make_params(StructuredOutputsParams(regex="ab{2,50}"), logit_bias=wants_end))
    assert (choice.text, choice.finish_reason) == ("abb", "stop")


@pytest.mark.parametrize("settings", [{"min_tokens": 30}, {"ignore_eos": True}])
def test_min_tokens_and_ignore_eos_do_not_lead_out_of_the_grammar(llm, settings):
    (choice,) = choices_of(llm, make_params(StructuredOutputsParams(choice=["yes", "no"]), **settings))
    assert choice.text in ("yes", "no") and choice.finish_reason == "stop"


def test_min_tokens_is_kept_where_the_grammar_goes_on(llm):
    wants_end = {258: 100.0, 256: 100.0}
    (choice,) = choices_of(llm, make_params(StructuredOutputsParams(regex="b+"), min_tokens=7, logit_bias=wants_end))
    assert choice.text == "b" * 7


def test_a_stop_string_ends_a_structured_answer_too(llm):
    (choice,) = choices_of(llm, make_params(StructuredOutputsParams(regex="ab{9}"), stop=["bbb"]))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a", "stop", "bbb")


def test_logprobs_are_those_among_what_was_allowed(llm):
    (choice,) = choices_of(llm, make_params(StructuredOutputsParams(choice=["x1", "x2"]), logprobs=5, temperature=0))
    first, second = choice.logprobs
    assert first.logprob == 0 and first.top == ((ord("x"), 0.0),)
    assert {token_id for token_id, _ in second.top} == {ord("1"), ord("2")}


def test_a_model_without_an_end_token_ends_with_its_grammar():
    compiler = GrammarCompiler(Tokenizer.from_model(None), vocab_size=256, eos_token_ids=())
    constraint = compiler.compile(StructuredOutputsParams(regex="ab?c"))
    for char in b"abc":
        assert constraint.allowed_tokens[char // 8] >> char % 8 & 1 and not constraint.is_complete
        constraint.accept(char)
    assert constraint.is_complete


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_only(llm):
    too_complex = make_params(StructuredOutputsParams(regex="x(a{1000}){1000}"))
    bad, good = llm.generate(["a", "b"], [too_complex, SamplingParams(max_tokens=5, ignore_eos=True)], progress=False)
    assert bad.outputs[0].finish_reason == "error" and good.outputs[0].finish_reason == "length"
    assert not llm.engine.has_unfinished() and llm.engine.scheduler.block_manager.num_used_blocks == 0


# ---- what is refused ----

@pytest.mark.parametrize("fields", [
    {}, {"regex": "a", "choice": ["b"]}, {"json": "no schema"}, {"json": "[]"}, {"json": {"a": float("nan")}},
    {"json": {"a": {1, 2}}}, {"regex": 5}, {"grammar": ["a"]}, {"choice": []}, {"choice": "ab"}, {"choice": ["a", ""]},
    {"choice": ["a", 5]}, {"json_object": 1}, {"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)},
    {"choice": ["a" * 1000] * 66}, {"json": {"const": "a" * MAX_GRAMMAR_LENGTH}},
], ids=lambda fields: str(fields)[:40])
def test_a_malformed_structure_is_refused_by_name(fields):
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param.startswith("structured_outputs") and caught.value.param in str(caught.value)


def test_SE_07_a_structure_nested_beyond_reason_is_refused():
    schema: Any = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(RequestError):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("fields", [
    {"regex": "("}, {"regex": "(?=a)b"}, {"grammar": "start: (("}, {"grammar": "begin: 'a'"}, {"json": {"type": "wrong"}},
    {"json": {"type": "integer", "minimum": 5, "maximum": 3}}, {"json": {"enum": []}}, {"json": {"not": {}}},
    {"json": {"$ref": "http://127.0.0.1:9/schema"}}, {"json": {"$ref": "#/$defs/none"}}, {"regex": ")"},
    {"json": {"type": "string", "pattern": "("}}, {"json": '{"items":' * 900 + "{}" + "}" * 900},
], ids=lambda fields: str(fields)[:40])
def test_SE_11_what_cannot_be_compiled_is_refused_in_plain_words_and_soon(llm, fields):
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        choices_of(llm, make_params(StructuredOutputsParams(**fields)))
    assert caught.value.param == "structured_outputs"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert not re.search("panic|backtrace|Traceback|site-packages|/usr|/home|non-verbose", str(caught.value))
    assert time.monotonic() - start < 5  # a loaded machine; alone it takes a tenth of a second
    assert not llm.engine.has_unfinished()


def test_the_largest_schema_that_is_accepted_compiles_in_seconds(llm):
    fields = {f"key{index}": {"type": "string"} for index in range(2000)}
    start = time.monotonic()
    llm.engine.prepare(make_params(StructuredOutputsParams(json={"type": "object", "properties": fields})))
    assert time.monotonic() - start < 20


def test_without_llguidance_it_is_refused_and_says_how_to_install_it(llm, monkeypatch):
    monkeypatch.setattr(structured, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install .*\[structured\]"):
        llm.engine.prepare(make_params())


def test_a_model_without_a_tokenizer_refuses_it():
    compiler = GrammarCompiler(None, vocab_size=64, eos_token_ids=[1])
    with pytest.raises(RequestError, match="no tokenizer"):
        compiler.compile(AS_PERSON)


# ---- allowed_token_ids and bad_words ----

def test_only_allowed_tokens_are_drawn(llm):
    params = SamplingParams(temperature=2, seed=1, max_tokens=60, allowed_token_ids=[65, 66, 67], logprobs=5)
    (choice,) = choices_of(llm, params)
    assert set(choice.token_ids) == {65, 66, 67} and choice.finish_reason == "length"
    assert all({token_id for token_id, _ in entry.top} == {65, 66, 67} for entry in choice.logprobs)


def test_an_end_token_among_the_allowed_ones_ends_the_answer_but_not_before_min_tokens(llm):
    (choice,) = choices_of(llm, SamplingParams(temperature=1, seed=1, max_tokens=60, min_tokens=5,
                                               allowed_token_ids=[65, 258], logit_bias={258: 100}))
    assert choice.token_ids == [65] * 5 + [258] and choice.finish_reason == "stop"


@pytest.mark.parametrize("settings", [{"min_tokens": 5, "allowed_token_ids": [258]},
                                      {"bad_words": ["A"], "allowed_token_ids": [65]}])
def test_a_ban_on_everything_that_is_allowed_is_not_kept(llm, settings):
    (choice,) = choices_of(llm, SamplingParams(max_tokens=6, **settings))
    assert choice.finish_reason in ("stop", "length") and set(choice.token_ids) <= {65, 258}


@pytest.mark.parametrize(("ids", "message"), [
    ([], "at least one"), ([259], "vocabulary"), ([-1], "at least 0"), ([1.5], "integer"), ("abc", "list"),
    ([True], "integer")])
def test_wrong_allowed_token_ids_are_refused(llm, ids, message):
    with pytest.raises(RequestError, match=message) as caught:
        choices_of(llm, SamplingParams(allowed_token_ids=ids))
    assert caught.value.param == "allowed_token_ids"


def test_allowed_token_ids_and_a_grammar_contradict_each_other():
    with pytest.raises(RequestError, match="cannot be combined"):
        make_params(allowed_token_ids=[1])


def test_bad_words_are_never_completed(tmp_path):
    """A scripted model writes its alphabet; the third letter of "CDE" is forbidden after the first two, but only there."""
    write_scripted_checkpoint(tmp_path, {ord("Z"): ord("A")}, vocab_size=259, hidden_size=264,
                              eos_token_id=258)
    write_byte_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_kv_blocks=64, max_model_len=128)
    (plain,) = choices_of(llm, SamplingParams(temperature=0, max_tokens=6), "A")
    (banned,) = choices_of(llm, SamplingParams(temperature=0, max_tokens=4, bad_words=["CDE"]), "A")
    assert plain.text == "BCDEFG" and banned.text[:3] == "BCD" and banned.text[3] != "E"
    (later,) = choices_of(llm, SamplingParams(temperature=0, max_tokens=4, bad_words=["CDE", "C"]), "D")
    assert later.text == "EFGH"


@pytest.mark.parametrize("words", [[""], [5], ["a"] * 129, ["a" * 129], {"a": 1}])
def test_wrong_bad_words_are_refused(words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(bad_words=words)
    assert caught.value.param == "bad_words"


# ---- the server ----

def post(server, path, status=200, **fields):
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    response = server.post(path, {"model": "dummy", **start, "max_tokens": 300, "seed": 3, **fields})
    assert response.status_code == status, response.text
    return response


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{"response_format": response_format(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}},
                                    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}])
def test_both_endpoints_answer_in_json_whole_and_in_a_stream(server, path, fields):
    body = post(server, path, n=2, logprobs=True if path == CHAT else 1, **fields).json()
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in body["choices"]]
    assert [Person.model_validate_json(text) for text in texts]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    streamed = ["", ""]
    for chunk in parse_events(post(server, path, n=2, stream=True, **fields).content):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
    assert streamed == texts


def test_the_last_token_of_a_complete_answer_has_its_text_and_offset(server):
    (choice,) = post(server, COMPLETIONS, structured_outputs={"choice": ["abc"]}, logprobs=0).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"] and choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"), ({"response_format": response_format({"type": "wrong"})},
                                                        "response_format"),
    ({"response_format": response_format({"const": "a" * MAX_GRAMMAR_LENGTH})}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"), ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": []}, "structured_outputs"), ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs.ebnf"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
    ({"response_format": response_format({"const": "\ud800"})}, "response_format"),
])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_wrong_structure_is_a_400_that_names_its_field(server, fields, param, is_streamed):
    for path in (CHAT, COMPLETIONS):
        error = post(server, path, 400, stream=is_streamed, **fields).json()["error"]
        assert error["param"] == param and param in error["message"]
        assert error["type"] == "invalid_request_error"


def test_ninety_constrained_and_free_requests_at_once_are_all_right(server):
    def ask(index):
        fields = {"structured_outputs": {"json": SCHEMA}} if index % 3 else {"ignore_eos": True, "max_tokens": 20}
        if index % 10 == 9:
            return post(server, CHAT, 400, structured_outputs={"regex": "("})
        text = post(server, CHAT, **{**fields, "seed": index}).json()["choices"][0]["message"]["content"]
        return Person.model_validate_json(text) if index % 3 else text

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(ask, range(90)))
    server.wait_drained()
    assert server.client.get("/health").status_code == 200


# ---- the real model, through OpenAI's client ----

@pytest.fixture(scope="module")
def client(smollm2_path):
    with (serve_in_thread(model=str(smollm2_path), dtype="float32", num_kv_blocks=256, max_model_len=1024) as running,
          openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client):
        yield client
        running.wait_drained()


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=30)
    country: str = pydantic.Field(max_length=30)
    population_in_thousands: int = pydantic.Field(ge=1, le=99_999)


QUESTION = [{"role": "user", "content": "Describe Paris as JSON."}]


@pytest.mark.parametrize("temperature", [0, 1])
def test_openais_parse_gives_a_pydantic_object(client, temperature):
    completion = client.chat.completions.parse(model="dummy", messages=QUESTION, response_format=City, seed=1,
                                               temperature=temperature, max_tokens=200)
    assert isinstance(completion.choices[0].message.parsed, City)
    assert completion.choices[0].finish_reason == "stop"


def test_openais_stream_helper_parses_while_it_reads(client):
    with client.chat.completions.stream(model="dummy", messages=QUESTION, response_format=City, temperature=0,
                                        max_tokens=200) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    assert isinstance(final.choices[0].message.parsed, City)


def test_the_real_model_fills_a_choice_a_regex_and_any_object(client):
    def ask(**fields):
        answer = client.chat.completions.create(model="dummy", messages=QUESTION, temperature=0, max_tokens=200,
                                                extra_body=fields)
        return answer.choices[0].message.content

    assert ask(structured_outputs={"choice": ["Paris is big", "Paris is small"]}) in ("Paris is big", "Paris is small")
    assert re.fullmatch(r"\d{4}-\d\d", ask(structured_outputs={"regex": r"\d{4}-\d\d"}))
    assert ask(response_format={"type": "json_object"}).startswith("{")


def test_what_a_sentencepiece_tokenizer_adds_to_a_text_does_not_lead_out_of_the_grammar():
    """Its ids for a forced text would begin with a space: others are found, whose bytes are the text's."""
    class Spaced:
        hidden_ids = frozenset()

        def token_bytes(self, token_id):
            return [b"a", b"ab", b" a", b"b", b"c"][token_id]

        def encode(self, text, *, add_special_tokens):
            return [2]

    tokens = structured._Tokens(Spaced(), 5, [4])
    assert tokens("ab") == [1] and tokens("aab") == [0, 1] and tokens(" a") == [2]
