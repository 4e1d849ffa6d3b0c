"""Pictures of results: step times by batch and context, where a step goes, memory, and a server under load.

    pip install 'vllm-mini-engine[bench]'
    python benchmarks/plot.py --steps benchmarks/results/step_times.json --serve results/*.json --output docs

The files for --serve are those of `vllm-mini bench serve --save-result --save-detailed`; throughput and latency are drawn
over --max-concurrency, a line each model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

Json = dict[str, Any]
ORDER = ("linears", "attention", "small ops", "sampling", "control plane", "the rest")


def step_times(axes: Axes, steps: Json, name: str) -> None:
    """Median and least time of a step over a count, both axes logarithmic where the counts are."""
    counts = sorted(map(int, steps))
    medians = [steps[str(count)]["median_ms"] for count in counts]
    axes.plot(counts, medians, marker="o", label="median")
    axes.plot(counts, [steps[str(count)]["min_ms"] for count in counts], marker=".", linestyle=":", label="least")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set(xlabel=name, ylabel="ms a step")
    axes.legend()


def breakdown(axes: Axes, part: Json) -> None:
    """A bar a case, in shares of the step, so that a prefill does not dwarf the rest; the floor as a line."""
    names = list(part["cases"])
    left = [0.0] * len(names)
    for kind in ORDER:
        widths = [100 * case["parts_ms"].get(kind, 0) / case["step_ms"] for case in part["cases"].values()]
        axes.barh(names, widths, left=left, label=kind)
        left = [one + width for one, width in zip(left, widths)]
    for row, case in enumerate(part["cases"].values()):
        share = 100 * sum(case["floor_ms"].values()) / case["step_ms"]
        axes.plot([share, share], [row - 0.4, row + 0.4], color="black", linewidth=2, label=None if row else "floor")
        axes.text(101, row, f"{case['step_ms']:.1f} ms", va="center")
    axes.set(xlabel="% of the step", xlim=(0, 118))
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)


def memory(axes: Axes, part: Json) -> None:
    """Used share of the reserved slots over a run."""
    share = [100 * index / len(part["paged_by_step"]) for index in range(len(part["paged_by_step"]))]
    for key, label in (("paged", "blocks of 16 tokens"), ("contiguous", "room for the longest answer")):
        axes.plot(share, [100 * value for value in part[f"{key}_by_step"]],
                  label=f"{label}: {100 * part[key]:.0f}% on average")
    axes.set(xlabel="% of the run", ylabel="% of reserved K/V slots in use", ylim=(0, 105))
    axes.legend(loc="center left")


def load(axes: Any, results: list[Json]) -> None:
    """Output tokens a second, and time to first token, over concurrency."""
    by_model: dict[str, list[Json]] = defaultdict(list)
    for result in results:
        by_model[result["model_id"]].append(result)
    for model, rows in by_model.items():
        rows.sort(key=lambda row: row["max_concurrency"] or row["num_prompts"])
        at = [row["max_concurrency"] or row["num_prompts"] for row in rows]
        axes[0].plot(at, [row["output_throughput"] for row in rows], marker="o", label=model)
        axes[1].plot(at, [row["mean_ttft_ms"] for row in rows], marker="o", label=f"TTFT, {model}")
        axes[1].plot(at, [row["mean_tpot_ms"] for row in rows], marker="o", linestyle="--", label=f"TPOT, {model}")
    for one, label in zip(axes, ("output tokens / s", "mean, ms")):
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(ScalarFormatter())
        one.set(xlabel="requests at a time", ylabel=label)
        one.set_ylim(bottom=0)
        one.legend()


def latencies(axes: Any, results: list[Json]) -> None:
    """The share of requests (of gaps) that took at most so long."""
    for result in results:
        label = f"{result['max_concurrency'] or result['num_prompts']} at a time"
        for one, values in zip(axes, (result["ttfts"], [gap for gaps in result["itls"] for gap in gaps])):
            ordered = sorted(1000 * value for value in values)
            one.plot(ordered, [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))], label=label)
    for one, name in zip(axes, ("time to first token, ms", "time between tokens, ms")):
        one.set(xlabel=name, ylabel="% at most", ylim=(0, 101))
        one.set_xscale("log")
        one.xaxis.set_major_formatter(ScalarFormatter())
        one.legend(loc="lower right")


def draw(path: Path, num_axes: int, fill: Any) -> Path:
    figure, axes = pyplot.subplots(1, num_axes, figsize=(5.5 * num_axes if num_axes > 1 else 8, 4), squeeze=False)
    fill(axes[0])
    for one in axes[0]:
        one.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, help="a result of step_times.py")
    parser.add_argument("--serve", type=Path, nargs="+", default=[], help="results of bench serve")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the pictures")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    parts = json.loads(args.steps.read_text())["parts"] if args.steps else {}
    if "batch" in parts and "context" in parts:
        print(draw(args.output / "step-times.png", 2, lambda axes: (
            step_times(axes[0], parts["batch"]["steps"], f"sequences (context {parts['batch']['context']})"),
            step_times(axes[1], parts["context"]["steps"], "tokens of context (one sequence)"))))
    if "breakdown" in parts:
        print(draw(args.output / "step-breakdown.png", 1, lambda axes: breakdown(axes[0], parts["breakdown"])))
    if "kv" in parts:
        print(draw(args.output / "kv-utilization.png", 1, lambda axes: memory(axes[0], parts["kv"])))
    results = [json.loads(path.read_text()) for path in args.serve]
    if results:
        print(draw(args.output / "serve-load.png", 2, lambda axes: load(axes, results)))
    if detailed := [result for result in results if "ttfts" in result]:
        print(draw(args.output / "serve-latencies.png", 2, lambda axes: latencies(axes, detailed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
