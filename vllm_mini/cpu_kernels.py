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
    if config.head_dim % 32 or config.hidden_size % 2 or config.intermediate_size % 2:
        return f"head_dim must be a multiple of 32 and the layers' sizes even, found {config.head_dim}, " \
               f"{config.hidden_size} and {config.intermediate_size}"
    if block_size % 16:
        return f"block_size must be a multiple of 16, found {block_size}"
    return None


class CpuKernels:
    """The compiled functions on tensors. All are bfloat16, and contiguous where not said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.lanes: int = library.vector_lanes()  # float32 numbers in a vector
        self.split_keys: int = library.split_keys()
        library.linear.argtypes = [c_void_p, c_long, c_long, c_void_p, c_long, c_void_p, c_void_p, c_int]
        library.rms_norm.argtypes = [c_void_p, c_void_p, c_float, c_long, c_long, c_void_p, c_int]
        library.rotary.argtypes = [c_void_p, c_long, c_long, c_long, c_long, c_void_p, c_void_p, c_int]
        library.silu_and_mul.argtypes = [c_void_p, c_long, c_long, c_void_p, c_int]
        library.paged_attention.argtypes = [c_void_p]
        for name in ("linear", "rms_norm", "rotary", "silu_and_mul", "paged_attention"):
            getattr(library, name).restype = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """A layer of weights [out, in] in the order in which the kernel reads them."""
        return PackedLinear(self, weight, bias)

    def linear(self, x: Tensor, panels: Tensor, num_columns: int, bias: Tensor | None) -> Tensor:
        """x [num_rows, in] through packed weights: [num_rows, num_columns]."""
        x = x.contiguous()
        out = x.new_empty(len(x), num_columns)
        self._library.linear(x.data_ptr(), len(x), x.shape[1], panels.data_ptr(), num_columns,
                             None if bias is None else bias.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of x [num_rows, size] divided by its root mean square, then multiplied by the weight [size]."""
        out = torch.empty_like(x)
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), eps, len(x), x.shape[1], out.data_ptr(),
                               torch.get_num_threads())
        return out

    def rotary_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [num_tokens, num_heads, head_dim] in place; tokens may lie apart. cos, sin: [num_tokens, 1, head_dim]."""
        self._library.rotary(x.data_ptr(), x.stride(0), *x.shape, cos.data_ptr(), sin.data_ptr(), torch.get_num_threads())

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [num_rows, 2 * size]: [num_rows, size]."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        self._library.silu_and_mul(gate_up.data_ptr(), num_rows, size, out.data_ptr(), torch.get_num_threads())
        return out

    def paged_attention(self, problem: Problem) -> None:
        self._library.paged_attention(ctypes.addressof(problem))


class PackedLinear:
    """One linear layer whose weights are in panels: [panels][in / 2][2 (even, odd columns)][lanes][2 (inputs)]."""

    def __init__(self, kernels: CpuKernels, weight: Tensor, bias: Tensor | None) -> None:
        num_columns, num_inputs = weight.shape
        num_panels = -(-num_columns // (2 * kernels.lanes))
        padded = weight.new_zeros(num_panels * 2 * kernels.lanes, num_inputs)
        padded[:num_columns] = weight
        self.panels = padded.view(num_panels, kernels.lanes, 2, num_inputs // 2, 2).permute(0, 3, 2, 1, 4).contiguous()
        self.kernels, self.num_columns, self.bias = kernels, num_columns, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.panels, self.num_columns, self.bias)


class Problem(ctypes.Structure):
    """One layer's attention as the kernel takes it; the same fields as in cpu_kernels.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "k_cache", "v_cache", "out", "slots", "tables", "units",
                                        "merges", "partials")),
        *((name, c_int64) for name in ("num_tokens", "query_stride", "key_stride", "value_stride", "num_kv_heads", "group",
                                       "head_dim", "block_size", "table_stride", "num_units", "num_merges", "num_threads")),
        ("scale", c_float),
    ]


@dataclass(frozen=True)
class UnitMetadata(AttentionMetadata):
    units: np.ndarray = None  # type: ignore[assignment]  # [num_units, 7], in the kernel's order of fields
    merges: np.ndarray = None  # type: ignore[assignment]  # [num_merges, 3]
    num_partials: int = 0


class CpuAttention:
    """Attention in place over the pages. The work is cut into units: some tokens of a sequence with all their keys, or,
    where one token looks at many keys, a fixed number of those (flash decoding, Dao et al. 2023)."""

    def __init__(self, kernels: CpuKernels, heads_per_group: int) -> None:
        self.kernels = kernels
        self.tokens_of_a_unit = max(1, ROWS_OF_A_UNIT // heads_per_group)

    def prepare(self, metadata: AttentionMetadata) -> UnitMetadata:
        split = self.kernels.split_keys
        query_lens = np.diff(metadata.query_start_loc)
        num_splits = np.where(query_lens == 1, -(-metadata.seq_lens // split), 1)
        num_tiles = -(-query_lens // self.tokens_of_a_unit)
        num_units = num_splits * num_tiles  # one of the two factors is 1
        seq = np.repeat(np.arange(len(query_lens)), num_units)  # [num_units in all], as all that follow
        index = np.arange(len(seq)) - np.repeat(num_units.cumsum() - num_units, num_units)
        is_split = num_splits[seq] > 1
        first = np.where(is_split, 0, index * self.tokens_of_a_unit)
        num_tokens = np.minimum(self.tokens_of_a_unit, query_lens[seq] - first)
        position = metadata.seq_lens[seq] - query_lens[seq] + first
        first_key = np.where(is_split, index * split, 0)
        end_key = np.where(is_split, np.minimum(position + 1, first_key + split), position + num_tokens)
        partial = np.where(is_split, is_split.cumsum() - 1, -1)
        units = np.stack([seq, metadata.query_start_loc[seq] + first, num_tokens, position, first_key, end_key, partial], 1)
        units = units[np.argsort(-num_tokens * (end_key - first_key), kind="stable")]  # the longest first
        parted = np.flatnonzero(num_splits > 1)
        counts = num_splits[parted]
        merges = np.stack([metadata.query_start_loc[parted], counts.cumsum() - counts, counts], 1)
        return UnitMetadata(**vars(metadata), units=np.ascontiguousarray(units), merges=np.ascontiguousarray(merges),
                            num_partials=int(counts.sum()))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        assert isinstance(metadata, UnitMetadata)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        group = num_heads // num_kv_heads
        output = query.new_empty(query.shape)
        partials = torch.empty(metadata.num_partials * num_heads * (2 + head_dim), dtype=torch.float32)
        pointers: list[Any] = [
            *(tensor.data_ptr() for tensor in (query, key, value, k_cache, v_cache, output, metadata.slot_mapping)),
            metadata.block_table.ctypes.data, metadata.units.ctypes.data, metadata.merges.ctypes.data, partials.data_ptr()]
        self.kernels.paged_attention(Problem(
            *pointers, num_tokens, query.stride(0), key.stride(0), value.stride(0), num_kv_heads, group, head_dim,
            metadata.block_size, metadata.block_table.shape[1], len(metadata.units), len(metadata.merges),
            torch.get_num_threads(), head_dim**-0.5 * 1.4426950408889634))
        return output
