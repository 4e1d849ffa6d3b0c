"""Text to ids (chat template included), and ids back to text that can be streamed. Knows no tensors and no requests.

Built from a folder (tokenizer.json), from the metadata of a GGUF file alone, or in code for the dummy model. Ids and
rendered chats equal those of Hugging Face's transformers for the same files.
"""

from __future__ import annotations

import codecs
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vllm_mini.config import ConfigError
from vllm_mini.sequence import RequestError

__all__ = ["OutputText", "Tokenizer", "normalize_messages", "read_gguf_metadata"]

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks, in a rendered chat, where the last message is to be continued
SPACE = "\u2581"  # what SentencePiece writes for a space
CHATML = ("{% for message in messages %}"
          "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA3_PRE_TYPES = ("llama-bpe", "llama3", "llama-v3")
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
                "pad_token": "padding_token_id"}
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types in a GGUF file


def _byte_alphabet() -> list[str]:
    """The printable character that GPT-2's byte-level BPE writes for each byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(spare)) for value in range(256)]


BYTE_ALPHABET = _byte_alphabet()
BYTE_OF = {char: value for value, char in enumerate(BYTE_ALPHABET)}


class Tokenizer:
    """Text to ids (chat template included) and ids back to text. Made by from_model, unchanged afterwards.

    `special_tokens` maps names such as "bos_token" to texts: what chat templates may use, and what ends a text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str],
        extra_eos_token_ids: Sequence[int | None] = (), chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may ask for both, to train with
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._hidden_ids = frozenset(self._special_ids.values())
        decoder = backend.decoder.__getstate__() if backend.decoder else b""
        self._is_byte_level = b'"ByteLevel"' in decoder
        byte_tokens = ((value, backend.token_to_id(f"<0x{value:02X}>")) for value in range(256))
        self._fallback_bytes = {token_id: bytes([value]) for value, token_id in byte_tokens
                                if token_id is not None and b'"ByteFallback"' in decoder}
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        named_ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
        self.bos_token_id = named_ids.get("bos_token")
        self.eos_token_id = named_ids.get("eos_token")
        eos_token_ids = dict.fromkeys([self.eos_token_id, *extra_eos_token_ids])
        self.eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id is not None)
        self.chat_template = chat_template
        self._template = None if chat_template is None else _compile_template(chat_template)

    @classmethod
    def from_model(cls, path: Path | str | None, *, chat_template: str | None = None) -> Tokenizer | None:
        """The tokenizer of a model folder, a .gguf file or the built-in dummy ("dummy" or None).

        None for a model that has none and understands only ids. `chat_template` (text) replaces the model's own.
        Raises ConfigError if there is a tokenizer or a template that cannot be used.
        """
        if path is None or str(path) == "dummy":
            return _dummy_tokenizer(chat_template)
        path = Path(path)
        if path.is_file():
            return _gguf_tokenizer(path, chat_template)
        if not path.is_dir():
            raise ConfigError(f"{str(path)!r} is neither a model folder nor a .gguf file")
        return _folder_tokenizer(path, chat_template) if (path / "tokenizer.json").is_file() else None

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
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all these ids. Ids without a token (padding of the vocabulary) have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones included; U+FFFD stands for bytes that are only a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters. Empty for an id without a token."""
        if token_id in self._fallback_bytes:
            return self._fallback_bytes[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._added_ids:
            return (token or "").encode()
        if self._is_byte_level and all(char in BYTE_OF for char in token):
            return bytes(BYTE_OF[char] for char in token)
        return token.replace(SPACE, " ").encode()

    def special_token_id(self, text: str) -> int | None:
        """The id if `text` is exactly the text of one special token."""
        return self._special_ids.get(text)

    def render_chat(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None, **template_kwargs: Any,
    ) -> str:
        """A conversation as the one text that the model was trained on.

        Raises RequestError for malformed messages, and with the template's own words if it refuses them.
        """
        if self._template is None:
            raise RequestError("this model has no chat template, so it cannot chat: use completions, or start with "
                               "--chat-template FILE", param="messages")
        chat = normalize_messages(messages)
        final_text = chat[-1]["content"]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message and add_generation_prompt cannot both be true",
                                   param="continue_final_message")
            chat[-1]["content"] += CONTINUE_TAG
        variables = {**self._special_tokens, "documents": None, **template_kwargs, "messages": chat,
                     "tools": None if tools is None else list(tools), "add_generation_prompt": add_generation_prompt}
        text = _render(self._template, variables)
        return _cut_to_continue(text, final_text) if continue_final_message else text

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """The ids of render_chat's text. Nothing is added: the template writes the special tokens itself."""
        return self._encode(self.render_chat(messages, **options), add_special_tokens=False, param="messages")


