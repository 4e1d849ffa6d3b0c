"""Step times under two settings of the engine, both in one process, taking turns.

    python benchmarks/compare_settings.py dtype=float32,pack_weights=false dtype=float32
    python benchmarks/compare_settings.py dtype=bfloat16,attention_backend=torch dtype=bfloat16,attention_backend=cpp
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from vllm_mini import LLM, SamplingParams
from vllm_mini.fetch import fetch_default_model

WORKLOADS = ((1, 16, 24), (8, 16, 16), (32, 16, 12), (1, 512, 1))  # sequences, prompt tokens, output tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs=2, metavar="NAME=VALUE,...", help="settings of EngineConfig")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path = str(fetch_default_model())
    engines = [LLM(path, kv_cache_memory=2**29, enable_prefix_caching=False, **read_settings(text))
               for text in args.settings]
    for num_seqs, prompt_len, output_len in WORKLOADS:
        prompts = [[(7 * row + 13 * column) % 40_000 + 10 for column in range(prompt_len)] for row in range(num_seqs)]
        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds + 1):  # the first warms up
            for llm, own_times in zip(engines, times):
                started = time.perf_counter()
                llm.generate(prompts, params, progress=False)
                own_times.append(1000 * (time.perf_counter() - started) / output_len)
        first, second = (statistics.median(own_times[1:]) for own_times in times)
        spread = ", ".join(f"{min(own_times[1:]):.0f}-{max(own_times[1:]):.0f}" for own_times in times)
        print(f"{num_seqs:>2} sequences, {prompt_len:>3} in, {output_len:>2} out: {first:.0f} ms a step, then {second:.0f}, "
              f"ratio {second / first:.2f} ({spread})", flush=True)


def read_settings(text: str) -> dict[str, Any]:
    settings = dict(item.split("=", 1) for item in text.split(","))
    return {name: json.loads(value) if value[:1].isdigit() or value in ("true", "false", "null") else value
            for name, value in settings.items()}


if __name__ == "__main__":
    main()
