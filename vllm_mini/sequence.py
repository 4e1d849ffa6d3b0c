"""What a request asks for and how far it has got. Knows no tensors, no text, no queues."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, NoReturn, Protocol

__all__ = ["RequestError", "SampledToken", "SamplingParams", "Sequence", "SequenceStatus", "StructuredOutputsParams",
           "TokenConstraint", "TokenLogprobs"]

MAX_N = 128
MAX_INT = 2**31 - 1  # of a number that becomes a tensor's entry
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGIT_BIAS = 1024  # entries
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128  # characters
MAX_GRAMMAR_LENGTH = 65_536  # characters of a schema, an expression, a grammar or all choices together


class RequestError(ValueError):
    """A request that cannot be served. `param` names the field at fault, `code` is OpenAI's error code where it has one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have; exactly one of the fields is to be given. Names are vLLM's."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text; kept as text
    regex: str | None = None
    choice: SequenceOf[str] | None = None
    grammar: str | None = None  # context-free, in Lark's notation
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise RequestError(f"structured_outputs needs exactly one of {names}, got {', '.join(given) or 'none'}",
                               param="structured_outputs")
        if self.json is not None:
            object.__setattr__(self, "json", _normal_schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _normal_choice(self.choice))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))):
                _refuse_structure(name, f"must be a string, got {getattr(self, name)!r:.80}")
        if not isinstance(self.json_object, bool):
            _refuse_structure("json_object", f"must be true or false, got {self.json_object!r:.80}")
        texts = [self.json, self.regex, self.grammar, *(self.choice or ())]
        length = sum(len(text) for text in texts if isinstance(text, str))
        if length > MAX_GRAMMAR_LENGTH:
            _refuse_structure(given[0], f"may have at most {MAX_GRAMMAR_LENGTH} characters, got {length}")


def _refuse_structure(name: str, complaint: str) -> NoReturn:
    raise RequestError(f"structured_outputs.{name} {complaint}", param=f"structured_outputs.{name}")


def _normal_schema(schema: Any) -> str:
    """A JSON schema as text."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, Mapping) else None
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None:
        _refuse_structure("json", f"must be a JSON schema: an object, or its text; this {type(schema).__name__} is none")
    return text


def _normal_choice(choice: Any) -> tuple[str, ...]:
    if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(one, str) and one for one in choice):
        _refuse_structure("choice", f"must be a list of at least one string, none of them empty, got {choice!r:.80}")
    return tuple(choice)


class TokenConstraint(Protocol):
    """Which tokens may come next in one sequence: a state that moves on with each of its tokens."""

    allowed_tokens: bytes  # a bit for each token of the vocabulary, the lowest bit first
    is_complete: bool  # nothing may follow: the sequence is to end

    def accept(self, token_id: int) -> None:
        """Move on by one token that was allowed."""

    def fork(self) -> TokenConstraint:
        """One in the same state, for another sequence."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens and when to stop; names, ranges and defaults are vLLM's.

    An unknown keyword is a TypeError, a value out of range a RequestError (a ValueError) that names both.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16  # None: all the room that max_model_len leaves
    min_tokens: int = 0
    stop: str | SequenceOf[str] | None = None
    stop_token_ids: SequenceOf[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many alternatives to report beside the chosen token
    prompt_logprobs: int | None = None
    allowed_token_ids: SequenceOf[int] | None = None  # the only tokens that may be drawn
    bad_words: SequenceOf[str] | None = None  # texts whose last token may not follow the others
    structured_outputs: StructuredOutputsParams | None = None
    constraint: TokenConstraint | None = field(default=None, repr=False, compare=False)  # the latter, compiled

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, MAX_INT)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        # Normal forms of the fields that may be written in several ways, so that nobody downstream has to look again.
        object.__setattr__(self, "stop", _normal_words("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH))
        object.__setattr__(self, "stop_token_ids", _normal_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _normal_logit_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _normal_words("bad_words", self.bad_words, MAX_BAD_WORDS,
                                                            MAX_BAD_WORD_LENGTH))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _normal_ids("allowed_token_ids", self.allowed_token_ids))
            self._check_allowed()
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise RequestError("structured_outputs must be StructuredOutputsParams, "
                               f"got {self.structured_outputs!r:.80}", param="structured_outputs")

    def _check_allowed(self) -> None:
        if not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must hold at least one token id", param="allowed_token_ids")
        if self.structured_outputs is not None:
            raise RequestError("allowed_token_ids cannot be combined with structured outputs", param="allowed_token_ids")

    @property
    def is_greedy(self) -> bool:
        """True where sampling would only repeat the argmax, but for equal logits, between which it would toss a coin."""
        return self.temperature <= 1e-3

    def clone(self, **changes: Any) -> SamplingParams:
        """The same parameters with some of them replaced, checked again."""
        return replace(self, **changes)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {limit}, got {value}", param=name)


def _check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {value!r}", param=name)
    if not low <= value <= high or (low_open and value == low):  # NaN is in no range
        raise RequestError(f"{name} must be in {'(' if low_open else '['}{low:g}, {high:g}], got {value}", param=name)


def _normal_words(name: str, words: Any, max_words: int, max_length: int) -> tuple[str, ...]:
    """A text or several, each once."""
    strings = [] if words is None else [words] if isinstance(words, str) else words
    if not isinstance(strings, (list, tuple)) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"{name} must be a string or a list of strings, got {words!r:.80}", param=name)
    if len(strings) > max_words:
        raise RequestError(f"{name} may hold at most {max_words} strings, got {len(strings)}", param=name)
    for item in strings:
        if not item:
            raise RequestError(f"{name} must not hold an empty string", param=name)
        if len(item) > max_length:
            raise RequestError(f"a {name} string may have at most {max_length} characters, got {len(item)}", param=name)
    return tuple(dict.fromkeys(strings))