# ---- chat: messages and templates ----


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates expect them: new dictionaries with known roles and plain text as content.

    Text parts are joined with a newline, as vLLM does; "developer" becomes "system"; the null content of an assistant
    message with tool calls becomes ""; the arguments of tool calls are objects; other keys pass unless they are null.
    Raises RequestError whose `param` is the path to the fault.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        _refuse("messages", "must be a list of at least one message")
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _refuse(path: str, complaint: str) -> NoReturn:
    raise RequestError(f"{path} {complaint}", param=path)


def _normalize_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(path, "must be an object with a role and a content")
    role, content, tool_calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        _refuse(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {role!r:.40}" if role else "is missing")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = "system" if role == "developer" else role
    if tool_calls:
        if not isinstance(tool_calls, (list, tuple)):
            _refuse(f"{path}.tool_calls", "must be a list")
        normal["tool_calls"] = [_parse_arguments(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(tool_calls)]
    if content is None and role == "assistant" and tool_calls:
        content = ""
    normal["content"] = _content_text(content, f"{path}.content")
    return normal


def _content_text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        _refuse(path, "must be a string or a list of text parts" if content is not None else "is missing")
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            _refuse(f"{path}[{index}]", 'must be {"type": "text", "text": "..."}: this model reads only text')
    return "\n".join(part["text"] for part in content)


def _parse_arguments(call: Any, path: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates expect; OpenAI sends them as JSON text."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": function}
    except (KeyError, TypeError, ValueError, RecursionError):
        _refuse(path, "must be an object with a function, whose arguments are JSON")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's words for training; here its body is rendered and that is all."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _compile_template(text: str) -> jinja2.Template:
    """A template, in transformers' environment for them. It is code from a model's files: hence the sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError) as error:
        raise ConfigError("chat template: it is nested too deeply") from error


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render for a client's eyes: the RequestError shows the template's own words, but nothing of Python."""
    try:
        return template.render(variables)
    except SecurityError as error:
        raise RequestError("the chat template does what its sandbox forbids", param="messages") from error
    except jinja2.TemplateError as error:
        raise RequestError(f"chat template: {error.message}", param="messages") from error
    except Exception as error:  # whatever an expression in the template can raise
        raise RequestError("the chat template cannot render these messages", param="messages") from error


def _cut_to_continue(rendered: str, final_text: str) -> str:
    """End the rendered chat where the final message ends, without what the template writes after it."""
    tag = CONTINUE_TAG.strip()
    if tag not in rendered or final_text.strip() not in rendered:
        raise RequestError("the chat template leaves out or changes the final message, so it cannot be continued",
                           param="continue_final_message")
    at = rendered.rindex(tag)
    # A template that strips its messages has stripped the tag's space too, and would have stripped the text's.
    return rendered[:at] if rendered.startswith(CONTINUE_TAG, at) else rendered[:at].rstrip()


# ---- where tokenizers come from ----


@contextmanager
def _blame(what: object) -> Iterator[None]:
    """Turn anything that goes wrong inside into a ConfigError of one line about `what`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{what} cannot be read (damaged or incomplete?): {reason}") from error


def _add_around(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make encode() put `bos` before and `eos` after a text, where they are given and exist, and nothing else."""
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    special = [(token, token_id) for token, token_id in ids.items() if token_id is not None]
    known = dict(special)
    single = [token for token in (bos, "$A", eos) if token == "$A" or token in known]
    backend.post_processor = processors.TemplateProcessing(single, None, special)


def _dummy_tokenizer(chat_template: str | None) -> Tokenizer:
    """One token for each byte, its id the byte's value, and three special tokens."""
    backend = tokenizers.Tokenizer(models.BPE({char: value for value, char in enumerate(BYTE_ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"}, extra_eos_token_ids=[256],
                     chat_template=CHATML if chat_template is None else chat_template)


def _folder_tokenizer(folder: Path, chat_template: str | None) -> Tokenizer:
    with _blame(folder / "tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    values = {name: config.get(name) for name in SPECIAL_NAMES}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    special = {name: content for name, content in contents.items() if isinstance(content, str)}
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(content, normalized=False) for content in special.values()
                                if content not in known and backend.token_to_id(content) is not None])
    if backend.post_processor is None:  # else it decides, as in transformers 5, whatever the configuration says
        _add_around(backend, *(special.get(f"{name}_token") if config.get(f"add_{name}_token") else None
                               for name in ("bos", "eos")))
    if chat_template is None:
        chat_template = _own_template(folder, config.get("chat_template"))
    return Tokenizer(backend, special_tokens=special, chat_template=chat_template)


def _own_template(folder: Path, configured: Any) -> str | None:
    """A folder's template: chat_template.jinja before the one in tokenizer_config.json; of several, the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        with _blame(file):
            return file.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    with _blame(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The keys and values of a GGUF file (versions 2 and 3, little-endian). Raises ConfigError if it is none.

    The gguf package's reader makes an array of every string: 2.5 s for a vocabulary of 49,152, here 0.1 s.
    """
    with _blame(path), path.open("rb") as file:
        magic, version, _, num_values = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("not a GGUF file of version 2 or 3")
        return {_read_value(file, GGUF_STRING): _read_value(file, _read_scalar(file, "I")) for _ in range(num_values)}


def _read_scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == GGUF_STRING:
        return file.read(_read_scalar(file, "Q")).decode()
    if kind != GGUF_ARRAY:
        return _read_scalar(file, GGUF_SCALARS[kind])
    item_kind, length = _read_scalar(file, "I"), _read_scalar(file, "Q")
    return [_read_value(file, item_kind) for _ in range(length)]


def _gguf_tokenizer(path: Path, chat_template: str | None) -> Tokenizer | None:
    metadata = read_gguf_metadata(path)
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = ggml.get("model", "none")
    if model in ("none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise ConfigError(f"{path}: tokenizer model {model!r} is not supported; supported: {', '.join(builders)}")
    with _blame(f"{path}: its tokenizer"):
        backend = builders[model](ggml)
        special = {name: ggml["tokens"][ggml[key]] for name, key in GGUF_SPECIAL.items() if ggml.get(key) is not None}
        types = list(zip(ggml["tokens"], ggml.get("token_type") or ()))
        control = [special.get("bos_token"), special.get("eos_token"),
                   *(token for token, kind in types if kind in (UNKNOWN, CONTROL))]
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(control) if token])
        backend.add_tokens([AddedToken(token, normalized=False) for token, kind in types if kind == USER_DEFINED])
    adds_bos = ggml.get("add_bos_token", model == "llama" or ggml.get("pre") in LLAMA3_PRE_TYPES)  # as llama.cpp does
    adds_eos = ggml.get("add_eos_token", False)
    _add_around(backend, special.get("bos_token") if adds_bos else None, special.get("eos_token") if adds_eos else None)
    return Tokenizer(backend, special_tokens=special, extra_eos_token_ids=[ggml.get("eot_token_id")],
                     chat_template=metadata.get("tokenizer.chat_template") if chat_template is None else chat_template)


def _byte_level_bpe(ggml: dict[str, Any]) -> tokenizers.Tokenizer:
    pre = ggml.get("pre", "default")
    is_llama3 = pre in LLAMA3_PRE_TYPES
    splitters: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)], "gpt-2": [], "default": [],
        **{name: [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")] for name in LLAMA3_PRE_TYPES}}
    if pre not in splitters:
        raise ConfigError(f"tokenizer.ggml.pre = {pre!r} is not supported; supported: {', '.join(splitters)}")
    vocab = {token: token_id for token_id, token in enumerate(ggml["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in ggml["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=is_llama3))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splitters[pre], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_llama3)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(ggml: dict[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: it always joins the pair whose joint token scores best, so the scores give the merges."""
    tokens = ggml["tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    splits = ((token[:at], token[at:], score)
              for token, score in zip(tokens, ggml["scores"]) for at in range(1, len(token)))
    merges = [(left, right, score) for left, right, score in splits if left in vocab and right in vocab]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)  # ties as in transformers
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(models.BPE(
        vocab, [merge[:2] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_space = ggml.get("add_space_prefix", True)
    prepend, strip = ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if adds_space else ([], [])
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    spaces = decoders.Replace(SPACE, " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


# ---- text that grows ----


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
        self._hidden_ids = tokenizer._hidden_ids if skip_special_tokens else frozenset()
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
        if token_id in self._tokenizer._fallback_bytes:
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
                if len(context) >= self.MAX_CONTEXT and token_id not in self._tokenizer._fallback_bytes:
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
