"""Thousands of requests made from our own OpenAPI document: no 5xx, and no answer that the document does not describe.

That every request which the document allows is accepted is not asked: limits that depend on the model are not in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import serve

MIN_REQUESTS = 5000


def test_answers_keep_to_the_document():
    with serve("--model", "dummy", "--no-live") as url:
        command = [str(Path(sys.executable).parent / "st"), "run", f"{url}/openapi.json", "--max-examples", "660",
                   "--phases", "coverage,fuzzing", "--exclude-checks", "positive_data_acceptance", "--request-timeout", "60",
                   "--seed", "1", "--no-color", "--continue-on-failure"]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) generated", result.stdout)[1]) >= MIN_REQUESTS, result.stdout[-2000:]
