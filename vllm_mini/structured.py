"""Structured output: from a schema or grammar to the tokens that may come next, by llguidance. Knows no tensors, no HTTP.

A grammar is compiled once for each request, apart from the engine's thread; its state then belongs to a sequence and
moves on with the sequence's tokens. What it costs is bounded: by the length of a grammar (MAX_GRAMMAR_LENGTH) and by
what llguidance may spend on compiling it and on one token.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable

from vllm_mini.sequence import RequestError, StructuredOutputsParams, TokenConstraint
from vllm_mini.tokenizer import Tokenizer

try:
    import llguidance
except ImportError:  # an extra
    llguidance = None  # type: ignore[assignment]

__all__ = ["WHITESPACE", "GrammarCompiler", "GrammarError"]

INSTALL = "structured output needs llguidance, which is not installed here: pip install 'vllm-mini-engine[structured]'"
# Between JSON's tokens. Without an end to it, a small model may write newlines until its tokens run out.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
LEXER_FUEL = 200_000  # for an expression as a whole: the largest it allows takes 0.2 s
MAX_MESSAGE_LENGTH = 200  # of llguidance's own words, in characters


class GrammarError(RuntimeError):
    """A grammar became too complex in the middle of an answer."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None  # made when it is first needed: that takes a moment

    def compile(self, structure: StructuredOutputsParams) -> TokenConstraint:
        """Raises RequestError for what cannot be compiled, allows no text at all, or is too complex."""
        if llguidance is None:
            raise RequestError(INSTALL, param="structured_outputs")
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer, so its output cannot be structured", param="structured_outputs")
        limits = llguidance.LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(self._get_vocabulary(self._tokenizer), _grammar(structure), log_level=0,
                                           limits=limits)
            constraint = _Constraint(matcher)
        except (GrammarError, ValueError) as error:
            raise RequestError(f"structured_outputs: the grammar cannot be used: {error}",
                               param="structured_outputs") from error
        if not any(constraint.allowed_tokens):
            raise RequestError("structured_outputs: the grammar cannot be used: it allows no text",
                               param="structured_outputs")
        return constraint

    def _get_vocabulary(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                tokens = _Tokens(tokenizer, self._vocab_size, self._eos_token_ids)
                self._vocabulary = llguidance.LLTokenizer(tokens, eos_token=tokens.eos_token_ids)  # type: ignore[arg-type]
        return self._vocabulary


class _Tokens:
    """A tokenizer as llguidance wants to see it. A model that never ends a text gets an end beyond its vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), *([] if eos_token_ids else [b""])]
        self.eos_token_ids = eos_token_ids or [vocab_size]
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = sorted({*(token_id for token_id in tokenizer.hidden_ids if token_id < vocab_size),
                                         *self.eos_token_ids})
        self._id_of = {token: token_id for token_id, token in enumerate(self.tokens)
                       if token and token_id not in self.special_token_ids}
        self._longest = max(map(len, self._id_of), default=1)

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that the grammar leaves no choice about, as the model would have read it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        if b"".join(map(self._tokenizer.token_bytes, ids)) == data and max(ids, default=0) < len(self.tokens):
            return ids
        return self._longest_first(data)  # the tokenizer adds or changes something: a leading space, for one

    def _longest_first(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            length = next((length for length in lengths if data[at : at + length] in self._id_of), None)
            if length is None:  # no token begins so
                break
            ids.append(self._id_of[data[at : at + length]])
            at += length
        return ids


class _Constraint:
    """A TokenConstraint: where one sequence stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._look_ahead()

    def accept(self, token_id: int) -> None:
        """GrammarError when the grammar cannot be followed any further."""
        self._matcher.consume_token(token_id)
        self._look_ahead()

    def fork(self) -> _Constraint:
        twin = object.__new__(_Constraint)
        twin._matcher = self._matcher.deep_copy()
        twin.allowed_tokens, twin.is_complete = self.allowed_tokens, self.is_complete
        return twin

    def _look_ahead(self) -> None:
        self.allowed_tokens: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(_words(self._matcher.get_error()))
        self.is_complete: bool = self._matcher.is_stopped()


def _grammar(structure: StructuredOutputsParams) -> str:
    """In llguidance's own form."""
    matcher = llguidance.LLMatcher
    if structure.grammar is not None:
        return matcher.grammar_from_lark(structure.grammar)
    if structure.regex is not None:
        return matcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:
        return matcher.grammar_from_regex("|".join(map(_literal, structure.choice)))
    schema = '{"type": "object"}' if structure.json is None else str(structure.json)
    return matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _literal(text: str) -> str:
    """An expression for exactly this text."""
    return re.sub(r"[^0-9A-Za-z_]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def _words(message: str) -> str:
    """What went wrong, in one line for a client's eyes: a message may go on with backtraces."""
    line = " ".join(re.split(r"<(?:non-verbose/|backtrace|state|grammar)>", message)[0].split())
    return "an internal error" if not line or line.startswith("panic") else line[:MAX_MESSAGE_LENGTH]
