"""Step times with packed and with plain linear weights, both engines in one process, taking turns.

    python benchmarks/packed_weights.py --dtype float32
"""

from __future__ import annotations

import argparse
import statistics
import time

from vllm_mini import LLM, SamplingParams
from vllm_mini.fetch import fetch_default_model

WORKLOADS = ((1, 16, 24), (8, 16, 16), (32, 16, 12), (1, 512, 1))  # sequences, prompt tokens, output tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path = str(fetch_default_model())
    engines = {packed: LLM(path, dtype=args.dtype, kv_cache_memory=2**29, pack_weights=packed, enable_prefix_caching=False)
               for packed in (False, True)}
    for num_seqs, prompt_len, output_len in WORKLOADS:
        prompts = [[(7 * row + 13 * column) % 40_000 + 10 for column in range(prompt_len)] for row in range(num_seqs)]
        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds + 1):  # the first warms up
            for packed, llm in engines.items():
                started = time.perf_counter()
                llm.generate(prompts, params, progress=False)
                times[packed].append(1000 * (time.perf_counter() - started) / output_len)
        plain, packed_time = (statistics.median(times[packed][1:]) for packed in (False, True))
        spread = ", ".join(f"{name} {min(times[packed][1:]):.0f}-{max(times[packed][1:]):.0f}"
                           for name, packed in (("plain", False), ("packed", True)))
        print(f"{num_seqs:>2} sequences, {prompt_len:>3} in, {output_len:>2} out: {plain:.0f} ms a step plain, "
              f"{packed_time:.0f} packed, ratio {packed_time / plain:.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
