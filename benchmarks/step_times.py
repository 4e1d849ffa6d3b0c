"""Where the time and the memory of a step go, against what this machine could do at best. Prints and writes JSON.

    python benchmarks/step_times.py --output now.json
    python benchmarks/step_times.py --only batch control --compare before.json

The breakdown wraps the calls of the engine from outside and counts each one's own time, without what it calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from vllm_mini import LLM, SamplingParams, __version__, model_runner
from vllm_mini.block_manager import BlockManager
from vllm_mini.config import SchedulerConfig
from vllm_mini.engine import LLMEngine
from vllm_mini.llama import Linear
from vllm_mini.scheduler import Scheduler, SequenceOutput
from vllm_mini.sequence import SampledToken, Sequence

Json = dict[str, Any]
GREEDY = {"temperature": 0, "ignore_eos": True}


def random_ids(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=num_tokens)


def make_llm(args: argparse.Namespace, **settings: Any) -> LLM:
    return LLM(args.model, **{"kv_cache_memory": 2**20 if args.quick else 2**30, **settings})


def decode(engine: LLMEngine, prompts: list[list[int]], num_steps: int) -> list[float]:
    """Seconds of each of num_steps steps in which all sequences decode."""
    for row, prompt in enumerate(prompts):
        engine.add_request(f"row {row}", prompt, SamplingParams(max_tokens=num_steps + len(prompts) + 8, **GREEDY))
    while engine.scheduler.waiting or any(seq.num_output_tokens == 0 for seq in engine.scheduler.running):
        engine.step()
    engine.step()  # warms up
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    for row in range(len(prompts)):
        engine.abort_request(f"row {row}")
    return times


def summary(times: list[float]) -> Json:
    return {"median_ms": 1000 * statistics.median(times), "min_ms": 1000 * min(times), "num_steps": len(times)}


# ---- the parts ----


def measure_batch(args: argparse.Namespace) -> Json:
    """Step time by batch size."""
    engine = make_llm(args, enable_prefix_caching=False).engine
    sizes, length, steps = ((1, 2), 24, 3) if args.quick else ((1, 2, 4, 8, 16, 32, 64), 256, 12)
    return {"context": length, "steps": {str(size): summary(decode(
        engine, [random_ids(length - 8, engine.vocab_size, row) for row in range(size)], steps)) for size in sizes}}


def measure_context(args: argparse.Namespace) -> Json:
    """Step time by context, batch 1; the longest first, whose prefix the others find in the cache."""
    engine = make_llm(args).engine
    lengths, steps = ((64, 16), 3) if args.quick else ((8000, 4096, 2048, 1024, 256, 64, 16), 12)
    tokens = random_ids(lengths[0], engine.vocab_size)
    found = {str(length): summary(decode(engine, [tokens[:length]], steps)) for length in lengths}
    return {"steps": dict(reversed(found.items()))}


def measure_floor(args: argparse.Namespace, dtype: torch.dtype) -> Json:
    """What memory and multiplication are good for here: bytes a second read, and operations a second."""
    size = 1024 if args.quick else 2048
    source = torch.ones(2**22 if args.quick else 2**27)
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    read = min(timed(source.sum) for _ in range(12))
    multiply = min(timed(lambda: left @ right) for _ in range(12))
    return {"read_bytes_per_s": source.nbytes / read, "flops_per_s": 2 * size**3 / multiply}


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Stopwatch:
    """Own time of every wrapped call, by name: what it calls that is wrapped too does not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # for each open call, what it spent in wrapped calls
        self._undo: list[tuple[Any, str, Any, bool]] = []

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        call = getattr(owner, attribute)

        def measured(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[name] += elapsed - self._inside.pop()
                if self._inside:
                    self._inside[-1] += elapsed

        self._undo.append((owner, attribute, call, attribute in vars(owner)))
        setattr(owner, attribute, measured)

    def unwrap(self) -> None:
        for owner, attribute, call, was_own in reversed(self._undo):
            setattr(owner, attribute, call) if was_own else delattr(owner, attribute)


def watch(engine: LLMEngine) -> Stopwatch:
    watch, worker = Stopwatch(), engine.worker
    watch.wrap(engine, "step", "the rest")
    watch.wrap(engine.scheduler, "schedule", "control plane")
    watch.wrap(engine.scheduler, "update", "control plane")
    for module in worker.model.modules():
        if module is not worker.model:
            watch.wrap(module, "forward", "linears" if isinstance(module, Linear) else "small ops")
    watch.wrap(worker.model, "compute_logits", "linears")
    for method in ("prepare", "forward"):
        watch.wrap(worker.attention, method, "attention")
    watch.wrap(model_runner, "sample", "sampling")
    return watch


def measure_breakdown(args: argparse.Namespace) -> Json:
    """Milliseconds of a step by what they went to, beside the least that bytes and operations allow."""
    engine = make_llm(args, enable_prefix_caching=False).engine
    floor = measure_floor(args, engine.worker.dtype)
    cases = (("batch 1", 1, 24), ("prefill", 0, 64)) if args.quick else (
        ("batch 1", 1, 256), ("batch 8", 8, 256), ("batch 32", 32, 256), ("prefill 512", 0, 512))
    return {"machine": floor, "cases": {name: breakdown(engine, floor, size, length, 2 if args.quick else 10)
                                        for name, size, length in cases}}


def breakdown(engine: LLMEngine, floor: Json, batch_size: int, length: int, num_steps: int) -> Json:
    """batch_size 0: one prompt's prefill."""
    watched: Stopwatch
    if batch_size:
        for row in range(batch_size):
            engine.add_request(f"row {row}", random_ids(length - 8, engine.vocab_size, row),
                               SamplingParams(max_tokens=num_steps + batch_size + 8, **GREEDY))
        while engine.scheduler.waiting or any(seq.num_output_tokens == 0 for seq in engine.scheduler.running):
            engine.step()
    else:
        num_steps = 3
    watched = watch(engine)
    try:
        start = time.perf_counter()
        for step in range(num_steps):
            if not batch_size:
                engine.add_request("prompt", random_ids(length, engine.vocab_size, step),
                                   SamplingParams(max_tokens=1, **GREEDY))
            engine.step()
        total = time.perf_counter() - start
    finally:
        watched.unwrap()
    for seq in list(engine.scheduler.unfinished()):
        engine.abort_request(seq.request_id)
    shape, kv_token = engine.worker.model_config, engine.worker.block_bytes / engine.scheduler.block_manager.block_size
    layer = shape.hidden_size * shape.head_dim * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) + (
        3 * shape.hidden_size * shape.intermediate_size)
    head = shape.hidden_size * shape.vocab_size
    num_tokens, num_rows = (batch_size, batch_size) if batch_size else (length, 1)
    weights = shape.num_hidden_layers * layer
    keys = batch_size * length if batch_size else length * length / 2  # that queries look at, all together
    linears = max((weights + head) * engine.worker.dtype.itemsize / floor["read_bytes_per_s"],
                  2 * (weights * num_tokens + head * num_rows) / floor["flops_per_s"])
    attention = max((batch_size or 1) * length * kv_token / floor["read_bytes_per_s"],
                    4 * keys * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim / floor["flops_per_s"])
    return {"step_ms": 1000 * total / num_steps,
            "parts_ms": {name: 1000 * seconds / num_steps for name, seconds in sorted(watched.seconds.items())},
            "floor_ms": {"linears": 1000 * linears, "attention": 1000 * attention}}


