"""From a checkpoint (safetensors folder, Hugging Face hub name, GGUF file, random numbers) to a filled model.

Knows no text and no requests. Every failure that a user can cause is a ConfigError of one line that says what was found
and what is supported. Weights go from the file straight into the model's memory, a slab at a time: loading needs little
more memory than the model itself.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from vllm_mini.config import ConfigError, LlamaConfig
from vllm_mini.gguf_file import GGUFFile, first_line, one_line_errors
from vllm_mini.llama import DUMMY_CONFIG, DummyModel, LlamaForCausalLM, randomize

__all__ = ["DUMMY_NAME", "load_config", "load_generation_config", "load_model", "resolve_model"]

DUMMY_NAME = "dummy"  # the built-in random model, wherever a model's path may stand
DUMMY_STD = 0.02  # of load_format="dummy": what models are commonly initialized with before training
SUPPORTED = ("supported: a folder with config.json and safetensors weights, a .gguf file, "
             f"a Hugging Face name org/name, or {DUMMY_NAME!r}")
HUB_FILES = ["*.json", "*.jinja", "model*.safetensors"]
HUB_TIMEOUT = 3.0  # seconds that a hub which does not answer may cost
NUM_THREADS = 2  # that read and convert tensors side by side


def resolve_model(model: str) -> Path | None:
    """Where the model lies: a folder or a .gguf file, or None for the built-in dummy. A hub name may be downloaded.

    A hub name that is in the local cache touches no network. Raises ConfigError, within seconds, for what is no model.
    """
    if model == DUMMY_NAME:
        return None
    path = Path(os.path.expanduser(model)).absolute()
    with one_line_errors(path):
        if path.is_dir():
            return _check_folder(path)
        if path.is_file() and path.suffix.lower() == ".gguf":
            return path
        if path.is_file():
            raise ConfigError(f"this is a file, but not a .gguf file; {SUPPORTED}")
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model, re.ASCII) and path.suffix.lower() != ".gguf":
        return _find_on_hub(model)
    raise ConfigError(f"{model!r} does not exist; {SUPPORTED}")


def _check_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    names = sorted(entry.name for entry in folder.iterdir())
    found = f"it holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "it is empty"
    raise ConfigError(f"{folder} has no config.json ({found}); {SUPPORTED}")


def _find_on_hub(name: str) -> Path:
    """The folder of a hub model: from the local cache if it is there, otherwise downloaded into it."""
    import huggingface_hub  # half a second that a local model need not spend

    download = partial(huggingface_hub.snapshot_download, name, allow_patterns=HUB_FILES)
    try:
        return _check_folder(Path(download(local_files_only=True)))
    except (OSError, ValueError):  # not in the cache, not all of it, or not a name that the hub allows
        pass
    try:
        _call_within(HUB_TIMEOUT, partial(huggingface_hub.HfApi().model_info, name, timeout=HUB_TIMEOUT))
        folder = Path(download())
    except Exception as error:  # the client raises its own errors, its HTTP library's and the system's
        raise ConfigError(f"{name!r} is not a local folder, and the Hugging Face hub did not provide it "
                          f"({first_line(error)}); {SUPPORTED}") from error
    return _check_folder(folder)


def _call_within(seconds: float, call: Callable[[], Any]) -> None:
    """Run `call`; raise what it raises, or TimeoutError. A client's own timeout does not cover looking up its host."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
            outcome.set_result(None)
        except Exception as error:  # raised again by result()
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    outcome.result(timeout=seconds)


def load_config(path: Path | str | None) -> LlamaConfig:
    """The network's shape, from config.json or GGUF metadata, without reading weights. None is the built-in dummy."""
    if path is None or path == DUMMY_NAME:
        return DUMMY_CONFIG
    path = Path(path)
    if path.is_file():
        with one_line_errors(path):
            return _gguf_config(GGUFFile(path))
    with one_line_errors(path / "config.json"):
        return LlamaConfig.from_dict(_read_json(path / "config.json"))


