"""mini-vLLM: a small LLM serving engine to learn PagedAttention and continuous batching from, and to keep using."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_mini.config import ConfigError, EngineConfig
from vllm_mini.sequence import RequestError, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from vllm_mini.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "ConfigError", "EngineConfig", "RequestError", "SamplingParams", "StructuredOutputsParams",
           "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` on first use: it brings torch along, which the control plane, its tests and `--help` do without."""
    if name == "LLM":
        from vllm_mini.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