def fake_sequence(seq_id: int, prompt_len: int, output_len: int) -> Sequence:
    return Sequence(seq_id=seq_id, request_id=str(seq_id), token_ids=random_ids(prompt_len, 50_000, seq_id), seed=0,
                    params=SamplingParams(max_tokens=output_len, **GREEDY), max_num_tokens=prompt_len + output_len)


def measure_control(args: argparse.Namespace) -> Json:
    """schedule() + update() of 256 running sequences; the device's part is made up."""
    num_seqs, num_steps = (16, 5) if args.quick else (256, 300)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=2**20, max_model_len=8192, max_num_seqs=num_seqs),
                          BlockManager(num_seqs * 64, 16))
    for seq_id in range(num_seqs):
        scheduler.add(fake_sequence(seq_id, 256, 700))
    times = []
    for step in range(num_steps + 1):
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        results = [SequenceOutput((SampledToken(7),)) for _ in output.scheduled]
        resumed = time.perf_counter()
        scheduler.update(output, results)
        scheduler.block_manager.take_events()
        if step:  # the first is the prefill
            times.append(middle - start + time.perf_counter() - resumed)
    return {"num_seqs": num_seqs, **summary(times), "p99_ms": 1000 * sorted(times)[int(len(times) * 0.99)], "required_ms": 2}


