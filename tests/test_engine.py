"""The engine on the built-in tiny model, float32: one run equals any other, and what it promises about each request."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from tests.checkpoints import edit_config, write_byte_tokenizer, write_checkpoint, write_scripted_checkpoint
from vllm_mini import LLM, ConfigError, RequestError, SamplingParams
from vllm_mini.block_manager import Transfers
from vllm_mini.config import EngineConfig
from vllm_mini.engine import StepError

MIXED = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=8, top_p=0.9, top_k=40, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=9, min_p=0.02, repetition_penalty=1.3, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=1, seed=10, n=3, max_tokens=9, ignore_eos=True),
]


def make_llm(**settings):
    settings = {"dtype": "float32", "num_kv_blocks": 400, "max_model_len": 256, **settings}
    return LLM("dummy", **settings)


def make_requests(count=32, seed=0):
    """Prompts of 1 to 60 tokens, many with a common beginning, and parameters of every kind."""
    rng = random.Random(seed)
    common = [rng.randrange(256) for _ in range(40)]
    prompts = []
    for _ in range(count):
        shared = common[: rng.choice([0, 0, 17, 32, 40])]
        prompts.append(shared + [rng.randrange(256) for _ in range(rng.randint(1, 20))])
    return prompts, [MIXED[index % len(MIXED)] for index in range(count)]


def token_ids(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


def assert_drained(llm):
    llm.engine.scheduler.check()
    assert not llm.engine.has_unfinished()
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.fixture(scope="module")
def alone():
    """What each request gives with the engine to itself."""
    llm = make_llm()
    return [token_ids(llm.generate([prompt], params, progress=False))[0] for prompt, params in zip(*make_requests())]


@pytest.mark.parametrize("settings", [
    {},
    {"block_size": 1, "num_kv_blocks": 6400},
    {"block_size": 4, "num_kv_blocks": 1600},
    {"block_size": 32},
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 61},
    {"max_num_batched_tokens": 4096},
    {"enable_prefix_caching": False},
    {"enable_chunked_prefill": False},
    {"max_num_seqs": 4},
    {"num_kv_blocks": 24, "block_size": 4},
    {"num_kv_blocks": 24, "block_size": 4, "preemption_mode": "swap", "num_host_blocks": 64},
    {"num_kv_blocks": 24, "block_size": 4, "preemption_mode": "swap", "num_host_blocks": 15},
    {"num_kv_blocks": 90, "block_size": 1, "enable_prefix_caching": False},
], ids=str)
def test_a_batch_gives_what_each_request_gives_alone(alone, settings):
    llm = make_llm(**settings)
    prompts, params = make_requests()
    assert token_ids(llm.generate(prompts, params, progress=False)) == alone
    if settings.get("num_kv_blocks", 400) < 100:
        assert llm.engine.scheduler.num_preemptions > 5
    assert_drained(llm)


def test_the_order_of_arrival_does_not_matter(alone):
    llm = make_llm()
    prompts, params = make_requests()
    for seed in range(3):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        results = llm.generate([prompts[at] for at in order], [params[at] for at in order], progress=False)
        assert token_ids(results) == [alone[at] for at in order]


def test_PR_05_a_seeded_answer_survives_preemption_in_both_modes():
    params = SamplingParams(temperature=1, seed=7, max_tokens=60, ignore_eos=True)
    prompts = [[index] * 9 for index in range(1, 7)]
    expected = token_ids(make_llm().generate(prompts, params, progress=False))
    for settings in ({}, {"preemption_mode": "swap", "num_host_blocks": 200}):
        llm = make_llm(block_size=4, num_kv_blocks=30, **settings)
        assert token_ids(llm.generate(prompts, params, progress=False)) == expected
        assert llm.engine.scheduler.num_preemptions > 0


def test_SA_06_a_seeded_answer_does_not_depend_on_its_neighbours():
    llm = make_llm()
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    expected = llm.generate("hello", params, progress=False)[0].outputs[0].token_ids
    other = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
    for neighbours in ([other], [other.clone(seed=1)], [other] * 7):
        for first in (True, False):
            batch = [params, *neighbours] if first else [*neighbours, params]
            results = llm.generate(["hello"] * len(batch), batch, progress=False)
            assert results[0 if first else -1].outputs[0].token_ids == expected


def test_SA_07_seeded_choices_differ_from_each_other_and_repeat_in_order():
    llm = make_llm()
    params = SamplingParams(n=4, seed=11, temperature=1.5, max_tokens=16, ignore_eos=True)
    first, second = (token_ids(llm.generate("hello", params, progress=False))[0] for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4


def test_SA_08_greedy_choices_are_identical():
    llm = make_llm()
    (result,) = llm.generate("hello", SamplingParams(n=3, temperature=0, max_tokens=12), progress=False)
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    assert result.outputs[0].token_ids == result.outputs[1].token_ids == result.outputs[2].token_ids


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-8, 1e-30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_SA_01_a_tiny_temperature_gives_the_greedy_answer(temperature, dtype):
    llm = make_llm(dtype=dtype)
    params = [SamplingParams(temperature=value, top_p=0.9, max_tokens=20) for value in (0, temperature, 1.0)]
    results = llm.generate(["hello"] * 3, params, progress=False)
    assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids


def test_BM_05_forked_choices_score_as_they_were_drawn():
    llm = make_llm()
    prompt = list(range(20))
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=20, logprobs=0, ignore_eos=True)
    (result,) = llm.generate([prompt], params, progress=False)
    for choice in result.outputs:
        (again,) = llm.generate([prompt + choice.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0),
                                progress=False)
        scored = [entry.logprob for entry in again.prompt_logprobs[20:]]
        assert scored == pytest.approx([entry.logprob for entry in choice.logprobs], abs=1e-4)


def test_PC_01_a_prompt_of_whole_blocks_sent_twice_computes_its_last_token_only_from_the_last_block():
    for length, num_cached in ((64, 48), (32, 16), (16, 0)):
        llm = make_llm()
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
        first, second = (llm.generate([list(range(length))], params, progress=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert len(second.outputs[0].logprobs) == 8
        for one, other in zip(first.outputs[0].logprobs, second.outputs[0].logprobs):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_PC_07_prompt_logprobs_are_complete_and_equal_with_a_warm_cache():
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    first, second = (llm.generate([list(range(33))], params, progress=False)[0] for _ in range(2))
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 33
    assert first.prompt_logprobs[0] is None
    assert first.prompt_logprobs[1:] == second.prompt_logprobs[1:]


@pytest.mark.parametrize("budget", [7, 8, 29, 30, 31, 4096])
def test_SC_05_the_budget_changes_neither_tokens_nor_logprobs(budget):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1, ignore_eos=True)
    prompt = list(range(30))
    expected = make_llm().generate([prompt], params, progress=False)[0].outputs[0]
    output = make_llm(max_num_batched_tokens=budget, block_size=4).generate([prompt], params, progress=False)[0].outputs[0]
    assert output.token_ids == expected.token_ids
    assert len(output.logprobs) == 5
    for one, other in zip(output.logprobs, expected.logprobs):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_SC_09_an_interrupted_run_leaves_nothing_behind():
    steps = []

    def interrupt(snapshot):
        steps.append(snapshot)
        if len(steps) == 3:
            raise KeyboardInterrupt

    llm = make_llm(on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e"], SamplingParams(max_tokens=50, ignore_eos=True), progress=False)
    assert_drained(llm)
    results = llm.generate(["x"], SamplingParams(max_tokens=5), progress=False)
    assert [result.prompt for result in results] == ["x"]
    assert llm.generate([], SamplingParams(), progress=False) == []


def test_an_interrupt_inside_the_device_leaves_a_working_engine(alone):
    llm = make_llm()
    execute, calls = llm.engine.worker.execute, []

    def fail_once(output):
        calls.append(output)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return execute(output)

    llm.engine.worker.execute = fail_once
    prompts, params = make_requests()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, progress=False)
    assert_drained(llm)
    assert token_ids(llm.generate(prompts, params, progress=False)) == alone


def test_a_failed_step_ends_what_ran_and_the_engine_goes_on(alone):
    llm = make_llm(max_num_seqs=4)
    execute, calls = llm.engine.worker.execute, []

    def fail_once(output):
        calls.append(output)
        if len(calls) == 3:
            raise RuntimeError("device trouble")
        return execute(output)

    llm.engine.worker.execute = fail_once
    for index, prompt in enumerate("abcdef"):
        llm.engine.add_request(f"r{index}", prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    outputs, failures = [], []
    while llm.engine.has_unfinished():
        try:
            outputs += llm.engine.step()
        except StepError as error:
            failures.append(str(error))
            outputs += error.outputs
    assert failures == ["the step failed: device trouble"]
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {"r0": "error", "r1": "error", "r2": "error", "r3": "error", "r4": "length", "r5": "length"}
    assert_drained(llm)


@pytest.mark.parametrize(("prompt", "settings", "param"), [
    ("", {}, "prompt"),
    ([], {}, "prompt"),
    ([5, 100000], {}, "prompt"),
    ([-1], {}, "prompt"),
    ([5] * 256, {}, "prompt"),
    ([5] * 500, {}, "prompt"),
    ("x", {"max_tokens": 0}, "max_tokens"),
    ("x", {"max_tokens": -1}, "max_tokens"),
    ("x", {"temperature": -1}, "temperature"),
    ("x", {"temperature": float("nan")}, "temperature"),
    ("x", {"top_p": 0}, "top_p"),
    ("x", {"top_p": 1.1}, "top_p"),
    ("x", {"top_k": -5}, "top_k"),
    ("x", {"top_k": 0.5}, "top_k"),
    ("x", {"n": 0}, "n"),
    ("x", {"n": 129}, "n"),
    ("x", {"logprobs": 21}, "logprobs"),
    ("x", {"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
    ("x", {"stop": ""}, "stop"),
    ("x", {"stop": ["x", ""]}, "stop"),
    ("x", {"stop": [1]}, "stop"),
    ("x", {"logit_bias": {"999999": 5}}, "logit_bias.999999"),
    ("x", {"logit_bias": {"-1": 5}}, "logit_bias.-1"),
    ("x", {"logit_bias": {"abc": 5}}, "logit_bias.abc"),
    ("x", {"logit_bias": {"5": 1000}}, "logit_bias.5"),
    ("x", {"logit_bias": {"5": None}}, "logit_bias.5"),
    ("x", {"logit_bias": [5]}, "logit_bias"),
    ("x", {"stop_token_ids": [999999]}, "stop_token_ids"),
], ids=str)
def test_bad_input_names_the_field_and_disturbs_nobody(prompt, settings, param):
    llm = make_llm()
    with pytest.raises(RequestError) as caught:
        llm.generate(["good", prompt], [SamplingParams(), SamplingParams(**settings)], progress=False)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
    assert_drained(llm)
    (result,) = llm.generate("good", SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    assert len(result.outputs[0].token_ids) == 3


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match="block_sice"):
        LLM("dummy", block_sice=4)


def test_SC_01_a_prompt_larger_than_the_pool_is_refused_with_both_numbers_and_the_next_is_served():
    llm = make_llm(block_size=4, num_kv_blocks=8, max_model_len=64)
    with pytest.raises(RequestError, match=r"32 tokens.*40 in the prompt") as caught:
        llm.generate([list(range(40))], SamplingParams(max_tokens=1), progress=False)
    assert caught.value.code == "kv_capacity_exceeded"
    (result,) = llm.generate([list(range(5))], SamplingParams(max_tokens=5, ignore_eos=True), progress=False)
    assert len(result.outputs[0].token_ids) == 5


def test_PR_01_a_sequence_that_fills_the_pool_ends_with_length():
    llm = make_llm(block_size=4, num_kv_blocks=2, max_model_len=64)
    (result,) = llm.generate([list(range(7))], SamplingParams(max_tokens=20, ignore_eos=True), progress=False)
    assert (result.outputs[0].finish_reason, len(result.outputs[0].token_ids)) == ("length", 1)
    assert_drained(llm)


def test_CF_01_the_limit_that_a_small_cache_imposes_is_known_and_logged(caplog):
    with caplog.at_level("WARNING"):
        llm = make_llm(num_kv_blocks=4, max_model_len=256)
    assert llm.engine.max_model_len == 64
    assert "256" in caplog.text
    assert "64" in caplog.text


def test_CF_02_a_budget_below_the_context_needs_chunked_prefill():
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(200))
    expected = token_ids(make_llm().generate([prompt], params, progress=False))
    assert token_ids(make_llm(max_num_batched_tokens=32).generate([prompt], params, progress=False)) == expected
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(32\).*max_model_len \(256\)"):
        make_llm(max_num_batched_tokens=32, enable_chunked_prefill=False)


def test_CF_05_more_context_than_the_model_was_trained_for_needs_an_explicit_word(caplog):
    with pytest.raises(ConfigError, match=r"4096.*2048"):
        make_llm(max_model_len=4096)
    with caplog.at_level("WARNING"):
        llm = make_llm(max_model_len=4096, allow_long_max_model_len=True)
    assert "2048" in caplog.text
    assert llm.engine.max_model_len == 4096


def test_NU_01_a_cache_full_of_nan_gives_what_a_clean_one_gives(alone):
    llm = make_llm(num_kv_blocks=60)
    llm.engine.worker.kv_cache.fill_(float("nan"))
    prompts, params = make_requests()
    assert token_ids(llm.generate(prompts, params, progress=False)) == alone


def test_SA_17_every_sampled_token_has_its_logprob():
    llm = make_llm()
    for max_tokens in (1, 3):
        for temperature in (0, 2):
            params = SamplingParams(max_tokens=max_tokens, logprobs=2, temperature=temperature, ignore_eos=True)
            for _ in range(2):
                output = llm.generate([list(range(40))], params, progress=False)[0].outputs[0]
                assert len(output.logprobs) == len(output.token_ids) == max_tokens
                assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in output.logprobs)


def test_min_tokens_keeps_the_end_away():
    llm = make_llm()
    stops = list(range(200))
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, stop_token_ids=stops), progress=False)[0]
    held = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, min_tokens=12, stop_token_ids=stops),
                        progress=False)[0]
    assert len(free.outputs[0].token_ids) < 12
    assert len(held.outputs[0].token_ids) >= 12
    assert held.outputs[0].finish_reason == "stop"


def test_ST_01_and_ST_02_the_text_ends_right_before_a_stop_string_across_and_inside_tokens():
    llm = make_llm()
    letters = dict.fromkeys(range(97, 123), 60)
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True, logit_bias=letters)
    text = llm.generate("hello", params, progress=False)[0].outputs[0].text
    for start, end in ((3, 5), (0, 1), (7, 11), (12, 13)):
        stop = text[start:end]
        output = llm.generate("hello", params.clone(stop=stop), progress=False)[0].outputs[0]
        assert output.text == text[: text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) == text.index(stop) + len(stop)
        shown = llm.generate("hello", params.clone(stop=stop, include_stop_str_in_output=True), progress=False)[0].outputs[0]
        assert shown.text == text[: text.index(stop) + len(stop)]


def test_ST_09_the_text_of_a_special_token_works_as_a_stop_string():
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=10, logit_bias={257: 100}, stop="<|im_start|>")
    output = llm.generate("hello", params, progress=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "<|im_start|>")
    assert len(output.token_ids) == 1


def test_ST_10_ignore_eos_ignores_every_end_token():
    llm = make_llm()
    for end in (256, 258):
        forced = SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100})
        assert llm.generate("x", forced, progress=False)[0].outputs[0].finish_reason == "stop"
        output = llm.generate("x", forced.clone(ignore_eos=True), progress=False)[0].outputs[0]
        assert (output.finish_reason, len(output.token_ids)) == ("length", 20)


def test_DT_06_the_end_token_is_shown_only_on_request():
    llm = make_llm()
    forced = SamplingParams(temperature=0, max_tokens=5, logit_bias={258: 100})
    assert llm.generate("x", forced, progress=False)[0].outputs[0].text == ""
    assert llm.generate("x", forced.clone(skip_special_tokens=False), progress=False)[0].outputs[0].text == "<|im_end|>"


def test_a_block_of_the_engine_is_a_window_on_its_pool():
    llm = make_llm()
    llm.engine.add_request("r", list(range(20)), SamplingParams(max_tokens=5, ignore_eos=True))
    llm.engine.step()
    (table,) = llm.engine.scheduler.block_manager.block_tables.values()
    block = llm.engine.block(table[0])
    assert block.ref_count == 1
    assert block.k_cache.shape == (2, 16, 2, 16)
    assert block.k_cache.abs().sum() > 0
    llm.engine.abort_request("r")
    assert block.ref_count == 0
    assert_drained(llm)


@pytest.mark.parametrize("top_p", [0, 0.0, -0.1, 1.1, float("nan"), 10**400])
def test_SA_03_top_p_outside_its_range_is_refused_by_name(top_p):
    with pytest.raises(RequestError, match="top_p") as caught:
        SamplingParams(top_p=top_p)
    assert caught.value.param == "top_p"


def test_SA_03_top_p_of_nearly_nothing_is_greedy_and_of_one_filters_nothing():
    llm = make_llm()
    greedy = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), progress=False)
    drawn = SamplingParams(temperature=1, seed=1, max_tokens=20, ignore_eos=True)
    for _ in range(5):
        narrow = llm.generate("hello", drawn.clone(top_p=1e-9), progress=False)
        assert token_ids(narrow) == token_ids(greedy)
    free, full = (token_ids(llm.generate("hello", drawn.clone(top_p=top_p), progress=False)) for top_p in (1, 1.0))
    assert free == full != token_ids(greedy)


@pytest.mark.parametrize("eos_of", ["generation_config", "config", "tokenizer"])
def test_SA_21_ids_beyond_the_tokenizer_are_never_drawn(tmp_path, eos_of):
    write_checkpoint(tmp_path, vocab_size=512)
    write_byte_tokenizer(tmp_path)  # 259 tokens
    if eos_of == "config":  # an end that cannot come may be named, and must not be an error
        edit_config(tmp_path, eos_token_id=510)
    if eos_of == "generation_config":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 510}))
    llm = LLM(str(tmp_path), dtype="float32", num_kv_blocks=64)
    params = SamplingParams(temperature=2, seed=1, max_tokens=300, ignore_eos=True, logprobs=20, min_tokens=300)
    (output,) = llm.generate("hello", params, progress=False)[0].outputs
    assert len(output.token_ids) == 300 and max(output.token_ids) < 259
    assert max(token_id for entry in output.logprobs for token_id, _ in entry.top) < 259
    for refused in ({"logit_bias": {"510": 100}}, {"stop_token_ids": [259]}):
        with pytest.raises(RequestError, match="vocabulary of 259 tokens"):
            llm.generate("hello", SamplingParams(**refused), progress=False)
    with pytest.raises(RequestError, match="vocabulary of 259 tokens"):
        llm.generate([[300]], SamplingParams(), progress=False)


@pytest.mark.parametrize(("config", "generation_config", "ends"), [
    (0, [0, 2], {0, 2, 258}), ([7, 9], None, {7, 9, 258}), (None, None, {258}), (None, {"eos_token_id": None}, {258}),
    ([4], [5], {4, 5, 258}),
], ids=str)
def test_ML_06_an_answer_ends_at_any_of_the_end_tokens_that_the_files_name(tmp_path, config, generation_config, ends):
    write_scripted_checkpoint(tmp_path, {}, vocab_size=259, hidden_size=264, eos_token_id=config)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation_config is not None:
        content = generation_config if isinstance(generation_config, dict) else {"eos_token_id": generation_config}
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    llm = LLM(str(tmp_path), dtype="float32", num_kv_blocks=64)
    assert llm.engine.eos_token_ids == ends
    for end in ends:
        expected = [(end - 1) % 259]  # the script counts up
        while expected[-1] not in ends:
            expected.append((expected[-1] + 1) % 259)
        (result,) = llm.generate([[(end - 2) % 259]], SamplingParams(temperature=0, max_tokens=12), progress=False)
        assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == (expected, "stop")


def test_ML_06_without_any_end_token_an_answer_runs_to_its_limit(tmp_path):
    write_scripted_checkpoint(tmp_path, {}, vocab_size=64)
    llm = LLM(str(tmp_path), dtype="float32", num_kv_blocks=64)
    (output,) = llm.generate([[0]], SamplingParams(temperature=0, max_tokens=80), progress=False)[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (80, "length")
    assert output.token_ids == [(token + 1) % 64 for token in range(80)]


@pytest.mark.parametrize("stop", [["a", "b", "c", "d"], "x", ("x",), [f"s{index}" for index in range(16)], None, []])
def test_ST_06_a_few_stop_strings_are_fine_in_every_spelling(stop):
    wanted = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    assert SamplingParams(stop=stop).stop == wanted


@pytest.mark.parametrize(("stop", "limit"), [
    ([f"s{index}" for index in range(17)], "16"), ([1, 2], "list of strings"), ({"a": 1}, "list of strings"),
    (["x" * 10_000], "1024"), ("x" * 10_000, "1024"), ([None], "list of strings"), (5, "list of strings"), (b"x", "strings"),
], ids=lambda value: str(value)[:20])
def test_ST_06_too_many_or_too_long_or_other_things_than_strings_are_refused(stop, limit):
    with pytest.raises(RequestError, match=limit) as caught:
        SamplingParams(stop=stop)
    assert caught.value.param == "stop"
    assert len(str(caught.value)) < 200


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_NU_06_no_more_threads_than_this_process_may_use():
    code = ("import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "import torch; torch.set_num_threads(8)\n"
            "from vllm_mini import LLM\n"
            "LLM('dummy', num_kv_blocks=8); print(torch.get_num_threads())\n"
            "LLM('dummy', num_kv_blocks=8, num_threads=3); print(torch.get_num_threads())")
    environment = {**os.environ, "OMP_NUM_THREADS": "8"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["1", "3"]


def test_a_block_is_copied_out_before_a_copy_overwrites_it():
    worker = make_llm(num_host_blocks=2).engine.worker
    worker.kv_cache.normal_()
    before, other = worker.kv_cache[:, :, 0].clone(), worker.kv_cache[:, :, 1].clone()
    worker._transfer(Transfers(swap_out=[(0, 1)], copies=[(1, 0)]))
    assert worker.host_kv_cache[:, :, 1].equal(before) and worker.kv_cache[:, :, 0].equal(other)
    worker._transfer(Transfers(swap_in=[(1, 0)], copies=[(0, 5)]))
    assert worker.kv_cache[:, :, 0].equal(before) and worker.kv_cache[:, :, 5].equal(before)


@pytest.mark.parametrize(("settings", "device_type", "budget"), [
    ({}, "cpu", 512), ({}, "cuda", 2048), ({"max_num_batched_tokens": 77}, "cpu", 77),
    ({"enable_chunked_prefill": False}, "cpu", 4096), ({"enable_chunked_prefill": False}, "cuda", 4096),
], ids=str)
def test_the_token_budget_is_chosen_by_device_unless_it_is_given(settings, device_type, budget):
    assert EngineConfig(model="dummy", **settings).resolve_token_budget(device_type, max_model_len=4096) == budget


def test_on_a_cpu_a_long_prompt_is_chunked_by_default():
    scheduler = make_llm(device="cpu", max_model_len=1024).engine.scheduler
    assert scheduler.config.max_num_batched_tokens == 512
