"""The kernels of cpu_kernels.cpp behind the interfaces that plain PyTorch has here too: attention, linear layers, small
operations. bfloat16 on a CPU only. Compiled on first use for this CPU, in about two seconds, and kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_mini.config import LlamaConfig
from vllm_mini.paged_attention import AttentionMetadata

__all__ = ["CpuAttention", "CpuKernels", "KernelsUnavailable", "build_kernels", "load_kernels", "unsupported"]

SOURCE = Path(__file__).with_suffix(".cpp")
CACHE = Path("~/.cache/vllm_mini/kernels")
COMPILERS = ("g++", "c++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
ROWS_OF_A_UNIT = 96  # query tokens x heads of a group: the more, the less often a key is read; the fewer, the more units
SPLIT_KEYS = 1024  # that one unit reads


class KernelsUnavailable(RuntimeError):
    """Why the kernels cannot be had here, in words for a log."""


def load_kernels(cache: Path = CACHE) -> CpuKernels:
    """The kernels for this CPU, compiled unless an earlier start did that. Raises KernelsUnavailable."""
    path = build_kernels(cache.expanduser())
    try:
        return CpuKernels(ctypes.CDLL(str(path)))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error


def build_kernels(cache: Path) -> Path:
    """The compiled library in `cache`, whose name changes with the source, the flags, the compiler and the CPU."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelsUnavailable(f"no C++ compiler ({' or '.join(COMPILERS)}) was found")
    cpu: tuple[Any, ...] = (
        platform.machine(), torch.backends.cpu.get_cpu_capability(), getattr(torch.cpu, "get_capabilities", dict)())
    key = hashlib.sha256(repr((SOURCE.read_bytes(), FLAGS, Path(compiler).resolve(), cpu)).encode()).hexdigest()[:16]
    path = cache / f"cpu_kernels-{key}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # whoever else builds it now replaces it by the same
            built = Path(folder, path.name)
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], check=True, capture_output=True, text=True,
                           timeout=120)
            built.replace(path)
    except subprocess.CalledProcessError as error:
        raise KernelsUnavailable(f"{compiler} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"they could not be built in {cache}: {error}") from error
    return path


def unsupported(config: LlamaConfig, dtype: torch.dtype, block_size: int) -> str | None:
    """What keeps the kernels from running such a model, if anything does."""
    if dtype != torch.bfloat16:
        return f"they compute in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim % 32 or config.head_dim > 256 or config.hidden_size % 2 or config.intermediate_size % 2:
        return f"head_dim must be a multiple of 32 up to 256 and the layers' sizes even, found {config.head_dim}, " \
               f"{config.hidden_size} and {config.intermediate_size}"
    if config.num_attention_heads // config.num_key_value_heads > ROWS_OF_A_UNIT:
        return f"at most {ROWS_OF_A_UNIT} query heads may share a KV head, found " \
               f"{config.num_attention_heads // config.num_key_value_heads}"
    if block_size % 16:
        return f"block_size must be a multiple of 16, found {block_size}"
    return None


class CpuKernels:
    """The compiled functions on tensors. All are bfloat16, and contiguous where not said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.lanes: int = library.vector_lanes()  # float32 numbers in a vector
        self.input_dtype = {2: torch.bfloat16, 4: torch.float32}[library.input_bytes()]  # that `linear` reads
        library.linear.argtypes = [c_void_p, c_long, c_long, c_void_p, c_long, c_void_p, c_int]
        library.rms_norm.argtypes = [c_void_p, c_void_p, c_float, c_long, c_long, c_void_p, c_int]
        library.rotary.argtypes = [c_void_p, c_long, c_long, c_long, c_long, c_void_p, c_void_p, c_int]
        library.silu_and_mul.argtypes = [c_void_p, c_long, c_long, c_void_p, c_int]
        library.paged_attention.argtypes = [c_void_p]
        for name in ("linear", "rms_norm", "rotary", "silu_and_mul", "paged_attention"):
            getattr(library, name).restype = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """A layer of weights [out, in] in the order in which the kernel reads them."""
        return PackedLinear(self, weight, bias)

    def linear(self, x: Tensor, panels: Tensor, num_columns: int) -> Tensor:
        """x [num_rows, in] through packed weights: [num_rows, num_columns]."""
        out = x.new_empty(len(x), num_columns)
        x = x.to(self.input_dtype).contiguous()
        self._library.linear(x.data_ptr(), len(x), x.shape[1], panels.data_ptr(), num_columns, out.data_ptr(),
                             torch.get_num_threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of x [num_rows, size] divided by its root mean square, then multiplied by the weight [size]."""
        out = torch.empty_like(x)
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), eps, len(x), x.shape[1], out.data_ptr(),
                               torch.get_num_threads())
        return out

    def rotary_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [num_tokens, num_heads, head_dim] in place; tokens may lie apart. cos, sin: [num_tokens, 1, head_dim]."""
        self._library.rotary(x.data_ptr(), x.stride(0), *x.shape, cos.data_ptr(), sin.data_ptr(),
                             torch.get_num_threads())

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [num_rows, 2 * size]: [num_rows, size]."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        self._library.silu_and_mul(gate_up.data_ptr(), num_rows, size, out.data_ptr(), torch.get_num_threads())
        return out

    def paged_attention(self, problem: Problem) -> None:
        self._library.paged_attention(ctypes.addressof(problem))


class PackedLinear:
    """One linear layer whose weights are in panels: [panels][in / 2][2 (halves)][lanes][2 (inputs)]."""

    def __init__(self, kernels: CpuKernels, weight: Tensor, bias: Tensor | None) -> None:
        num_columns, num_inputs = weight.shape
        num_panels = -(-num_columns // (2 * kernels.lanes))
        padded = weight.new_zeros(num_panels * 2 * kernels.lanes, num_inputs)
        padded[:num_columns] = weight
        self.panels = padded.view(num_panels, 2, kernels.lanes, num_inputs // 2, 2).permute(0, 3, 1, 2, 4).contiguous()
        self.kernels, self.num_columns, self.bias = kernels, num_columns, bias

    def __call__(self, x: Tensor) -> Tensor:
        out = self.kernels.linear(x, self.panels, self.num_columns)
        return out if self.bias is None else out.add_(self.bias)


class Problem(ctypes.Structure):
    """One layer's attention as the kernel takes it; the same fields as in cpu_kernels.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "k_cache", "v_cache", "out", "slots", "tables", "units",
                                        "rows")),
        *((name, c_int64) for name in ("num_tokens", "query_stride", "key_stride", "value_stride", "num_kv_heads", "group",
                                       "head_dim", "block_size", "table_stride", "num_units", "row_size", "num_threads")),
        ("scale", c_float),
    ]


