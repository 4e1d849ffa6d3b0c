"""The Llama network as a function of tokens, positions and K/V storage. Knows no sequences, no files, no sampling.

The module and parameter names, the order of roundings and the RoPE layout are those of Hugging Face's Llama, so that a
checkpoint means here what it means there. Shapes: T tokens of all sequences of a step in one row, H query heads,
KVH key/value heads, D = head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mini.config import LlamaConfig
from vllm_mini.cpu_kernels import CpuKernels
from vllm_mini.paged_attention import AttentionBackend, AttentionMetadata

__all__ = ["ACTIVATION_FUNCTIONS", "DUMMY_CONFIG", "DummyModel", "LlamaForCausalLM", "randomize", "rope_frequencies"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh, "relu": F.relu,
}


PackLinear = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]  # from weight and bias to the layer itself


class Linear(nn.Linear):
    """A linear layer whose weights start unset: they are about to be read, and drawing them first takes seconds."""

    packed: Callable[[Tensor], Tensor] | None = None

    def reset_parameters(self) -> None:
        pass

    def pack(self, pack_linear: PackLinear) -> None:
        """Replace the filled weight by a copy in the order in which a CPU reads it best."""
        self.packed = pack_linear(self.weight, self.bias)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.packed is None else self.packed(x)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this PyTorch has oneDNN's packed matrix products, for a CPU and this dtype. They are not public."""
    try:
        layer = pack_for_onednn(torch.ones(16, 16, dtype=dtype, device="cpu"), None)
        return layer(torch.ones(2, 16, dtype=dtype, device="cpu")).eq(16).all().item() is True
    except (AttributeError, RuntimeError):  # NotImplementedError, for another dtype or CPU, is a RuntimeError
        return False


def pack_for_onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """F.linear with this weight [out, in], packed for any number of rows; what torch.compile's freezing calls."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class Embedding(nn.Embedding):
    """A token embedding whose weights start unset."""

    def reset_parameters(self) -> None:
        pass


class FusedLinear(Linear):
    """Linear layers that read the same input, as one matrix product.

    `parts` maps the name that each has in a checkpoint to its number of rows; `split_parts` gives those slices back.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = dict(parts)

    def split_parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Views of this layer's weight or bias, one for each part."""
        return dict(zip(self.parts, parameter.split(list(self.parts.values())), strict=True))


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich 2019), in float32 and rounded before the weight is applied."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))
        self.kernels: CpuKernels | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.rms_norm(hidden, self.weight, self.eps)
        # Giving rms_norm the weight would round once less than the models were trained with.
        return self.weight * F.rms_norm(hidden, self.weight.shape, eps=self.eps)  # [T, hidden_size]


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """The angle that each pair of dimensions turns by per position, in radians: float32 [head_dim / 2].

    "linear" is position interpolation (Chen et al. 2023); "llama3" keeps short wavelengths, stretches long ones by
    `factor` and blends between; "factors" divides each frequency by its own number.
    """
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (dims / config.head_dim)
    scaling = config.rope_scaling
    rope_type = scaling.get("rope_type", "default")
    if rope_type == "linear":
        return frequencies / scaling["factor"]
    if rope_type == "factors":
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
    if rope_type == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wavelengths = 2 * math.pi / frequencies  # in tokens
        # 0 where a wavelength is longer than the trained context / low, 1 where it is shorter than context / high.
        blend = ((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies
    return frequencies


class RotaryEmbedding(nn.Module):
    """Rotary position embeddings (RoFormer, Su et al. 2021). Computed, not looked up: no position is out of range."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # Not a registered buffer: model.to(bfloat16) would round the frequencies, and far positions would go wrong.
        self.frequencies = rope_frequencies(config)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and sines of every position's angles, each [T, 1, D]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * self.frequencies  # [T, D / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [T, 1, D]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x [T, heads, D] by its angle; GPT-NeoX's pairing, which Hugging Face uses."""
    first, second = x.chunk(2, dim=-1)  # [T, heads, D / 2] each
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Self-attention with grouped K/V heads (Ainslie et al. 2023); storing and attending are the backend's part."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(config.hidden_size, {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
                                    bias=config.attention_bias, dtype=dtype, device=device)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.attention_bias, dtype=dtype, device=device)
        self.kernels: CpuKernels | None = None

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], key_cache: Tensor, value_cache: Tensor,
                attention: AttentionBackend, metadata: AttentionMetadata) -> Tensor:
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)  # [T, H + 2 KVH, D]
        turned = qkv[:, : -self.num_kv_heads]  # queries and keys in one go: [T, H + KVH, D]
        if self.kernels is not None:
            self.kernels.rotary_(turned, *rope)
        else:
            turned = apply_rope(turned, *rope)
        query, key = turned.split((self.num_heads, self.num_kv_heads), dim=1)
        value = qkv[:, -self.num_kv_heads :]  # [T, KVH, D]
        output = attention.forward(query, key, value, key_cache, value_cache, metadata)  # [T, H, D]
        return self.o_proj(output.flatten(1))  # [T, hidden_size]


