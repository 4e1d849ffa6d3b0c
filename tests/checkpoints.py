"""Tiny checkpoints for tests, each with the Hugging Face model that says what it must compute.

    checkpoint = write_checkpoint(tmp_path, num_key_value_heads=1)     # a folder: config.json + model.safetensors
    model = load(checkpoint.path)                                      # ours, float32
    assert_same_logits(model, checkpoint.reference, [1, 2, 3])

A keyword that a factory does not know goes to transformers.LlamaConfig. The defaults (TINY) are 2 layers, hidden size
64, 4 heads over 2 K/V heads, 512 tokens, no end token, and weights from N(0, 0.2): large enough that tokens far back
change the output and a wrong K/V entry, position or norm shows. Norm weights are random too. Nothing uses a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_mini.llama import LlamaForCausalLM
from vllm_mini.loader import load_config, load_model
from vllm_mini.paged_attention import AttentionMetadata, TorchAttention, allocate_kv_cache

transformers.utils.logging.disable_progress_bar()

TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None,
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # after the 256 bytes: ids 256, 257, 258
CHAT_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
                 "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


class Checkpoint(NamedTuple):
    path: Path  # a folder, or a .gguf file
    reference: transformers.LlamaForCausalLM  # float32, the same weights


def make_reference(*, seed: int = 0, std: float = 0.2, **config: Any) -> transformers.LlamaForCausalLM:
    """A random Hugging Face Llama; every weight, bias and norm is drawn from the seed."""
    settings = {**TINY, **config}
    # transformers' config refuses a hidden size that the heads do not divide; its model does not mind.
    hidden_size = settings.pop("hidden_size")
    hf_config = transformers.LlamaConfig(hidden_size=settings["num_attention_heads"] * 2, **settings)
    hf_config.head_dim = settings.get("head_dim") or hidden_size // settings["num_attention_heads"]
    hf_config.hidden_size = hidden_size
    hf_config.architectures = ["LlamaForCausalLM"]
    model = transformers.LlamaForCausalLM(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.data.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model


def write_checkpoint(
    folder: Path, *, seed: int = 0, std: float = 0.2, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB",
    **config: Any,
) -> Checkpoint:
    """A folder as transformers saves it: config.json and model.safetensors (in shards if max_shard_size is small).

    With another dtype, the reference keeps the rounded weights, in float32.
    """
    reference = cast_parameters(make_reference(seed=seed, std=std, **config), dtype)
    hf_config, hidden_size = reference.config, reference.config.hidden_size
    hf_config.hidden_size = hf_config.num_attention_heads  # see make_reference
    reference.save_pretrained(folder, max_shard_size=max_shard_size)
    hf_config.hidden_size = hidden_size
    edit_config(folder, hidden_size=hidden_size)
    return Checkpoint(folder, cast_parameters(reference, torch.float32))


def cast_parameters(model: transformers.LlamaForCausalLM, dtype: torch.dtype) -> transformers.LlamaForCausalLM:
    """As from_pretrained(dtype=...) does; model.to(dtype) would round the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def write_scripted_checkpoint(
    folder: Path, next_tokens: dict[int, int], *, vocab_size: int = 64, **config: Any,
) -> Checkpoint:
    """A model whose greedy next token is a function of the last token alone (SCRIPT); without an entry: token + 1."""
    hidden_size = config.pop("hidden_size", vocab_size)
    reference = make_reference(vocab_size=vocab_size, hidden_size=hidden_size, **config)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1)
        reference.model.embed_tokens.weight.copy_(torch.eye(vocab_size, hidden_size))
        reference.lm_head.weight.zero_()
        for token in range(vocab_size):
            reference.lm_head.weight[next_tokens.get(token, (token + 1) % vocab_size), token] = 1
    reference.save_pretrained(folder)
    return Checkpoint(folder, reference)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change config.json; a value of ... (Ellipsis) removes the entry."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change model.safetensors: `change` gets all its tensors and may add, replace or delete."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json of the 256 bytes and SPECIAL_TOKENS (so vocab_size >= 259), with a ChatML template."""
    byte_tokens = _byte_tokens()
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [
            {"id": 256 + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for i, token in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {token: i for i, token in enumerate(byte_tokens)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}))


def _byte_tokens() -> list[str]:
    """The visible character that GPT-2's byte-level BPE writes for each byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


