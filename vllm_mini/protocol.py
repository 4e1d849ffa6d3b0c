"""What a request may say, in OpenAI's shapes. Does not know HTTP, event loops or answers.

Types are checked here, ranges by SamplingParams; fields that may be written in several ways are taken as they are and
checked where they are read, so that one wrong entry in a million costs one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from vllm_mini.sequence import RequestError, SamplingParams, StructuredOutputsParams
from vllm_mini.tool_calls import Tools, check_tools, tool_format

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest"]

MAX_PROMPTS = 2048  # in one completions request
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit for completions
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's max_tokens for completions
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words")
# What would change the answer but is not there is refused, not ignored.
UNSUPPORTED = ("suffix", "use_beam_search", "chat_template", "functions", "audio")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")  # what structured_outputs may hold

Json = dict[str, Any]
TextOrTexts = Annotated[Any, WithJsonSchema({"anyOf": [
    {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]})]
Ids = {"type": "array", "items": {"type": "integer"}}
Prompts = Annotated[Any, WithJsonSchema({"anyOf": [
    {"type": "string"}, {"type": "array", "items": {"type": "string"}}, Ids, {"type": "array", "items": Ids}]})]
TokenIds = Annotated[Any, WithJsonSchema({"anyOf": [Ids, {"type": "null"}]})]
LogitBias = Annotated[Any, WithJsonSchema({"anyOf": [
    {"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]})]
Structure = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role"], "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": {
            "type": "object", "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}}]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}}}})]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints understand. Null and absent mean the default; what is not named here is ignored."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: TextOrTexts = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: TokenIds = None
    bad_words: TextOrTexts = None
    response_format: Structure = None
    structured_outputs: Structure = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def asked_tokens(self) -> int | None:
        """How many tokens the request itself asks for."""
        raise NotImplementedError

    def check(self) -> None:
        """RequestError for fields that contradict each other, and for those that ask for what is not there."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options can only be used when stream is true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs are not available when stream is true", param="prompt_logprobs")
        for name in UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise RequestError(f"{name} is not supported by this server", param=name)

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's own values, else the model's defaults, else OpenAI's. Raises RequestError."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}
        return SamplingParams(**{**defaults, **given, **self._lengths(defaults), **self._logprobs()},
                              structured_outputs=self.structure())

    @property
    def structure_field(self) -> str:
        """The field that says what the output must look like."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def structure(self) -> StructuredOutputsParams | None:
        """What the output must look like. Raises RequestError."""
        if self.structured_outputs is None:
            return _read_response_format(self.response_format)
        if self.response_format not in (None, {"type": "text"}):
            raise RequestError("response_format and structured_outputs cannot both be given", param="structured_outputs")
        if not isinstance(self.structured_outputs, dict):
            _refuse("structured_outputs", "must be an object")
        given = {name: value for name, value in self.structured_outputs.items() if value is not None}
        for name in given:
            if name not in STRUCTURES:
                _refuse(f"structured_outputs.{name:.40}", f"is not supported; there are {', '.join(STRUCTURES)}")
        return StructuredOutputsParams(**given)

    def _lengths(self, defaults: Mapping[str, Any]) -> Json:
        raise NotImplementedError

    def _logprobs(self) -> Json:
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return getattr(self, self.limit_field)

    @property
    def limit_field(self) -> str:
        """The field that limits the output: OpenAI's newer name wins."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs can only be used when logprobs is true", param="top_logprobs")
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.modalities not in (None, [], ["text"]):
            raise RequestError('modalities: only ["text"] is supported by this server', param="modalities")

    def tool_use(self, chat_template: str | None) -> Tools | None:
        """The tools that may be called, in the template's format. RequestError where it has none."""
        if not self.tools or self.tool_choice == "none":
            return None
        found = tool_format(chat_template)
        if found is None:
            raise RequestError("this model's chat template has no format for tools that this server knows; "
                               'tool_choice "none" leaves them out', param="tools")
        return Tools(self.tools, found, self.tool_choice, self.parallel_tool_calls is not False)

    def template_options(self) -> Json:
        """What the chat template is told beside the messages."""
        options = dict(self.chat_template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        options = {name: value for name, value in options.items() if name not in ("messages", "tools", "self")}
        return {**options, "tools": self.tools} if self.tools and self.tool_choice != "none" else options

    def _lengths(self, defaults: Mapping[str, Any]) -> Json:
        asked = self.asked_tokens
        return {"max_tokens": defaults.get("max_tokens") if asked is None else asked}

    def _logprobs(self) -> Json:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of is only supported when it equals n", param="best_of")

    def prompts(self) -> list[tuple[str, str | list[int]]]:
        """Each prompt, a text or a list of ids, with the name by which an error is to call it."""
        prompt = self.prompt
        if not isinstance(prompt, list) or (prompt and not isinstance(prompt[0], (str, list))):
            return [("prompt", _check_prompt("prompt", prompt))]  # whether a list holds ids is for the engine to say
        if not 0 < len(prompt) <= MAX_PROMPTS:
            raise RequestError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
        return [(f"prompt[{index}]", _check_prompt(f"prompt[{index}]", one)) for index, one in enumerate(prompt)]

    def _lengths(self, defaults: Mapping[str, Any]) -> Json:
        if self.max_tokens is None:
            return {"max_tokens": defaults.get("max_tokens", DEFAULT_COMPLETION_TOKENS)}
        return {"max_tokens": max(1, self.max_tokens)}  # for 0, CompletionAnswer throws the one token away

    def _logprobs(self) -> Json:
        if self.logprobs is None:
            return {}
        if not self.echo:
            return {"logprobs": self.logprobs}
        return {"logprobs": self.logprobs, "prompt_logprobs": max(self.logprobs, self.prompt_logprobs or 0)}


def _refuse(path: str, complaint: str) -> NoReturn:
    raise RequestError(f"{path} {complaint}", param=path)


def _read_response_format(wanted: Any) -> StructuredOutputsParams | None:
    """OpenAI's way to say what the output must look like."""
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        _refuse("response_format", "must be an object with a type")
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        _refuse("response_format.type", f"must be text, json_object or json_schema, got {kind!r:.80}")
    path = "response_format"
    schema: Any = wanted
    for key in ("json_schema", "schema"):
        path, schema = f"{path}.{key}", schema.get(key)
        if not isinstance(schema, dict):
            _refuse(path, "must be an object" if schema is not None else "is missing")
    try:
        return StructuredOutputsParams(json=schema)
    except RequestError as error:
        message = str(error).removeprefix(f"{error.param} ")
        raise RequestError(f"{path} {message}", param=path) from error


def _check_prompt(name: str, prompt: Any) -> str | list[int]:
    if not isinstance(prompt, (str, list)):
        raise RequestError(f"{name} must be a string or a list of token ids", param=name)
    return prompt
