"""The objects that answers are made of, whole or as chunks of a stream, in OpenAI's shapes. Does not know HTTP."""

from __future__ import annotations

import codecs
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from vllm_mini import __version__
from vllm_mini.engine import TokenOutput
from vllm_mini.protocol import CompletionRequest, GenerationRequest
from vllm_mini.sequence import SamplingParams, TokenLogprobs
from vllm_mini.tokenizer import Tokenizer
from vllm_mini.tool_calls import ToolCallParser, Tools, join_deltas

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "Prompt"]

MIN_LOGPROB = -9999.0  # OpenAI's way to write an impossible token: JSON has no infinity

Json = dict[str, Any]


class Prompt(NamedTuple):
    """One prompt of a request."""

    token_ids: list[int]
    text: str | None = None  # None: it was given as ids, or is a chat


class _Token(NamedTuple):
    """One token of an answer, for the logprobs of either shape."""

    token_id: int
    text: str  # what it adds to the answer's text: nothing for half a character or a hidden token
    offset: int  # where that begins
    logprobs: TokenLogprobs | None


class _Vocabulary:
    """Tokens as JSON shows them; a model without a tokenizer has only their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def key(self, token_id: int) -> str:
        """A text that no other token has: OpenAI's way to write a part of a character."""
        text = self.text(token_id)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and self._tokenizer.special_token_id(self.text(token_id)) == token_id

    def echo(self, prompt: Prompt) -> tuple[str, list[str]]:
        """A prompt's text and its share in each token."""
        pieces = _Pieces(self)
        shares = [pieces.next(token_id) for token_id in prompt.token_ids]
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False) if self._tokenizer else ""
        # What the tokenizer put before the text (a beginning-of-text token, a space) is no part of it.
        surplus = max(0, sum(map(len, shares)) - len(text))
        for index, share in enumerate(shares):
            if not surplus:
                break
            shares[index] = share[surplus:]
            surplus -= len(share) - len(shares[index])
        return text, shares


