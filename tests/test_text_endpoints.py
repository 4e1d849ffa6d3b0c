"""Tokenizing and rendering from afar, as evaluation tools do it; and what browsers and probes ask beside the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jinja2 import Environment

from tests.checkpoints import write_checkpoint
from tests.server import Server, serve_in_thread

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 👋"}]
ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_in_thread() as running:
        yield running


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Server]:
    with serve_in_thread(model=str(smollm2_path), num_kv_blocks=64, max_model_len=512) as running:
        yield running


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    return error["message"]


def test_texts_go_to_ids_and_back(server: Server) -> None:
    for text in ("Hello", "Hé 👋\n", ""):
        found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == server.engine.max_model_len
        assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"model": "dummy", "prompt": "Hello"}).json()["token_strs"] is None


def test_a_chats_ids_are_those_that_it_is_answered_with(server: Server, smollm2: Server) -> None:
    for one in (server, smollm2):
        rendered = one.post(f"{CHAT}/render", {"model": "dummy", "messages": MESSAGES}).json()
        ids = one.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
        answer = one.chat(messages=MESSAGES, return_token_ids=True, max_tokens=1).json()
        assert rendered["prompt_token_ids"] == ids == answer["choices"][0]["prompt_token_ids"]
        assert rendered["count"] == len(ids) and "Hé 👋" in rendered["prompt"]
        assert one.post("/detokenize", {"tokens": ids}).json()["prompt"] == rendered["prompt"]
        shorter = one.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
        assert len(shorter) < len(ids) and ids[: len(shorter)] == shorter


def test_a_remote_tokenizer_finds_all_it_needs(smollm2: Server) -> None:
    """As lm-eval's does: the special tokens by name, their ids by encoding them, chats rendered on the client's side."""
    info = smollm2.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and {"bos_token", "pad_token", "unk_token"} <= set(info)
    (end,) = smollm2.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert end == info["eos_token_id"]
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(info["chat_template"])
    rendered = smollm2.post(f"{CHAT}/render", {"model": "dummy", "messages": MESSAGES}).json()["prompt"]
    assert template.render(messages=MESSAGES, add_generation_prompt=True) == rendered


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"), ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ("/tokenize", {"prompt": "x" * 2_000_000}, "prompt"), ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"), ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": ["x"]}, "tokens"),
    (f"{CHAT}/render", {"model": "dummy", "messages": []}, "messages"), (f"{CHAT}/render", {"model": "dummy"}, "messages"),
])
def test_what_cannot_be_tokenized_is_refused_by_name(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    refused(server.post(path, body), param)


def test_an_unknown_model_is_a_404_here_too(server: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]}),
                       (f"{CHAT}/render", {"messages": MESSAGES})):
        refused(server.post(path, {**body, "model": "nope"}), "model", 404)


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with serve_in_thread(model=str(tmp_path), num_kv_blocks=16) as server:
        for response in (server.post("/tokenize", {"prompt": "x"}), server.post("/detokenize", {"tokens": [1]}),
                         server.post(f"{CHAT}/render", {"model": "dummy", "messages": MESSAGES}),
                         server.client.get("/tokenizer_info")):
            assert response.status_code == 400 and "no tokenizer" in response.json()["error"]["message"]


# ---- what browsers and probes ask ----


def test_CC_02_models_and_health_answer_head_and_options(server: Server) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/v1/models/dummy", "/metrics"):
        got, head = server.client.get(path), server.client.head(path)
        assert got.status_code == head.status_code == 200 and head.content == b""
        if path != "/metrics":
            assert got.headers["content-length"] == head.headers["content-length"]
        options = server.client.options(path)
        assert options.status_code == 204 and options.headers["allow"] == "GET, HEAD, OPTIONS"
    assert "POST" in server.client.options(CHAT).headers["allow"]
    assert server.client.head("/nope").status_code == server.client.options("/nope").status_code == 404
    assert server.client.head(CHAT).status_code == 405
    models = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0).models.list()
    (model,) = models.data
    assert (model.id, model.object, type(model.created)) == ("dummy", "model", int) and model.owned_by
    assert model.model_extra is not None and model.model_extra["max_model_len"] == server.engine.max_model_len


def test_CC_02_with_a_key_the_models_need_it_and_health_does_not() -> None:
    with serve_in_thread(app_settings={"api_key": ["one", "two"]}) as server:
        for method in ("GET", "HEAD", "OPTIONS"):
            assert server.client.request(method, "/v1/models").status_code == 401
            assert server.client.request(method, "/health").status_code in (200, 204)
        for key, status in (("one", 200), ("two", 200), ("three", 401)):
            response = server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == status


def preflight(server: Server, origin: str) -> httpx.Response:
    return server.client.options(CHAT, headers={"origin": origin, "access-control-request-method": "POST",
                                                "access-control-request-headers": "authorization, content-type"})


@pytest.mark.parametrize(("allowed", "origin", "is_allowed"), [
    (None, "http://localhost:3000", True), (None, "http://127.0.0.1", True), (None, "http://[::1]:5173", True),
    (None, ORIGIN, False), (None, "http://localhost.example.org", False), (None, "null", False), ([ORIGIN], ORIGIN, True),
    ([ORIGIN], "http://localhost:3000", False), (["*"], ORIGIN, True),
])
def test_CC_07_a_browser_asks_without_the_key_and_reads_the_refusal(
    allowed: list[str] | None, origin: str, is_allowed: bool,
) -> None:
    with serve_in_thread(app_settings={"api_key": "key", "allowed_origins": allowed}) as server:
        asked = preflight(server, origin)
        assert (asked.status_code in (200, 204)) == is_allowed
        answers = [server.client.post(CHAT, content="{}", headers={"origin": origin, "authorization": "Bearer wrong"}),
                   server.client.get("/health", headers={"origin": origin}), asked]
        assert [answer.status_code for answer in answers[:2]] == [401, 200]
        for answer in answers:
            assert (answer.headers.get("access-control-allow-origin") in (origin, "*")) == is_allowed
        if is_allowed:
            assert "authorization" in asked.headers["access-control-allow-headers"].lower()
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert "x-request-id" in answers[0].headers["access-control-expose-headers"].lower()


def test_the_documentation_comes_from_here_alone(server: Server) -> None:
    page = server.client.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert CHAT in page.text and "/tokenize" in page.text
    assert "http" not in page.text.replace("/v1", "").lower() and "src=" not in page.text and "<script" not in page.text
    paths = server.client.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["description"] and "default" in operation["responses"], f"{method} {path}"
            assert "422" not in operation["responses"]
    json.dumps(paths, allow_nan=False)
