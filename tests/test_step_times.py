"""The benchmark of steps, in small: that it runs, that its parts add up and that two results can be compared."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


step_times = load_script("step_times")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts that need no process of their own."""
    path = tmp_path_factory.mktemp("step_times") / "now.json"
    names = ["batch", "context", "breakdown", "control", "kv", "prefix"]
    assert step_times.main(["--quick", "--output", str(path), "--only", *names]) == 0
    return json.loads(path.read_text())["parts"]


def test_every_batch_size_and_context_has_a_time(parts):
    assert list(parts["batch"]["steps"]) == ["1", "2"] and list(parts["context"]["steps"]) == ["16", "64"]
    assert all(0 < step["min_ms"] <= step["median_ms"] for part in ("batch", "context")
               for step in parts[part]["steps"].values())


def test_the_parts_of_a_step_add_up_to_it(parts):
    for case in parts["breakdown"]["cases"].values():
        assert set(case["parts_ms"]) == {"attention", "control plane", "linears", "sampling", "small ops", "the rest"}
        assert 0.8 * case["step_ms"] < sum(case["parts_ms"].values()) <= case["step_ms"]
        assert all(value > 0 for value in [*case["parts_ms"].values(), *case["floor_ms"].values()])


def test_paged_memory_is_used_better_than_contiguous(parts):
    assert parts["kv"]["contiguous"] < parts["kv"]["paged"] <= 1
    assert parts["control"]["median_ms"] > 0 and parts["prefix"]["on"]["seconds"] > 0


def test_the_engine_is_as_before_once_nothing_is_watched():
    engine = step_times.make_llm(type("Args", (), {"model": "dummy", "quick": True})).engine
    watched = step_times.watch(engine)
    assert "step" in vars(engine)
    watched.unwrap()
    assert "step" not in vars(engine) and not watched.seconds


def test_a_result_is_compared_and_other_parts_are_kept(tmp_path, capsys):
    path = tmp_path / "now.json"
    for part in ("control", "kv"):
        assert step_times.main(["--quick", "--output", str(path), "--only", part, "--compare", str(path)][
            : 5 if part == "control" else 7]) == 0
    assert set(json.loads(path.read_text())["parts"]) == {"control", "kv"}
    assert "/kv/paged: " in capsys.readouterr().out
    assert step_times.compare({"parts": {"a": {"b": 3.0}}}, {"parts": {"a": {"b": 2.0}}}) == ["/a/b: 3, was 2, ratio 1.50"]


def test_the_pictures_are_made_of_the_results(parts, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "steps.json").write_text(json.dumps({"parts": parts}))
    served = {"model_id": "m", "max_concurrency": 2, "num_prompts": 3, "output_throughput": 5.0, "mean_ttft_ms": 1.0,
              "mean_tpot_ms": 2.0, "ttfts": [0.1, 0.2], "itls": [[0.1], [0.2, 0.3]]}
    (tmp_path / "serve.json").write_text(json.dumps(served))
    assert load_script("plot").main(["--steps", str(tmp_path / "steps.json"), "--serve", str(tmp_path / "serve.json"),
                                     "--output", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 5
