"""One device: its model, its K/V memory, the copies between pools. Does not know queues, requests or text."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from vllm_mini.block_manager import Transfers
from vllm_mini.config import ConfigError, EngineConfig, LlamaConfig
from vllm_mini.cpu_kernels import CpuAttention, CpuKernels, KernelsUnavailable, load_kernels, unsupported
from vllm_mini.llama import LlamaForCausalLM, can_pack
from vllm_mini.loader import load_model
from vllm_mini.model_runner import ModelRunner
from vllm_mini.paged_attention import AttentionBackend, TorchAttention, allocate_kv_cache, copy_blocks
from vllm_mini.scheduler import ScheduledSequence, SchedulerOutput, SequenceOutput
from vllm_mini.sequence import SamplingParams, Sequence

__all__ = ["Worker", "choose_device"]

logger = logging.getLogger(__name__)

DEFAULT_KV_SHARE = 0.25  # of free host memory
DEFAULT_KV_LIMIT = 4 * 2**30  # bytes
NATIVE_BF16 = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")  # CPU features, in PyTorch's names


class Worker:
    """Loads the model on its device, makes the K/V pools and executes steps."""

    def __init__(
        self, config: EngineConfig, model_config: LlamaConfig, path: Path | None, *, device: torch.device,
        max_num_batched_tokens: int, vocab_size: int,
    ) -> None:
        """ConfigError when the weights or the memory cannot be had. The largest step decides what memory it needs."""
        self.config = config
        self.max_num_batched_tokens = max_num_batched_tokens
        self.model_config = model_config
        self.device = device
        self.dtype = _choose_dtype(config.dtype, self.device)
        self.vocab_size = vocab_size
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), _usable_cpus()))
        kernels = self._load_kernels()
        self.model: LlamaForCausalLM = load_model(
            path, model_config, dtype=self.dtype, device=self.device, load_format=config.load_format, seed=config.seed)
        self.attention: AttentionBackend = TorchAttention()
        if kernels is not None:
            self.attention = CpuAttention(kernels, model_config.num_attention_heads, model_config.num_key_value_heads)
            self.model.use_kernels(kernels)
        if config.pack_weights and self.device.type == "cpu":
            self._pack_weights(kernels)
        self.num_blocks = config.num_kv_blocks or self._num_blocks_from_memory()
        self.kv_cache = self._allocate(self.num_blocks, self.device)
        self.host_kv_cache = self._allocate(config.num_host_blocks, torch.device("cpu"))
        self.runner = ModelRunner(self.model, self.kv_cache, self.attention, vocab_size=vocab_size)

    @property
    def block_bytes(self) -> int:
        """2 (K, V) x layers x K/V heads x head_dim x bytes of one number x block_size."""
        shape = self.model_config
        per_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * self.dtype.itemsize
        return per_token * self.config.block_size

    def execute(self, output: SchedulerOutput) -> list[SequenceOutput]:
        """Make the step's copies, then compute and sample; one answer for each scheduled sequence."""
        self._transfer(output.transfers)
        return self.runner.execute(output.scheduled) if output.scheduled else []

    def _load_kernels(self) -> CpuKernels | None:
        """The C++ kernels where they are wanted and can be had; the log says why not."""
        wanted = self.config.attention_backend
        if wanted == "torch" or self.device.type != "cpu":
            return None
        try:
            problem = unsupported(self.model_config, self.dtype, self.config.block_size)
            if problem is None:
                return load_kernels()
        except KernelsUnavailable as error:
            problem = str(error)
        if wanted == "cpp":
            raise ConfigError(f"attention_backend 'cpp' cannot be used: {problem}")
        logger.info("CPU kernels: plain PyTorch, because %s", problem)
        return None

    def _pack_weights(self, kernels: CpuKernels | None) -> None:
        if kernels is not None:
            self.model.pack(kernels.pack_linear)
        elif can_pack(self.dtype):
            self.model.pack()
        else:
            logger.info("linear layers: plain, because this PyTorch has no packed ones for %s here", self.dtype)

    def _transfer(self, transfers: Transfers) -> None:
        copy_blocks(self.kv_cache, self.host_kv_cache, transfers.swap_out)
        copy_blocks(self.host_kv_cache, self.kv_cache, transfers.swap_in)
        copy_blocks(self.kv_cache, self.kv_cache, transfers.copies)

    def _allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        shape = self.model_config
        try:
            return allocate_kv_cache(
                num_blocks, self.config.block_size, num_layers=shape.num_hidden_layers,
                num_kv_heads=shape.num_key_value_heads, head_dim=shape.head_dim, dtype=self.dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; on a CPU it is a plain RuntimeError
            raise ConfigError(f"no memory for {num_blocks} KV blocks of {self.block_bytes:,} bytes on {device}") from error

    def _num_blocks_from_memory(self) -> int:
        if self.device.type == "cuda":
            memory = self._free_cuda_memory()
        else:
            memory = self.config.kv_cache_memory or int(min(_free_host_memory() * DEFAULT_KV_SHARE, DEFAULT_KV_LIMIT))
        if memory < self.block_bytes:
            raise ConfigError(f"{max(memory, 0):,} bytes are left for the KV cache, but one block of "
                              f"{self.config.block_size} tokens takes {self.block_bytes:,}")
        return memory // self.block_bytes

    def _free_cuda_memory(self) -> int:
        """Bytes for K/V: the allowed share of the device, less what the weights and the largest step take at their peak."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.reset_peak_memory_stats(self.device)
        profile_bytes = self._profile_largest_step()
        peak = torch.cuda.max_memory_allocated(self.device) - profile_bytes
        torch.cuda.empty_cache()
        logger.info("profiling run: weights and activations take %.2f GiB at their peak", peak / 2**30)
        return int(total * self.config.gpu_memory_utilization) - peak

    def _profile_largest_step(self) -> int:
        """Run one step of max_num_batched_tokens on a pool of its own; returns the bytes of that pool."""
        length = min(self.max_num_batched_tokens, self.model_config.max_position_embeddings)
        num_seqs = -(-self.max_num_batched_tokens // length)
        blocks_each = -(-length // self.config.block_size)
        pool = self._allocate(num_seqs * blocks_each, self.device)
        runner = ModelRunner(self.model, pool, self.attention, vocab_size=self.vocab_size)
        scheduled = []
        for row in range(num_seqs):
            seq = Sequence(seq_id=row, request_id="profile", token_ids=[0] * length, seed=0, max_num_tokens=length + 1,
                           params=SamplingParams(top_p=0.9),
                           block_table=list(range(row * blocks_each, (row + 1) * blocks_each)))
            scheduled.append(ScheduledSequence(seq, 0, length, length, 1))
        runner.execute(scheduled)
        torch.cuda.synchronize(self.device)
        return pool.nbytes


def choose_device(name: str) -> torch.device:
    """What a setting means here. ConfigError for a device that is unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch finds no CUDA device here")
    return device


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # Without such instructions bfloat16 is emulated and up to 2.4 times as slow as float32.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if any(capabilities.get(name) for name in NATIVE_BF16) else torch.float32


def _usable_cpus() -> int:
    """CPUs that this process may use: affinity and, in a container, its quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        usable = min(usable, max(1, round(int(quota[0]) / int(quota[1]))))
    return usable


def _free_host_memory() -> int:
    """Bytes that could be used now; a container's limit counts."""
    free = psutil.virtual_memory().available
    limit = _read_cgroup("memory.max")
    if limit.isdigit():
        free = min(free, int(limit) - int(_read_cgroup("memory.current") or 0))
    return free


def _read_cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""