GGUF_TENSOR_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, reference: transformers.LlamaForCausalLM, *, quantization: str = "F32", tokenizer: bool = False,
    architecture: str = "llama", metadata: dict[str, Any] | None = None,
    edit: Callable[[dict[str, np.ndarray]], object] | None = None,
) -> Checkpoint:
    """The reference as llama.cpp's convert_hf_to_gguf.py writes it: renamed, Q and K rows permuted, RoPE in metadata.

    quantization names a gguf.GGMLQuantizationType for the matrices (F32, F16, BF16, Q8_0, Q4_1, ...); vectors stay F32.
    tokenizer adds the tokens of write_byte_tokenizer as a "gpt2" vocabulary. metadata adds or replaces keys (None
    removes one); edit may change the float32 arrays, under their GGUF names, before they are quantized.
    """
    config = reference.config
    arrays = _gguf_arrays(reference)
    if edit is not None:
        edit(arrays)
    writer = gguf.GGUFWriter(path, architecture)
    values = {**_gguf_metadata(config, architecture), **(_gguf_tokenizer() if tokenizer else {}), **(metadata or {})}
    for key, value in values.items():
        _add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, array in arrays.items():
        stored_kind = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, stored_kind), raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(path, reference)


def _gguf_arrays(reference: transformers.LlamaForCausalLM) -> dict[str, np.ndarray]:
    config = reference.config
    arrays = {}
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if "q_proj" in name:
            array = _permute(array, config.num_attention_heads)
        if "k_proj" in name:
            array = _permute(array, config.num_key_value_heads)
        module, _, kind = name.rpartition(".")
        layer = ""
        if module.startswith("model.layers."):
            _, _, index, module = module.split(".", 3)
            layer = f"blk.{index}."
        arrays[f"{layer}{GGUF_TENSOR_NAMES[module]}.{kind}"] = array
    if config.rope_parameters["rope_type"] == "llama3":
        default = 1 / config.rope_parameters["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        scaled = reference.model.rotary_emb.inv_freq.double().numpy()
        arrays["rope_freqs.weight"] = (default / scaled).astype(np.float32)
    return arrays


def _permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py's LlamaModel.permute."""
    return (array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
            .swapaxes(1, 2).reshape(array.shape))


def _gguf_metadata(config: transformers.LlamaConfig, architecture: str) -> dict[str, Any]:
    rope = config.rope_parameters
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.get("factor", 1))}
    values = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size,
        **(linear if rope["rope_type"] == "linear" else {}),
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _gguf_tokenizer() -> dict[str, Any]:
    tokens = [*_byte_tokens(), *SPECIAL_TOKENS]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL_TOKENS),  # normal, control
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],  # a list must have an entry to have a type
        "tokenizer.ggml.eos_token_id": 258, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}[type(value)]
    add(key, value)


def load(path: Path | str | None, *, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> LlamaForCausalLM:
    """Our model from a checkpoint, on the CPU."""
    return load_model(path, load_config(path), dtype=dtype, device=torch.device("cpu"), load_format=load_format)


def model_logits(model: LlamaForCausalLM, token_ids: Sequence[int], *, start: int = 0) -> Tensor:
    """Our logits of one sequence, in one step: [num_tokens, vocab_size]; `start` is the first token's position."""
    config, num_tokens, block_size = model.config, len(token_ids), 16
    num_blocks = -(-num_tokens // block_size)
    kv_cache = allocate_kv_cache(num_blocks, block_size, num_layers=config.num_hidden_layers,
                                 num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
                                 dtype=model.model.norm.weight.dtype, device=torch.device("cpu"))
    attention = TorchAttention()
    metadata = attention.prepare(AttentionMetadata(
        query_start_loc=np.array([0, num_tokens]), seq_lens=np.array([num_tokens]),
        block_table=np.arange(num_blocks)[None], slot_mapping=torch.arange(num_tokens), block_size=block_size))
    with torch.inference_mode():
        hidden = model(torch.tensor(token_ids), torch.arange(start, start + num_tokens), kv_cache, attention, metadata)
        return model.compute_logits(hidden)


def reference_logits(reference: transformers.LlamaForCausalLM, token_ids: Sequence[int], *, start: int = 0) -> Tensor:
    """Hugging Face's logits of the same, whole sequence at once: float32 [num_tokens, vocab_size]."""
    positions = torch.arange(start, start + len(token_ids))[None]
    with torch.inference_mode():
        return reference(torch.tensor([list(token_ids)]), position_ids=positions, use_cache=False).logits[0].float()


def assert_same_logits(model: LlamaForCausalLM, reference: transformers.LlamaForCausalLM, token_ids: Sequence[int], *,
                       tolerance: float = 1e-4, start: int = 0) -> None:
    """Equal within `tolerance`, absolute and relative, at every position."""
    expected = reference_logits(reference, token_ids, start=start)
    torch.testing.assert_close(model_logits(model, token_ids, start=start), expected, rtol=tolerance, atol=tolerance)


def random_tokens(num_tokens: int, *, vocab_size: int = 512, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
