"""Text to ids (chat template included), and ids back to text. Knows no tensors and no requests.

Ids and rendered chats equal those of Hugging Face's transformers for the same files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_mini.chat_template import ChatTemplate
from vllm_mini.config import ConfigError
from vllm_mini.sequence import RequestError
from vllm_mini.tokenizer_files import BYTE_ALPHABET, SPACE, TokenizerParts, dummy_tokenizer, folder_tokenizer, gguf_tokenizer

__all__ = ["Tokenizer"]

logger = logging.getLogger(__name__)

BYTE_OF = {char: value for value, char in enumerate(BYTE_ALPHABET)}


class Tokenizer:
    """Text to ids (chat template included) and ids back to text. Made by from_model, unchanged afterwards.

    `special_tokens` maps names such as "bos_token" to texts: what chat templates may use, and what ends a text.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        """ConfigError for a chat template that cannot be compiled."""
        backend = parts.backend
        backend.no_truncation()  # a tokenizer.json may ask for both, to train with
        backend.no_padding()
        self._backend = backend
        self._special_tokens = parts.special_tokens
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self.hidden_ids = frozenset(self._special_ids.values())
        decoder = backend.decoder.__getstate__() if backend.decoder else b""
        self._is_byte_level = b'"ByteLevel"' in decoder
        byte_tokens = ((value, backend.token_to_id(f"<0x{value:02X}>")) for value in range(256))
        self.fallback_bytes = {token_id: bytes([value]) for value, token_id in byte_tokens
                                if token_id is not None and b'"ByteFallback"' in decoder}
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        named_ids = {name: backend.token_to_id(token) for name, token in parts.special_tokens.items()}
        self.bos_token_id = named_ids.get("bos_token")
        self.eos_token_id = named_ids.get("eos_token")
        eos_token_ids = dict.fromkeys([self.eos_token_id, *parts.extra_eos_token_ids])
        self.eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id is not None)
        self._chat_template = None if parts.chat_template is None else ChatTemplate(parts.chat_template)

    @classmethod
    def from_model(cls, path: Path | str | None, *, chat_template: str | None = None) -> Tokenizer | None:
        """The tokenizer of a model folder, a .gguf file or the built-in dummy ("dummy" or None).

        None for a model that has none and understands only ids. `chat_template` (text) replaces the model's own.
        Raises ConfigError if there is a tokenizer or a template that cannot be used.
        """
        parts = _find(None if path is None or str(path) == "dummy" else Path(path))
        if parts is None:
            return None
        if chat_template is not None:
            parts.chat_template = chat_template
        return cls(parts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the BOS and EOS that the model's files ask for unless add_special_tokens is False.

        As in transformers, a text that itself begins with the BOS then begins with two; a warning is logged.
        """
        ids = self._encode(text, add_special_tokens, param="prompt")
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            logger.warning("a prompt begins with %r and the tokenizer added one; add_special_tokens=false avoids it",
                           self._special_tokens["bos_token"])
        return ids

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("the text holds half of a surrogate pair, which is not Unicode", param=param) from error
        # As a batch of one: it lets go of the interpreter's lock meanwhile, so a long text holds up no other thread.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all these ids. Ids without a token (padding of the vocabulary) have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones included; U+FFFD stands for bytes that are only a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters. Empty for an id without a token."""
        if token_id in self.fallback_bytes:
            return self.fallback_bytes[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._added_ids:
            return (token or "").encode()
        if self._is_byte_level and all(char in BYTE_OF for char in token):
            return bytes(BYTE_OF[char] for char in token)
        return token.replace(SPACE, " ").encode()

    def special_token_id(self, text: str) -> int | None:
        """The id if `text` is exactly the text of one special token."""
        return self._special_ids.get(text)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens that the model's files name, such as "eos_token"."""
        return dict(self._special_tokens)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json that gives the same ids."""
        self._backend.save(str(path))

    @property
    def chat_template(self) -> str | None:
        return None if self._chat_template is None else self._chat_template.text

    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        """A conversation as the one text that the model was trained on; options are ChatTemplate.render's.

        Raises RequestError for malformed messages, and with the template's own words if it refuses them.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template, so it cannot chat: use completions, or start with "
                               "--chat-template FILE", param="messages")
        return self._chat_template.render(messages, **{**self._special_tokens, **options})

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """The ids of render_chat's text. Nothing is added: the template writes the special tokens itself."""
        return self._encode(self.render_chat(messages, **options), add_special_tokens=False, param="messages")


def _find(path: Path | None) -> TokenizerParts | None:
    if path is None:
        return dummy_tokenizer()
    if path.is_file():
        return gguf_tokenizer(path)
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is neither a model folder nor a .gguf file")
    return folder_tokenizer(path) if (path / "tokenizer.json").is_file() else None
