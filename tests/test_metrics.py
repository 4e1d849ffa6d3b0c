"""What /metrics says: at rest, under load, after clients that left, and that it costs next to nothing."""

from __future__ import annotations

from vllm_mini.config import EngineConfig
from vllm_mini.engine import LLMEngine, StepSnapshot
from vllm_mini.sequence import SamplingParams


def test_several_observers_see_the_same_steps() -> None:
    first: list[StepSnapshot] = []
    second: list[StepSnapshot] = []
    engine = LLMEngine.from_config(EngineConfig(model="dummy", num_kv_blocks=64), on_step=first.append)
    engine.observers.append(second.append)
    engine.add_request("request", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    assert len(first) == 4
    assert all(one is other for one, other in zip(first, second, strict=True))
