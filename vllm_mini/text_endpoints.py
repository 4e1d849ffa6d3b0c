"""The endpoints that show what a tokenizer and a chat template make of texts. They ask nothing of the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict

from vllm_mini.engine import LLMEngine
from vllm_mini.http_edge import json_response
from vllm_mini.protocol import ChatRequest, Messages, TokenIds
from vllm_mini.sequence import RequestError
from vllm_mini.tokenizer import Tokenizer

__all__ = ["DetokenizeRequest", "TextEndpoints", "TokenizeRequest", "named", "render_chat"]

Json = dict[str, Any]


class TokenizeRequest(BaseModel):
    """The body of POST /tokenize: a prompt, or messages to be rendered first."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: TokenIds


class TextEndpoints:
    """Around one engine's tokenizer. `check_model` raises for a model that is not served."""

    def __init__(self, engine: LLMEngine, check_model: Callable[[str], str]) -> None:
        self._engine = engine
        self._check_model = check_model

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of messages once rendered."""
        return json_response(await asyncio.to_thread(self._tokenize, body))

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return json_response(await asyncio.to_thread(self._detokenize, body))

    async def render(self, body: ChatRequest) -> Response:
        """The text, and the token ids, that the chat template makes of a chat."""
        return json_response(await asyncio.to_thread(self._render, body))

    async def tokenizer_info(self) -> Response:
        """What a client needs to use the tokenizer from afar."""
        tokenizer = self._tokenizer("model")
        special = tokenizer.special_tokens
        named = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return json_response({"tokenizer_class": "Tokenizer", "vocab_size": tokenizer.vocab_size,
                              "model_max_length": self._engine.max_model_len, **special, **named,
                              "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
                              "chat_template": tokenizer.chat_template})

    def _tokenizer(self, param: str) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise RequestError("this model has no tokenizer", param=param)
        return self._engine.tokenizer

    def _tokenize(self, body: TokenizeRequest) -> Json:
        if body.model is not None:
            self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("either prompt or messages must be given", param="prompt")
        tokenizer = self._tokenizer("prompt")
        if body.prompt is not None:
            token_ids = self._encode(body.prompt, body.add_special_tokens is not False)
        else:
            options = {"add_generation_prompt": body.add_generation_prompt,
                       "continue_final_message": body.continue_final_message}
            given = {name: value for name, value in options.items() if value is not None}
            with named({"prompt": "messages"}):
                text = render_chat(self._engine, body.messages, {**(body.chat_template_kwargs or {}), **given})
                token_ids = self._encode(text, bool(body.add_special_tokens))
        strings = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": self._engine.max_model_len, "tokens": token_ids,
                "token_strs": strings}

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Unlike for a prompt, an empty text is fine: it is not to be continued."""
        if not text:
            return self._tokenizer("prompt").encode(text, add_special_tokens=add_special_tokens)
        return self._engine.encode(text, add_special_tokens=add_special_tokens)

    def _detokenize(self, body: DetokenizeRequest) -> Json:
        if body.model is not None:
            self._check_model(body.model)
        if not isinstance(body.tokens, list):
            raise RequestError("tokens must be a list of token ids", param="tokens")
        tokenizer = self._tokenizer("tokens")
        with named({"prompt": "tokens"}):
            token_ids = self._engine.encode(body.tokens) if body.tokens else []
        return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}

    def _render(self, body: ChatRequest) -> Json:
        name = self._check_model(body.model)
        tools = body.tool_use(self._tokenizer("messages").chat_template)
        with named({"prompt": "messages"}):
            text = render_chat(self._engine, body.messages, {**body.template_options(), "tools": tools and tools.tools})
            token_ids = self._encode(text, add_special_tokens=False)
        return {"model": name, "prompt": text, "prompt_token_ids": token_ids, "count": len(token_ids)}


@contextlib.contextmanager
def named(names: dict[str, str]) -> Iterator[None]:
    """Inside, the engine's names for what is wrong become those that the request used."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "", error.param)
        message = str(error)
        if name != error.param and error.code is None:
            message = f"{name}: {message.removeprefix(f'{error.param}: ')}"
        raise RequestError(message, param=name, code=error.code) from error


def render_chat(engine: LLMEngine, messages: Any, options: Json) -> str:
    """A chat as the model's template writes it. RequestError for one that cannot be written, or is far too long."""
    if engine.tokenizer is None:
        raise RequestError("this model has no tokenizer, so it cannot chat", param="messages")
    max_model_len = engine.scheduler.config.max_model_len
    if isinstance(messages, list) and len(messages) > max_model_len:
        raise RequestError(f"This model's maximum context length is {max_model_len} tokens. However, you sent "
                           f"{len(messages)} messages", param="messages", code="context_length_exceeded")
    return engine.tokenizer.render_chat(messages, **options)
