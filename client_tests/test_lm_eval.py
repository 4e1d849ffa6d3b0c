"""lm-evaluation-harness over HTTP, with the server's own tokenizer, on a task in a local file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import KEY, MODEL

CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
            ("England", "London"), ("Greece", "Athens"), ("Egypt", "Cairo")]


@pytest.fixture
def evaluate(server, tmp_path):
    (tmp_path / "capitals.jsonl").write_text("".join(
        json.dumps({"country": country, "capital": capital, "choices": [f" {other}" for _, other in CAPITALS],
                    "label": index}) + "\n" for index, (country, capital) in enumerate(CAPITALS)))
    common = ("dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: " + str(tmp_path / "capitals.jsonl")
              + "\ntest_split: test\n")
    (tmp_path / "choose.yaml").write_text(
        "task: choose\noutput_type: multiple_choice\n" + common
        + "doc_to_text: \"The capital of {{country}} is\"\ndoc_to_choice: choices\ndoc_to_target: label\n"
        "target_delimiter: \"\"\nmetric_list:\n  - metric: acc\n")
    (tmp_path / "write.yaml").write_text(
        "task: write\noutput_type: generate_until\n" + common
        + "doc_to_text: \"What is the capital of {{country}}?\"\ndoc_to_target: capital\n"
        "generation_kwargs:\n  max_gen_toks: 16\n  until: [\"\\n\"]\n"
        "metric_list:\n  - metric: exact_match\n")

    def run(model, path, task, *arguments):
        results = tmp_path / "results"
        command = [sys.executable, "-m", "lm_eval", "--model", model, "--tasks", task, "--include_path", str(tmp_path),
                   "--model_args", f"model={MODEL},base_url={server}{path},tokenizer_backend=remote,"
                   f"auth_token={KEY},num_concurrent=4",
                   "--output_path", str(results), "--batch_size", "4", *arguments]
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                       "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        (file,) = results.rglob("results_*.json")
        return json.loads(file.read_text())["results"][task]
    return run


def test_log_likelihoods_of_choices(evaluate):
    result = evaluate("local-completions", "/v1/completions", "choose")
    assert result["acc,none"] >= 0.75


def test_chat_generation(evaluate):
    result = evaluate("local-chat-completions", "/v1/chat/completions", "write", "--apply_chat_template")
    assert 0 <= result["exact_match,none"] <= 1