def load_generation_config(path: Path | str | None) -> dict[str, Any]:
    """The model's own sampling defaults, from generation_config.json; {} where there is none."""
    if path is None or path == DUMMY_NAME or not (Path(path) / "generation_config.json").is_file():
        return {}
    return _read_json(Path(path) / "generation_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    with one_line_errors(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ConfigError(f"expected a JSON object, found a {type(content).__name__}")
    return content


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    copy_to: Callable[[Tensor], object]  # fills a tensor of that shape, of any dtype, on any device


def load_model(path: Path | str | None, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device,
               load_format: str = "auto", seed: int = 0) -> LlamaForCausalLM:
    """A model for inference, its weights in `dtype` on `device`; `path` is resolve_model's and `config` load_config's.

    load_format "dummy" draws the weights from `seed` instead of reading them. Raises ConfigError for weights that are
    missing, not expected or of another shape, and for files that are missing or damaged.
    """
    if path is None or path == DUMMY_NAME:
        return DummyModel(seed, dtype=dtype, device=device)
    if load_format == "dummy":
        model = LlamaForCausalLM(config, dtype=dtype, device=device)
        randomize(model, seed, DUMMY_STD)
        return model
    path = Path(path)
    found_format = "gguf" if path.is_file() else "safetensors"
    if load_format not in ("auto", found_format):
        raise ConfigError(f"load_format is {load_format!r}, but {path} is for {found_format!r}")
    stored = _open_gguf(path, config) if path.is_file() else _open_safetensors(path)
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        # Hugging Face's rule: a head in the file counts, whatever the config says, and may stand in for the embedding.
        stored.setdefault("model.embed_tokens.weight", stored["lm_head.weight"])
        config = replace(config, tie_word_embeddings=False)
    model = LlamaForCausalLM(config, dtype=dtype, device=device)
    tensors = model.checkpoint_tensors()
    _check_tensors(path, tensors, stored)
    with ThreadPoolExecutor(NUM_THREADS) as executor, one_line_errors(path):
        list(executor.map(lambda name: stored[name].copy_to(tensors[name]), tensors))
    return model


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError unless the file holds just the model's tensors: one ignored or made up spoils every output."""
    problems = [f"lacks {name} {list(tensors[name].shape)}" for name in tensors if name not in stored]
    problems += [f"holds {name} {list(stored[name].shape)}, which the model has no place for"
                 for name in stored if name not in tensors]
    problems += [f"holds {name} of shape {list(stored[name].shape)}, expected {list(tensors[name].shape)}"
                 for name in tensors if name in stored and stored[name].shape != tensors[name].shape]
    if problems:
        more = f"; and {len(problems) - 3} more like these" if len(problems) > 3 else ""
        raise ConfigError(f"{path} does not fit its config: it {'; it '.join(problems[:3])}{more}")


def _open_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of every shard that model.safetensors.index.json names."""
    paths = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not paths[0].is_file() and index.is_file():
        with one_line_errors(index):
            shard_of = dict(_read_json(index)["weight_map"])  # name of a tensor -> name of a file
            paths = [folder / name for name in sorted(set(shard_of.values()))]
    elif not paths[0].is_file():
        suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in suffixes)[:5]
        raise ConfigError(f"{folder} has no model.safetensors (found {', '.join(names) or 'no weights'}); {SUPPORTED}")
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of its {len(paths)} weight files: {', '.join(missing[:3])}")
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        with one_line_errors(path):
            stored |= _open_shard(path)
    return stored


def _open_shard(path: Path) -> dict[str, StoredTensor]:
    file = safe_open(path, framework="pt")  # only maps the file
    stored: dict[str, StoredTensor] = {}
    for name in file.keys():  # noqa: SIM118 - it is no dict
        if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints; it follows from the config
            continue
        tensor = file.get_slice(name)
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ConfigError(f"{name} is stored as {tensor.get_dtype()}; supported: F64, F32, F16 and BF16")
        stored[name] = StoredTensor(tuple(tensor.get_shape()), partial(_copy_from_shard, file, name))
    return stored


def _copy_from_shard(file: Any, name: str, target: Tensor) -> None:
    target.copy_(file.get_tensor(name))


GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"  # not a weight: what each rotary frequency is divided by
GGUF_UNSUPPORTED = ("expert_count", "attention.sliding_window", "attention.scale", "attention.clamp_kqv", "logit_scale",
                    "embedding_scale", "residual_scale")


def _open_gguf(path: Path, config: LlamaConfig) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file under their Hugging Face names, queries and keys in Hugging Face's order of rows."""
    file = GGUFFile(path)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in file.tensors.items():
        if name == GGUF_ROPE_FACTORS:
            continue
        # llama.cpp rotates neighbouring dimensions of a head, so its converter interleaves the two halves of each head.
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        num_heads = next((heads[part] for part in name.split(".") if part in heads), None)
        reorder = partial(_join_halves, num_heads=num_heads) if num_heads else None
        stored[_checkpoint_name(name)] = StoredTensor(tensor.shape, partial(file.copy_to, name, reorder=reorder))
    return stored


def _checkpoint_name(name: str) -> str:
    """blk.0.attn_q.weight as model.layers.0.self_attn.q_proj.weight; a name that Llama does not have stays as it is."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in GGUF_NAMES:
        return name
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{GGUF_NAMES[found[2]]}.{found[3]}"


def _join_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows 0, 2, 4, ... of each head, then 1, 3, 5, ...: rows is [num_heads * head_dim, anything]."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])  # [num_heads, head_dim / 2, 2, anything]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _gguf_config(file: GGUFFile) -> LlamaConfig:
    """GGUF metadata in the names of config.json. Raises ConfigError for anything this engine would have to ignore."""
    values = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    if values.get("general.architecture") != "llama":
        raise ConfigError(f"architecture {values.get('general.architecture')!r} is not supported; supported: 'llama'")
    if values.get("split.count", 1) > 1:
        raise ConfigError(f"this is one of {values['split.count']} parts of a model; supported: a single file")
    for key in GGUF_UNSUPPORTED:
        if values.get(key):
            raise ConfigError(f"llama.{key} = {values[key]!r} is not supported")
    eos_token_ids = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config = LlamaConfig.from_dict({
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": values.get("embedding_length"),
        "intermediate_size": values.get("feed_forward_length"),
        "num_hidden_layers": values.get("block_count"),
        "num_attention_heads": values.get("attention.head_count"),
        "num_key_value_heads": values.get("attention.head_count_kv"),
        "head_dim": values.get("attention.key_length"),
        "max_position_embeddings": values.get("context_length"),
        "rms_norm_eps": values.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.get("rope.freq_base"),
        "rope_scaling": _gguf_rope_scaling(file, values),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": [token_id for token_id in eos_token_ids if token_id is not None],
    })
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, config.head_dim) != config.head_dim:
            raise ConfigError(f"llama.{key} = {values[key]} is not supported; supported: head_dim, {config.head_dim}")
    return config


def _gguf_rope_scaling(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    rope_type = values.get("rope.scaling.type", "none")
    scaling: dict[str, Any] = {} if rope_type == "none" else {"rope_type": rope_type,
                                                              "factor": values.get("rope.scaling.factor")}
    if "rope.scale_linear" in values:  # how old files say it
        scaling = {"rope_type": "linear", "factor": values["rope.scale_linear"]}
    if GGUF_ROPE_FACTORS not in file.tensors or rope_type not in ("none", "linear"):
        return scaling
    factors = torch.empty(file.tensors[GGUF_ROPE_FACTORS].shape)  # [head_dim / 2]
    file.copy_to(GGUF_ROPE_FACTORS, factors)
    return {"rope_type": "factors", "factors": (factors * scaling.get("factor", 1.0)).tolist()}
