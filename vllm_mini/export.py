"""Any model that can be loaded, written as a Hugging Face folder: what other engines need to run the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_mini.config import ConfigError, LlamaConfig
from vllm_mini.loader import load_config, load_generation_config, load_model, resolve_model
from vllm_mini.tokenizer import Tokenizer

__all__ = ["EXPORT_DTYPES", "export_hf"]

EXPORT_DTYPES = ("bfloat16", "float16", "float32")


def export_hf(model: str, folder: Path, *, dtype: str = "bfloat16") -> Path:
    """Write `model` (anything that can be served) into `folder`, its weights rounded to `dtype`; returns the folder.

    Raises ConfigError for a model that cannot be loaded or said in config.json, and for a folder that is not empty;
    OSError where it cannot be written.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(EXPORT_DTYPES)}; found {dtype!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder, and nothing is overwritten: give another, or empty it")
    path = resolve_model(model)
    config = load_config(path)
    generation_config = load_generation_config(path)
    tokenizer = Tokenizer.from_model(path)
    filled = load_model(path, config, dtype=getattr(torch, dtype), device=torch.device("cpu"))
    config = filled.config  # a head in the file may have untied the embeddings
    settings = _config_json(config, dtype, tokenizer)
    # The parts of a fused layer are views of one tensor: the library wants memory that nobody shares.
    tensors = {name: tensor.clone() for name, tensor in filled.checkpoint_tensors().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
    _write_json(folder / "generation_config.json", {**_token_ids(config, tokenizer), **generation_config})
    _write_json(folder / "config.json", settings)  # the last: a folder with it is complete
    return folder


def _config_json(config: LlamaConfig, dtype: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What LlamaConfig.from_dict reads, in names that transformers 4 and 5 and vLLM understand."""
    values = {name: value for name, value in asdict(config).items() if name not in ("rope_scaling", "eos_token_ids")}
    scaling = dict(config.rope_scaling)
    rope_type = scaling.pop("rope_type", "default")
    if rope_type == "factors":
        raise ConfigError("its rotary frequencies are divided by factors of their own, which config.json cannot say")
    rope = None if rope_type == "default" else {"rope_type": rope_type, **scaling}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **values, "rope_scaling": rope,
            "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": dtype,
            **_token_ids(config, tokenizer)}


def _token_ids(config: LlamaConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The ids that begin and end a text, as both of the model's configurations have them."""
    eos_token_ids = [*dict.fromkeys([*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())])]
    ends: Any = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None
    return {"bos_token_id": tokenizer.bos_token_id if tokenizer else None, "eos_token_id": ends}


def _tokenizer_config(config: LlamaConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The class that takes tokenizer.json as it is: what to add around a text is said there."""
    template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens, **template,
            "clean_up_tokenization_spaces": False, "model_max_length": config.max_position_embeddings}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
