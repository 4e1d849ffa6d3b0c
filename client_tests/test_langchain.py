"""langchain-openai: invoke, stream, batch, structured output."""

from __future__ import annotations

import pytest
from conftest import KEY, MODEL
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@pytest.fixture(scope="module")
def chat(server):
    return ChatOpenAI(base_url=f"{server}/v1", api_key=KEY, model=MODEL, temperature=0, max_completion_tokens=12)


def test_invoke_and_stream_say_the_same(chat):
    message = chat.invoke("Name a colour.")
    assert message.usage_metadata["output_tokens"] <= 12 and message.response_metadata["finish_reason"] in ("stop", "length")
    chunks = list(chat.stream("Name a colour.", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == message.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == message.usage_metadata[
        "output_tokens"]


def test_content_parts_and_batches(chat):
    parts = [("human", [{"type": "text", "text": "Name a colour."}])]
    one, other = chat.batch([parts, parts])
    assert one.content == other.content == chat.invoke("Name a colour.").content


class Answer(BaseModel):
    colour: str


def test_structured_output(server):
    chat = ChatOpenAI(base_url=f"{server}/v1", api_key=KEY, model=MODEL, temperature=0, max_completion_tokens=200)
    assert isinstance(chat.with_structured_output(Answer, method="json_schema").invoke("Name a colour."), Answer)