def measure_kv(args: argparse.Namespace) -> Json:
    """Used of reserved slots over a run of mixed requests; against slots for the longest possible answer of each."""
    num_requests, max_len = (20, 2048) if args.quick else (400, 2048)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=512, max_model_len=max_len), BlockManager(1024, 16))
    drawn = random.Random(0)
    for seq_id in range(num_requests):
        prompt, output = (min(1000, max(4, int(drawn.lognormvariate(5, 1)))) for _ in range(2))
        scheduler.add(fake_sequence(seq_id, prompt, output))
    paged, contiguous, running = [], [], []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        scheduler.update(output, [SequenceOutput(tuple(SampledToken(7) for _ in range(item.num_samples)))
                                  for item in output.scheduled])
        if scheduler.running:
            used = sum(seq.num_tokens for seq in scheduler.running)
            paged.append(used / (scheduler.block_manager.num_used_blocks * 16))
            contiguous.append(used / (len(scheduler.running) * max_len))
            running.append(len(scheduler.running))
    every = max(1, len(paged) // 200)
    return {"paged": statistics.mean(paged), "contiguous": statistics.mean(contiguous), "num_steps": len(paged),
            "mean_running": statistics.mean(running), "running_if_contiguous": 1024 * 16 // max_len,
            "paged_by_step": paged[::every], "contiguous_by_step": contiguous[::every]}


def measure_prefix(args: argparse.Namespace) -> Json:
    """32 requests on one long prefix, with the prefix cache and without."""
    num_requests, prefix_len, output_len = (4, 64, 2) if args.quick else (32, 1024, 8)
    found: Json = {}
    for name, enabled in (("on", True), ("off", False)):
        llm = make_llm(args, enable_prefix_caching=enabled)
        vocab_size = llm.engine.vocab_size
        prefix = random_ids(prefix_len, vocab_size)
        prompts = [prefix + random_ids(16, vocab_size, row + 1) for row in range(num_requests)]
        llm.generate([random_ids(16, vocab_size, 99)], SamplingParams(max_tokens=2, **GREEDY), progress=False)
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=output_len, **GREEDY), progress=False)
        seconds = time.perf_counter() - start
        found[name] = {"seconds": seconds, "requests_per_s": num_requests / seconds}
    return {**found, "ratio": found["off"]["seconds"] / found["on"]["seconds"], "required_ratio": 3}


def measure_memory(args: argparse.Namespace) -> Json:
    """Peak resident MiB, each in a process of its own: a KV cache of 1 GiB, written to its end; and a long prompt."""
    length = 100 if args.quick else 8000
    base = "from vllm_mini import LLM, SamplingParams; import resource; llm = LLM({!r}, {}); {}; print(" \
           "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    go = "llm.generate([[5] * {}], SamplingParams(max_tokens=2), progress=False)"
    memory = 2**22 if args.quick else 2**30
    cases = {"kv_1GiB": (f"kv_cache_memory={memory}", f"llm.engine.worker.kv_cache.zero_(); {go.format(64)}"),
             f"prompt_{length}": (f"num_kv_blocks={length // 16 + 2}", go.format(length))}
    found = {name: float(subprocess.run([sys.executable, "-c", base.format(args.model, cache, code)], check=True,
                                        stdout=subprocess.PIPE, text=True).stdout) for name, (cache, code) in cases.items()}
    return {"peak_rss_MiB": found, "required_MiB": 2 * 10**9 / 2**20}


def measure_start(args: argparse.Namespace) -> Json:
    """Seconds from the command to the first healthy answer; the second time everything is in the caches."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "vllm_mini", "serve", args.model, "--port", "0"],
                                  stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if found := re.search(r"serving at (http://[^/\s]+)", line):
                    with urllib.request.urlopen(f"{found[1]}/health", timeout=30):
                        times.append(time.perf_counter() - start)
                    break
        finally:
            server.terminate()
            server.communicate(timeout=30)
    return {"seconds": times, "required_seconds": 5}


PARTS = {"batch": measure_batch, "context": measure_context, "breakdown": measure_breakdown, "control": measure_control,
         "kv": measure_kv, "prefix": measure_prefix, "memory": measure_memory, "start": measure_start}


# ---- the rest ----


def machine() -> Json:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__,
            "python": platform.python_version(), "vllm_mini": __version__, "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d %H:%M:%S")}


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number of nested dicts under its path."""
    if isinstance(value, dict):
        return {key: number for name, one in value.items() for key, number in numbers(one, f"{path}/{name}").items()}
    return {path: float(value)} if isinstance(value, (int, float)) else {}


def compare(now: Json, then: Json) -> list[str]:
    """One line for each number of both: now, then, ratio."""
    earlier = numbers(then["parts"])
    return [f"{path}: {value:.4g}, was {earlier[path]:.4g}, ratio {value / earlier[path]:.2f}"
            for path, value in numbers(now["parts"]).items() if earlier.get(path)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="(default: SmolLM2-135M-Instruct; with --quick the tiny random one)")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small numbers: to see that it runs")
    parser.add_argument("--output", type=Path, help="where to write the JSON; what other parts it has is kept")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="print the ratios to an earlier result")
    args = parser.parse_args(argv)
    if args.model is None:
        from vllm_mini.fetch import fetch_default_model

        args.model = "dummy" if args.quick else str(fetch_default_model())
    earlier = json.loads(args.output.read_text()) if args.output and args.output.exists() else {"parts": {}}
    result: Json = {"model": Path(args.model).name, "parts": {**earlier["parts"]}}
    for name in args.only:
        part = PARTS[name](args)
        result["parts"][name] = part
        result["machine"] = machine()
        shown = {key: value for key, value in part.items() if not key.endswith("_by_step")}
        print(name, json.dumps(shown, indent=1), flush=True)
        if args.output:
            args.output.write_text(json.dumps(result, indent=1))
    if args.compare:
        print("\n".join(compare(result, json.loads(args.compare.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