def _normal_ids(name: str, ids: Any) -> tuple[int, ...]:
    ids = () if ids is None else ids
    if not isinstance(ids, (list, tuple, set, frozenset)):
        raise RequestError(f"{name} must be a list of token ids, got {ids!r:.80}", param=name)
    for token_id in ids:
        _check_int(name, token_id, 0, None)
    return tuple(ids)


def _normal_logit_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r:.80}", param="logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(bias)}", param="logit_bias")
    normal: dict[int, float] = {}
    for key, value in bias.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdigit()):
            raise RequestError(f"logit_bias: {key!r:.80} is not a token id", param=f"logit_bias.{text:.40}")
        _check_float(f"logit_bias.{text:.40}", value, -100.0, 100.0)
        normal[int(text)] = float(value)
    return normal


class SequenceStatus(enum.Enum):
    """Where a sequence stands; each value but FINISHED is the queue of that name."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class TokenLogprobs(NamedTuple):
    """The log-probability of one token and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token_id, logprob)


class SampledToken(NamedTuple):
    """One new token. A negative token_id says that the logits were not numbers and nothing could be drawn."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(eq=False)
class Sequence:
    """One stream of tokens: a prompt and what was generated after it.

    The scheduler writes status, token_ids, logprobs, finish_reason, stop_reason, num_computed_tokens and num_forks; the
    block manager writes block_table, block_hashes, host_blocks, num_cached_tokens and, at admission, num_computed_tokens.
    The engine moves `constraint` on with each token. Everybody else reads.
    """

    seq_id: int  # in order of arrival; the n choices of one request have consecutive ids
    request_id: str
    token_ids: list[int]  # prompt, then output
    params: SamplingParams
    seed: int  # of this choice: given by the user, or drawn once on arrival
    max_num_tokens: int  # prompt + output, at which the sequence ends with "length"
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens
    index: int = 0  # among the n choices of its request
    num_forks: int = 0  # choices still to be forked off when the prompt is computed
    constraint: TokenConstraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of texts that may not be completed

    num_prompt_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # tokens whose K/V is stored
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string; None for an end-of-sequence token
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one for each output token
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one for each prompt token; first is None

    block_table: list[int] = field(default_factory=list)  # logical block -> physical block id
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, each over its whole prefix
    host_blocks: list[int] = field(default_factory=list)  # where its K/V lies while it is swapped out
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while the prompt's own logits are still owed, so that none of it may be skipped."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    def fork(self, index: int) -> Sequence:
        """A sibling with the same prompt and its own randomness; the caller shares the blocks."""
        return Sequence(
            seq_id=self.seq_id - self.index + index,
            request_id=self.request_id,
            token_ids=self.token_ids[: self.num_prompt_tokens],
            params=self.params,
            seed=self.seed,
            max_num_tokens=self.max_num_tokens,
            stop_ids=self.stop_ids,
            index=index,
            constraint=None if self.constraint is None else self.constraint.fork(),
            bad_words=self.bad_words,
            status=self.status,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )
