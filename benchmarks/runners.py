"""OpenVINO GenAI or transformers in a process of their own, for benchmarks/engines.py. Runs with their environment's Python.

A line of JSON when it is ready, then for each line of requests one of answers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Answers = list[tuple[float, float, float, int]]  # sent, first token, last token, number of tokens


def openvino(model: str, dtype: str) -> Callable[[list[Any], int], Answers]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, True  # GiB
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 512, True
    precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": precision})

    def run(requests: list[Any], concurrency: int) -> Answers:
        started = time.perf_counter()
        waiting = list(enumerate(requests))
        running: dict[int, tuple[Any, float, list[float]]] = {}
        answers: dict[int, tuple[float, float, float, int]] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                index, (prompt, max_tokens) = waiting.pop(0)
                config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
                handle = pipeline.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
                running[index] = (handle, time.perf_counter() - started, [])
            pipeline.step()
            now = time.perf_counter() - started
            for index, (handle, sent, times) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        times += [now] * len(output.generated_ids)
                if len(times) >= requests[index][1]:
                    answers[index] = (sent, times[0], times[-1], len(times))
                    del running[index]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [answers[index] for index in range(len(requests))]

    return run


def transformers(model: str, dtype: str) -> Callable[[list[Any], int], Answers]:
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(requests: list[Any], concurrency: int) -> Answers:
        """Batches that nobody joins or leaves: each runs until its longest answer is done."""
        started = time.perf_counter()
        answers: Answers = []
        for at in range(0, len(requests), concurrency):
            batch = requests[at : at + concurrency]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            length = max(max_tokens for _, max_tokens in batch)
            times: list[float] = []

            def note(_ids: Any, scores: Any, times: list[float] = times) -> Any:
                times.append(time.perf_counter() - started)
                return scores

            with torch.inference_mode():
                llama.generate(ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False,
                               pad_token_id=0, logits_processor=[note])
            answers += [(0.0, times[0], times[max_tokens - 1], max_tokens) for _, max_tokens in batch]
        return answers

    return run


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed does not disturb the answers
    run = {"openvino": openvino, "transformers": transformers}[sys.argv[1]](sys.argv[2], sys.argv[3])
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"answers": run(order["requests"], order["concurrency"])}), file=out, flush=True)


if __name__ == "__main__":
    main()