class _Pieces:
    """The text that each token adds. They join to the whole text: the last part of a character brings all of it."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.bytes(token_id))


@dataclass
class _Choice:
    """How far one choice has got."""

    index: int
    prompt_index: int
    pieces: _Pieces
    offset: int = 0  # characters of text that the tokens so far make
    texts: list[str] = field(default_factory=list)
    tokens: list[_Token] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0


class _Delta(NamedTuple):
    """What an output adds to a choice."""

    choice: _Choice
    text: str
    tokens: list[_Token]
    token_ids: list[int]
    finish_reason: str | None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.finish_reason is None


class Answer:
    """The answer to one HTTP call: takes the engine's outputs in, gives chunks of a stream or one body out."""

    prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self, request: GenerationRequest, prompts: list[Prompt], params: SamplingParams, tokenizer: Tokenizer | None, *,
        model: str,
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.request = request
        self.prompts = prompts
        self.params = params
        self._vocabulary = _Vocabulary(tokenizer)
        self._model = model
        self._created = int(time.time())
        self._num_cached_tokens = [0] * len(prompts)
        self._prompt_logprobs: list[tuple[TokenLogprobs | None, ...]] = [()] * len(prompts)
        self._choices = [_Choice(index, index // params.n, _Pieces(self._vocabulary))
                         for index in range(len(prompts) * params.n)]
        self._prompt_index = {self.request_id(index): index for index in range(len(prompts))}

    def request_id(self, prompt_index: int) -> str:
        """What the engine knows one of the prompts by."""
        return f"{self.id}-{prompt_index}"

    def add(self, output: TokenOutput) -> list[_Delta]:
        """Take in an output; what it adds to the answer."""
        prompt_index = self._prompt_index[output.request_id]
        choice = self._choices[prompt_index * self.params.n + output.index]
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        deltas = [] if choice.has_begun else self._begin(choice)
        choice.has_begun = True
        tokens = self._read_tokens(choice, output) if self.params.logprobs is not None else []
        deltas.append(_Delta(choice, output.text, tokens, list(output.token_ids), output.finish_reason))
        choice.num_output_tokens = output.num_output_tokens
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        for delta in deltas:
            choice.texts.append(delta.text)
            choice.tokens += delta.tokens
            choice.token_ids += delta.token_ids
        return deltas

    def body(self) -> Json:
        """The whole answer, once every output was added."""
        choices = [self._full_choice(choice) for choice in self._choices]
        return {**self._head(self.object_name), "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        """The chunks that begin a stream."""
        return []

    def chunks(self, output: TokenOutput) -> list[Json]:
        """The chunks of a stream that an output makes; none where it adds nothing to be seen."""
        return [self._chunk([choice]) for delta in self.add(output) for choice in self._delta_choices(delta)]

    def closing(self) -> list[Json]:
        """The chunks that end a stream."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self._head(self.chunk_name), "choices": [], "usage": self.usage()}]

    def usage(self) -> Json:
        """Tokens so far; the prompt of several choices counts once."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.num_output_tokens for choice in self._choices)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)}}

    def _head(self, object_name: str) -> Json:
        return {"id": self.id, "object": object_name, "created": self._created, "model": self._model,
                "system_fingerprint": f"vllm-mini-{__version__}"}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head(self.chunk_name), "choices": choices}
        options = self.request.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage() if options.continuous_usage_stats else None
        return chunk

    def _read_tokens(self, choice: _Choice, output: TokenOutput) -> list[_Token]:
        tokens = []
        last = len(output.token_ids) - 1
        for at, (token_id, logprobs) in enumerate(zip(output.token_ids, output.logprobs)):
            is_hidden = (output.is_end_hidden and at == last) or (
                self.params.skip_special_tokens and self._vocabulary.is_special(token_id))
            text = "" if is_hidden else choice.pieces.next(token_id)
            tokens.append(_Token(token_id, text, choice.offset, logprobs))
            choice.offset += len(text)
        return tokens

    def _begin(self, choice: _Choice) -> list[_Delta]:
        """What comes before a choice's first output."""
        return []

    def _full_choice(self, choice: _Choice) -> Json:
        raise NotImplementedError

    def _delta_choices(self, delta: _Delta) -> list[Json]:
        """The choices of the chunks that a delta makes."""
        return [self._delta_choice(delta)] if self._is_shown(delta) else []

    def _is_shown(self, delta: _Delta) -> bool:
        return not delta.is_empty or bool(self.request.return_token_ids and delta.token_ids)

    def _delta_choice(self, delta: _Delta) -> Json:
        raise NotImplementedError

    def _finish_reason(self, choice: _Choice) -> str | None:
        return choice.finish_reason

    def _ends(self, delta: _Delta) -> Json:
        """The fields of a chunk's choice that both shapes share."""
        choice = delta.choice
        ends: Json = {"finish_reason": delta.finish_reason and self._finish_reason(choice)}
        if delta.finish_reason is not None:
            ends["stop_reason"] = choice.stop_reason
        if self.request.return_token_ids:
            ends["token_ids"] = delta.token_ids
        return ends

    def _extras(self, choice: _Choice) -> Json:
        """The fields of a whole choice that vLLM added to OpenAI's."""
        extras: Json = {"finish_reason": self._finish_reason(choice), "stop_reason": choice.stop_reason}
        prompt = self.prompts[choice.prompt_index]
        if self.request.return_token_ids:
            extras |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt.token_ids}
        if self.request.prompt_logprobs is not None:
            found = self._prompt_logprobs[choice.prompt_index]
            extras["prompt_logprobs"] = [self._prompt_entry(*pair) for pair in zip(prompt.token_ids, found)]
        return extras

    def _prompt_entry(self, token_id: int, logprobs: TokenLogprobs | None) -> Json | None:
        if logprobs is None:
            return None
        top = logprobs.top[: self.request.prompt_logprobs]
        ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
        return {str(other): {"logprob": _finite(logprob), "rank": ranks.get(other),
                             "decoded_token": self._vocabulary.text(other)}
                for other, logprob in ((token_id, logprobs.logprob), *top)}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class ChatAnswer(Answer):
    """chat.completion and its chunks."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, tools: Tools | None = None, **settings: Any) -> None:
        """With tools, calls are looked for in the text."""
        super().__init__(*args, **settings)
        self._parsers = [] if tools is None else [ToolCallParser(tools) for _ in self._choices]

    def opening(self) -> list[Json]:
        return [self._chunk([{"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                              "finish_reason": None}]) for choice in self._choices]

    def _full_choice(self, choice: _Choice) -> Json:
        text = "".join(choice.texts)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._parsers:
            found = join_deltas(self._parsers[choice.index].feed(text, is_last=True))
            message["content"] = None if "tool_calls" in found else text
            message |= found
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.tokens),
                **self._extras(choice)}

    def _delta_choices(self, delta: _Delta) -> list[Json]:
        """A call begins with a chunk of its own; the tokens and the end of a choice go with the last chunk."""
        if not self._parsers:
            return super()._delta_choices(delta)
        is_last = delta.finish_reason is not None
        parts = self._parsers[delta.choice.index].feed(delta.text, is_last=is_last)
        if not parts and self._is_shown(delta._replace(text="")):
            parts = [{}]
        choices = [{"index": delta.choice.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts]
        if choices:
            choices[-1] = {**self._delta_choice(delta), "delta": parts[-1]}
        return choices

    def _delta_choice(self, delta: _Delta) -> Json:
        return {"index": delta.choice.index, "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta.tokens), **self._ends(delta)}

    def _finish_reason(self, choice: _Choice) -> str | None:
        """A call is a reason of its own to stop, but none to be cut off."""
        has_calls = bool(self._parsers) and self._parsers[choice.index].num_calls > 0
        return "tool_calls" if choice.finish_reason == "stop" and has_calls else choice.finish_reason

    def _logprobs(self, tokens: list[_Token]) -> Json | None:
        if self.params.logprobs is None:
            return None
        content = [{**self._entry(token.token_id, token.logprobs.logprob),
                    "top_logprobs": [self._entry(*other) for other in token.logprobs.top[: self.params.logprobs]]}
                   for token in tokens if token.logprobs is not None]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {"token": self._vocabulary.text(token_id), "logprob": _finite(logprob),
                "bytes": list(self._vocabulary.bytes(token_id))}


class CompletionAnswer(Answer):
    """text_completion, whole and in chunks."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    request: CompletionRequest

    def add(self, output: TokenOutput) -> list[_Delta]:
        if self.request.max_tokens == 0:
            output = replace(output, text="", token_ids=(), logprobs=(), num_output_tokens=0, finish_reason="length",
                             stop_reason=None)
        return super().add(output)

    def _begin(self, choice: _Choice) -> list[_Delta]:
        """With echo, the prompt."""
        if not self.request.echo:
            return []
        prompt = self.prompts[choice.prompt_index]
        text, shares = self._vocabulary.echo(prompt)
        tokens = []
        found = self._prompt_logprobs[choice.prompt_index] if self.params.logprobs is not None else ()
        for token_id, share, logprobs in zip(prompt.token_ids, shares, found):
            tokens.append(_Token(token_id, share, choice.offset, logprobs))
            choice.offset += len(share)
        choice.offset = len(text)
        return [_Delta(choice, text, tokens, [], None)]

    def _full_choice(self, choice: _Choice) -> Json:
        return {"index": choice.index, "text": "".join(choice.texts), "logprobs": self._logprobs(choice.tokens),
                **self._extras(choice)}

    def _delta_choice(self, delta: _Delta) -> Json:
        return {"index": delta.choice.index, "text": delta.text, "logprobs": self._logprobs(delta.tokens),
                **self._ends(delta)}

    def _logprobs(self, tokens: list[_Token]) -> Json | None:
        if self.params.logprobs is None:
            return None
        return {"tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprobs and _finite(token.logprobs.logprob) for token in tokens],
                "top_logprobs": [self._top(token) for token in tokens],
                "text_offset": [token.offset for token in tokens]}

    def _top(self, token: _Token) -> dict[str, float] | None:
        """The best tokens and the chosen one, which need not be among them."""
        if token.logprobs is None:
            return None
        shown = (*token.logprobs.top[: self.params.logprobs], (token.token_id, token.logprobs.logprob))
        return {self._vocabulary.key(token_id): _finite(logprob) for token_id, logprob in shown}
