"""Ids back to text that can be streamed: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from vllm_mini.tokenizer import Tokenizer

__all__ = ["OutputText"]


class OutputText:
    """The text of one growing answer: incremental detokenization and stop strings.

    What push() and flush() return adds up to decode(prompt + output) after decode(prompt), up to the first stop string.
    (A character that the prompt ids leave unfinished counts as the prompt's.) Only a window of the last few tokens is
    decoded each time, so the cost of a token does not grow with the text.
    """

    MAX_CONTEXT = 8  # prompt tokens before the window: more than one character's bytes, and a word's leading space
    MAX_RUN = 256  # byte-fallback tokens that are held back at most, should they all be right

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, stop: tuple[str, ...] = (), min_tokens: int = 0,
        skip_special_tokens: bool = True, include_stop_str_in_output: bool = False,
    ) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._hidden_ids = tokenizer.hidden_ids if skip_special_tokens else frozenset()
        self._include_stop = include_stop_str_in_output
        self._num_tokens = 0
        self._shown: list[str] = []
        self._held = ""  # final text that may be the beginning of a stop string
        self._unsearched = 0  # characters from the start of _held in which no stop string may end: min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # tells whether a character is unfinished
        self._is_run_broken = False  # the byte-fallback tokens at the end are no UTF-8 and will not become it
        self._window = self._take_context(prompt_token_ids)  # tokens that are read, then those that are not
        self._num_context = len(self._window)
        self._num_read = len(self._decode())  # characters of the window's text that were passed on
        for token_id in self._window:
            self._utf8.decode(tokenizer.token_bytes(token_id))

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    def push(self, token_id: int, *, hide: bool = False) -> str:
        """Take in the next token; the text that is now safe to show. A hidden token counts, but has no text."""
        self._num_tokens += 1
        data = self._tokenizer.token_bytes(token_id)
        if hide or self.stopped_by is not None or token_id in self._hidden_ids or not data:
            return ""
        self._window.append(token_id)
        character = self._utf8.getstate()[0] + data
        is_broken = "\ufffd" in self._utf8.decode(data) and character != "\ufffd".encode()
        is_split = bool(self._utf8.getstate()[0])
        if token_id in self._tokenizer.fallback_bytes:
            return self._push_byte(is_split, is_broken)
        self._is_run_broken = False
        text = self._decode()
        end = len(text) - is_split  # byte-level BPE decodes an unfinished character to one U+FFFD
        new = text[self._num_read : end]
        self._num_read = max(self._num_read, end)
        if not is_split:
            self._move_window()
        return self._release(new)

    def _push_byte(self, is_split: bool, is_broken: bool) -> str:
        """A run of byte-fallback tokens decodes as a whole, and one wrong byte turns all of it into U+FFFD.

        So the text of a run is final when it is broken or ends. Until then it is searched for stop strings, not shown.
        """
        if self._is_run_broken:
            self._num_read += 1
            return self._release("\ufffd")
        self._is_run_broken = is_broken
        if is_split and not is_broken:
            return ""
        text = self._decode()
        new = text[self._num_read :]
        if not is_broken and len(self._window) - self._num_context < self.MAX_RUN:
            return self._release("", tentative=new)
        self._num_read = len(text)
        if not is_broken:
            self._move_window()
        return self._release(new)

    def _move_window(self) -> None:
        """Let the tokens that were read last be the context of those to come."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_read = len(self._decode())

    def flush(self) -> str:
        """At the end: all that is still held back. Nothing after a stop string."""
        if self.stopped_by is not None:
            return ""
        text = self._decode()
        rest = self._held + text[self._num_read :]
        self._held, self._num_read = "", len(text)
        self._shown.append(rest)
        return rest

    def _take_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The end of the prompt that decoding needs to see: a few visible tokens, and the whole of a run of bytes."""
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden_ids:
                context.append(token_id)
                if len(context) >= self.MAX_CONTEXT and token_id not in self._tokenizer.fallback_bytes:
                    break
        return context[::-1]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _release(self, new: str, tentative: str = "") -> str:
        """Add final text and show what cannot belong to a stop string any more. Tentative text is only searched."""
        self._held += new
        searched = self._held + tentative
        if self._num_tokens < self._min_tokens:
            self._unsearched = len(searched)
        end = self._find_stop(searched)
        if end is None:
            end = len(self._held) - self._count_stop_beginning()
        shown, self._held = searched[:end], self._held[end:]
        self._unsearched = max(0, self._unsearched - end)
        self._shown.append(shown)
        return shown

    def _find_stop(self, text: str) -> int | None:
        """Where to cut the text at its first stop string, which is noted; of two that begin together, the shorter."""
        starts = [(text.find(stop, max(0, self._unsearched - len(stop) + 1)), len(stop), stop) for stop in self._stop]
        start, length, self.stopped_by = min((found for found in starts if found[0] >= 0), default=(-1, 0, None))
        if self.stopped_by is None:
            return None
        return start + length if self._include_stop else start

    def _count_stop_beginning(self) -> int:
        """How many characters at the end of the held text may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(tail)
        return 0
