"""Where tokenizers come from: a folder's tokenizer.json, the metadata of a GGUF file alone, or code for the dummy model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vllm_mini.config import ConfigError
from vllm_mini.gguf_file import GGUFFile

__all__ = ["BYTE_ALPHABET", "TokenizerParts", "dummy_tokenizer", "folder_tokenizer", "gguf_tokenizer"]

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPACE = "\u2581"  # what SentencePiece writes for a space
CHATML = ("{% for message in messages %}"
          "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA3_PRE_TYPES = ("llama-bpe", "llama3", "llama-v3")
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GGUF_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
                "pad_token": "padding_token_id"}
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types in a GGUF file


def _byte_alphabet() -> list[str]:
    """The printable character that GPT-2's byte-level BPE writes for each byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(spare)) for value in range(256)]


BYTE_ALPHABET = _byte_alphabet()


@dataclass
class TokenizerParts:
    """What a tokenizer is made of: the library's object, and what the model's files say beside it."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # names such as "bos_token" to texts: for chat templates, and what ends a text
    extra_eos_token_ids: tuple[int | None, ...] = ()
    chat_template: str | None = None


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


def dummy_tokenizer() -> TokenizerParts:
    """One token for each byte, its id the byte's value, and three special tokens."""
    backend = tokenizers.Tokenizer(models.BPE({char: value for value, char in enumerate(BYTE_ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return TokenizerParts(backend, {"eos_token": "<|im_end|>"}, (256,), CHATML)


def folder_tokenizer(folder: Path) -> TokenizerParts:
    """Raises ConfigError for files that cannot be used."""
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
    return TokenizerParts(backend, special, chat_template=_own_template(folder, config.get("chat_template")))


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


def gguf_tokenizer(path: Path) -> TokenizerParts | None:
    """None for a file without one. Raises ConfigError for one that cannot be used."""
    metadata = GGUFFile(path).metadata
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
    return TokenizerParts(backend, special, (ggml.get("eot_token_id"),), metadata.get("tokenizer.chat_template"))


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
