"""Every setting of a run, checked once and then frozen. Knows no tensors, no files, no environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ConfigError", "EngineConfig", "LlamaConfig", "SchedulerConfig"]

ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


class ConfigError(ValueError):
    """A setting, a model folder or a weights file that cannot be used; the message names the value and the limit."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of one Llama network, in the names of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    # {"rope_type": "linear", "factor": ...} and so on; "factors" (a divisor for each frequency) comes from GGUF files.
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, found {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} must be a positive number, found {value!r}")
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                              f"num_key_value_heads ({self.num_key_value_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is not supported; "
                              f"supported: {', '.join(ACTIVATIONS)}")
        rope_type = self.rope_scaling.get("rope_type", "default")
        if rope_type not in (*ROPE_TYPES, "factors"):
            raise ConfigError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        num_factors = len(self.rope_scaling["factors"]) if rope_type == "factors" else self.head_dim // 2
        if num_factors != self.head_dim // 2:
            raise ConfigError(f"head_dim {self.head_dim} needs {self.head_dim // 2} rope factors, found {num_factors}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a config.json. Raises ConfigError for anything this engine would have to ignore to go on."""
        architectures = config.get("architectures") or ["LlamaForCausalLM"]
        model_type = config.get("model_type", "llama")
        if "LlamaForCausalLM" not in architectures or model_type != "llama":
            raise ConfigError(f"architecture {', '.join(architectures)} (model_type {model_type!r}) is not supported; "
                              "supported: LlamaForCausalLM")
        for name, neutral in (("quantization_config", None), ("sliding_window", None), ("partial_rotary_factor", 1.0)):
            if config.get(name) and config[name] != neutral:
                raise ConfigError(f"{name} = {config[name]!r:.100} is not supported; "
                                  "supported: unquantized full-attention Llama checkpoints")
        missing = [name for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                     "num_attention_heads") if config.get(name) is None]
        if missing:
            raise ConfigError(f"the config lacks {', '.join(missing)}")
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim")
        if head_dim is None:
            if config["hidden_size"] % num_heads:
                raise ConfigError(f"hidden_size ({config['hidden_size']}) is not a multiple of "
                                  f"num_attention_heads ({num_heads}) and no head_dim is given")
            head_dim = config["hidden_size"] // num_heads
        optional = {name: config[name] for name in (
            "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias",
            "hidden_act") if config.get(name) is not None}
        rope_theta, rope_scaling = _read_rope(config)
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            eos_token_ids=token_id_tuple(config.get("eos_token_id")),
            **optional,
        )


def _read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """rope_theta and scaling from either spelling: rope_parameters (transformers 5) or rope_theta + rope_scaling."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_theta = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                                                "original_max_position_embeddings")}
    for name in needed.get(rope_type, ()):
        if not isinstance(scaling.get(name), (int, float)) or not scaling[name] > 0:
            raise ConfigError(f"rope type {rope_type!r} needs a positive {name}, found {scaling.get(name)!r}")
    return rope_theta, {"rope_type": rope_type, **scaling}


def token_id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """eos_token_id as files write it (absent, null, one id or a list) as a tuple of ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler decides by."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    enable_continuous_batching: bool = True  # False: nobody joins before all that run have finished, to see what it costs
    preemption_mode: Literal["recompute", "swap"] = "recompute"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _check_positive(name, getattr(self, name))
        if self.preemption_mode not in ("recompute", "swap"):
            raise ConfigError(f"preemption_mode must be 'recompute' or 'swap', found {self.preemption_mode!r}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_model_len "
                f"({self.max_model_len}) and chunked prefill is off, so long prompts could never run: raise "
                "max_num_batched_tokens, lower max_model_len or turn chunked prefill on")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a user can set for one engine; the names are vLLM's where the meaning is the same."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None  # tokens; None: what the model was trained for
    allow_long_max_model_len: bool = False  # accept more than the model was trained for
    block_size: int = 16  # tokens
    num_kv_blocks: int | None = None  # None: from the memory below
    num_host_blocks: int = 0  # blocks in host memory that preemption_mode="swap" may use
    kv_cache_memory: int | None = None  # bytes, CPU; None: a share of free memory
    gpu_memory_utilization: float = 0.9  # share of the whole device, CUDA
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: 512 on a CPU, 2,048 elsewhere, the context without chunked prefill
    enable_chunked_prefill: bool = True
    enable_continuous_batching: bool = True  # False: static batching, to see what it costs
    enable_prefix_caching: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    generation_config: Literal["auto", "none"] = "auto"  # "none": ignore the model's sampling defaults
    chat_template: str | None = None  # template text that replaces the model's own
    attention_backend: Literal["auto", "torch", "cpp"] = "auto"  # cpp: the kernels for bfloat16 on a CPU
    pack_weights: bool = True  # on a CPU, where it can be had: twice as fast from 4 rows on
    num_threads: int | None = None  # CPU threads; None: those this process may use

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs"):
            _check_positive(name, getattr(self, name))
        for name in ("max_num_batched_tokens", "max_model_len", "num_kv_blocks", "kv_cache_memory", "num_threads"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if isinstance(self.num_host_blocks, bool) or not isinstance(self.num_host_blocks, int) or self.num_host_blocks < 0:
            raise ConfigError(f"num_host_blocks must be 0 or more, found {self.num_host_blocks!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], found {self.gpu_memory_utilization!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        _check_choice("attention_backend", self.attention_backend, ("auto", "torch", "cpp"))
        _check_choice("generation_config", self.generation_config, ("auto", "none"))

    def resolve_max_model_len(self, trained_len: int) -> int:
        """The context length in tokens, given what the model was trained for. Raises ConfigError beyond it."""
        if self.max_model_len is None:
            return trained_len
        if self.max_model_len > trained_len and not self.allow_long_max_model_len:
            raise ConfigError(f"max_model_len ({self.max_model_len}) is more than the {trained_len} positions the model "
                              "was trained for (max_position_embeddings); lower it, or set allow_long_max_model_len "
                              "to try anyway")
        return self.max_model_len


    def resolve_token_budget(self, device_type: str, max_model_len: int) -> int:
        """Tokens of a step: as given, else so many that a step of them on such a device does not take long."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        usual = 512 if device_type == "cpu" else 2048
        return usual if self.enable_chunked_prefill else max(usual, max_model_len)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, found {value!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; found {value!r}")