class LlamaMLP(nn.Module):
    """The gated feed-forward layer (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[config.hidden_act]
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, dtype=dtype,
                                device=device)
        self.kernels: CpuKernels | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(hidden)  # [T, 2 * intermediate_size]
        if self.kernels is not None and self.activation is F.silu:
            return self.down_proj(self.kernels.silu_and_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)  # [T, intermediate_size] each
        return self.down_proj(self.activation(gate) * up)  # [T, hidden_size]


class LlamaDecoderLayer(nn.Module):
    """Attention, then feed-forward, each on the normalized input and added to what came in."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = LlamaAttention(config, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = LlamaMLP(config, dtype, device)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], key_cache: Tensor, value_cache: Tensor,
                attention: AttentionBackend, metadata: AttentionMetadata) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, rope, key_cache, value_cache, attention, metadata)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [T, hidden_size]


class LlamaModel(nn.Module):
    """The network up to the final norm."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, dtype, device) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBackend,
                metadata: AttentionMetadata) -> Tensor:
        hidden = self.embed_tokens(input_ids)  # [T, hidden_size]
        rope = self.rotary_emb(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rope, kv_cache[0, index], kv_cache[1, index], attention, metadata)
        return self.norm(hidden)


class LlamaForCausalLM(nn.Module):
    """A Llama for inference: no gradients, weights unset until somebody fills `checkpoint_tensors()`."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, dtype, device)
        # Tied: one module under two names, which PyTorch lists once.
        self.lm_head = self.model.embed_tokens if config.tie_word_embeddings else Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        self.packed_head: Callable[[Tensor], Tensor] | None = None  # of tied embeddings
        self.requires_grad_(False).eval()

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBackend,
                metadata: AttentionMetadata) -> Tensor:
        """From token ids and their positions, both int64 [T], to the normed hidden states [T, hidden_size].

        kv_cache is [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]; the backend writes the K and V of
        these tokens into it, then attends. The query, key and value it is given are views, not always contiguous.
        """
        return self.model(input_ids, positions, kv_cache, attention, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores of the given rows [R, hidden_size]: float32 [R, vocab_size]."""
        if self.packed_head is not None:
            return self.packed_head(hidden).float()
        if isinstance(self.lm_head, Linear):
            return self.lm_head(hidden).float()
        return F.linear(hidden, self.lm_head.weight).float()

    def pack(self, pack_linear: PackLinear = pack_for_onednn) -> None:
        """Reorder all filled weights for a CPU; checkpoint_tensors() has no linear layers afterwards. See can_pack."""
        if self.config.tie_word_embeddings:  # the embedding itself still has to be read by rows
            self.packed_head = pack_linear(self.lm_head.weight, None)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(pack_linear)

    def use_kernels(self, kernels: CpuKernels) -> None:
        """Compute the small operations between the linear layers with these kernels too."""
        for module in self.modules():
            if isinstance(module, (RMSNorm, LlamaAttention, LlamaMLP)):
                module.kernels = kernels

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every weight under its name in a Hugging Face checkpoint, as a view: copying into it fills the model."""
        tensors: dict[str, Tensor] = {}
        for path, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(module, FusedLinear):
                    tensors[f"{path}.{name}"] = parameter
                    continue
                parent = path.rpartition(".")[0]
                tensors |= {f"{parent}.{part}.{name}": view for part, view in module.split_parts(parameter).items()}
        return tensors


def randomize(model: LlamaForCausalLM, seed: int, std: float) -> None:
    """Fill every weight from N(0, std), the norms with ones; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.checkpoint_tensors().items():
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        else:
            tensor.copy_(torch.empty(tensor.shape, device="cpu").normal_(0, std, generator=generator))


DUMMY_CONFIG = LlamaConfig(  # its tokens: 256 bytes, then <|endoftext|>, <|im_start|>, <|im_end|>
    vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, eos_token_ids=(258, 256),
)


class DummyModel(LlamaForCausalLM):
    """A tiny random Llama over bytes, for demos and tests without weights. It babbles, but exactly.

    The weights are large (std 0.2), so that tokens far back change the output and a wrong K/V entry shows.
    """

    def __init__(self, seed: int = 0, *, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu") -> None:
        super().__init__(DUMMY_CONFIG, dtype=dtype, device=device)
        randomize(self, seed, std=0.2)
