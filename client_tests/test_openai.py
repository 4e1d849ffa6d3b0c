"""The official SDK: every object validated, streams accumulated, errors in their classes, retries counted."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from conftest import KEY, MODEL
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True) as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **{"temperature": 0, "max_tokens": 12, **options})


def test_a_chat_and_its_stream_say_the_same(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"})


def test_the_stream_helper_accumulates_choices_and_logprobs(client):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=1, seed=1, n=2, logprobs=True,
                                        top_logprobs=2, max_tokens=8) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot  # the final one is refused by the SDK where a length limit cut it
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert len(final.choices) == 2 and all(len(choice.logprobs.content) == 8 for choice in final.choices)


class City(BaseModel):
    name: str
    inhabitants: int


def test_parse_gives_an_object_of_the_schema(client):
    parsed = client.chat.completions.parse(model=MODEL, messages=[{"role": "user", "content": "Describe Paris as JSON."}],
                                           response_format=City, temperature=0, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_json_object_is_json(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=200)
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(answer.choices[0].message.content), dict)


def test_completions_of_every_prompt_form(server):
    client = OpenAI(base_url=f"{server}/v1", api_key=KEY)  # not strict: the first null of an echo is not in the SDK's types
    for prompt, count in (("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=2, logprobs=1, echo=True)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


@pytest.mark.parametrize(("options", "error", "code"), [
    ({"temperature": 9}, openai.BadRequestError, None), ({"model": "nope"}, openai.NotFoundError, "model_not_found"),
    ({"max_tokens": 100000}, openai.BadRequestError, "context_length_exceeded"),
    ({"stream": True, "n": 1000}, openai.BadRequestError, None),
])
def test_mistakes_have_their_class_and_code(client, options, error, code):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **options})
    assert caught.value.code == code and caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(server):
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{server}/v1", api_key="x").models.list()


def test_many_at_once_with_the_async_client(server):
    async def run():
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key=KEY) as client:
            async def one(index):
                stream = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"Count to {index}."}], stream=True, temperature=0,
                    max_tokens=10)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            together = await asyncio.gather(*map(one, range(12)))
            assert together[5] == await one(5)
    asyncio.run(run())


def test_a_stream_that_is_closed_early_leaves_the_server_well(client):
    for _ in range(3):
        stream = ask(client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    assert ask(client, max_tokens=2).usage.completion_tokens == 2
