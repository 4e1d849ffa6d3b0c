"""What a request asks for and how far it has got. Knows no tensors, no text, no queues."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = ["RequestError", "SampledToken", "SamplingParams", "Sequence", "SequenceStatus", "TokenLogprobs"]

MAX_N = 128
MAX_INT = 2**31 - 1  # of a number that becomes a tensor's entry
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGIT_BIAS = 1024  # entries


class RequestError(ValueError):
    """A request that cannot be served. `param` names the field at fault, `code` is OpenAI's error code where it has one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


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
        object.__setattr__(self, "stop", _normal_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _normal_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _normal_logit_bias(self.logit_bias))

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


def _normal_stop(stop: Any) -> tuple[str, ...]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"stop must be a string or a list of strings, got {stop!r:.80}", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop")
    for item in strings:
        if not item:
            raise RequestError("stop must not hold an empty string", param="stop")
        if len(item) > MAX_STOP_LENGTH:
            raise RequestError(f"a stop string may have at most {MAX_STOP_LENGTH} characters, got {len(item)}", param="stop")
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
    Everybody else reads.
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
            status=self.status,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )
