"""LiteLLM: the hosted_vllm provider, streams, and its own class for a prompt that is too long."""

from __future__ import annotations

import litellm
import pytest
from conftest import KEY, MODEL


@pytest.fixture
def ask(server):
    def ask(text, **options):
        return litellm.completion(model=f"hosted_vllm/{MODEL}", api_base=f"{server}/v1", api_key=KEY, temperature=0,
                                  messages=[{"role": "user", "content": text}], **{"max_tokens": 12, **options})
    return ask


def test_an_answer_and_its_stream(ask):
    whole = ask("Name a colour.")
    parts = [chunk.choices[0].delta.content or "" for chunk in ask("Name a colour.", stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12


def test_a_prompt_that_is_too_long_has_its_own_class(ask):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask("word " * 9000, num_retries=0)