@dataclass(frozen=True)
class UnitMetadata(AttentionMetadata):
    units: np.ndarray = None  # type: ignore[assignment]  # [num_units, 7], in the kernel's order of fields
    num_rows: int = 0  # of softmax: query tokens x query heads, summed over the units


class CpuAttention:
    """Attention in place over the pages. The work is cut into units: some query tokens of a sequence and at most SPLIT_KEYS
    of their keys, so that one long sequence keeps all cores busy (flash decoding, Dao et al. 2023). Where the cuts are
    depends on a token's position and its chunk only, never on what else is in the batch."""

    def __init__(self, kernels: CpuKernels, num_heads: int, num_kv_heads: int) -> None:
        self.kernels, self.num_heads = kernels, num_heads
        self.tokens_of_a_unit = max(1, ROWS_OF_A_UNIT * num_kv_heads // num_heads)

    def prepare(self, metadata: AttentionMetadata) -> UnitMetadata:
        query_lens = np.diff(metadata.query_start_loc)
        seq, tile = _count_up(-(-query_lens // self.tokens_of_a_unit))
        first = tile * self.tokens_of_a_unit
        num_tokens = np.minimum(self.tokens_of_a_unit, query_lens[seq] - first)
        position = metadata.seq_lens[seq] - query_lens[seq] + first
        end_key = position + num_tokens
        tile, split = _count_up(-(-end_key // SPLIT_KEYS))
        seq, num_tokens, first_key = seq[tile], num_tokens[tile], split * SPLIT_KEYS
        rows = num_tokens * self.num_heads
        units = np.stack([seq, metadata.query_start_loc[seq] + first[tile], num_tokens, position[tile], first_key,
                          np.minimum(end_key[tile], first_key + SPLIT_KEYS), rows.cumsum() - rows], 1)
        return UnitMetadata(**vars(metadata), units=np.ascontiguousarray(units), num_rows=int(rows.sum()))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        assert isinstance(metadata, UnitMetadata)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, row_size = key.shape[1], head_dim + self.kernels.lanes
        output = query.new_empty(query.shape)
        rows = torch.empty(metadata.num_rows * row_size, dtype=torch.float32)
        pointers: list[Any] = [
            *(tensor.data_ptr() for tensor in (query, key, value, k_cache, v_cache, output, metadata.slot_mapping)),
            metadata.block_table.ctypes.data, metadata.units.ctypes.data, rows.data_ptr()]
        self.kernels.paged_attention(Problem(
            *pointers, num_tokens, query.stride(0), key.stride(0), value.stride(0), num_kv_heads, num_heads // num_kv_heads,
            head_dim, metadata.block_size, metadata.block_table.shape[1], len(metadata.units), row_size,
            torch.get_num_threads(), head_dim**-0.5 * 1.4426950408889634))
        return output


def _count_up(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For [2, 3]: ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
