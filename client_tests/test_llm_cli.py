"""simonw's `llm`, used as a person uses it: in a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import KEY, MODEL


@pytest.fixture
def llm(server, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mini\n  model_name: {MODEL}\n  api_base: {server}/v1\n  api_key_name: mini\n  supports_schema: true\n"
        f"- model_id: mini-text\n  model_name: {MODEL}\n  api_base: {server}/v1\n  api_key_name: mini\n  completion: true\n")

    def run(*arguments):
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        command = [str(Path(sys.executable).parent / "llm"), *arguments, "--key", KEY]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return result.stdout
    return run


def test_streamed_and_whole(llm):
    options = ["-m", "mini", "-o", "temperature", "0", "-o", "max_tokens", "12", "Name a colour."]
    assert llm(*options).strip() == llm(*options, "--no-stream").strip() != ""


def test_a_completion_model(llm):
    assert llm("-m", "mini-text", "-o", "temperature", "0", "-o", "max_tokens", "5", "One, two, three,").strip()


def test_a_schema(llm):
    schema = {"type": "object", "additionalProperties": False, "required": ["name", "age"], "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}}
    answer = llm("-m", "mini", "--schema", json.dumps(schema), "-o", "temperature", "0", "-o", "max_tokens", "200", "A dog.")
    assert set(json.loads(answer)) == {"name", "age"}
