"""The whole engine against transformers, float32: the same greedy tokens, the same logits."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.prompts import VARIED
from vllm_mini import LLM, SamplingParams

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def reference(smollm2_path):
    """SmolLM2 as transformers reads the same file."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(smollm2_path):
    return LLM(str(smollm2_path), dtype="float32", num_kv_blocks=1200, max_num_seqs=64)


@torch.inference_mode()
def assert_greedy_under(reference, result):
    """Every token is transformers' own choice after the tokens before it, which makes the whole run its greedy run; and
    the log-probabilities, so the logits up to a constant, agree."""
    num_prompt_tokens = len(result.prompt_token_ids)
    output = result.outputs[0]
    token_ids = torch.tensor([result.prompt_token_ids + output.token_ids])
    logits = reference(token_ids).logits[0, num_prompt_tokens - 1 : -1]  # [NUM_TOKENS, vocab_size]
    assert logits.argmax(-1).tolist() == output.token_ids
    logprobs = logits.log_softmax(-1)
    ours = torch.tensor([[entry.logprob, *(value for _, value in entry.top)] for entry in output.logprobs])
    ids = torch.tensor([[token_id, *(other for other, _ in entry.top)]
                        for token_id, entry in zip(output.token_ids, output.logprobs)])
    scale = logits.abs().max()
    assert ((ours - logprobs.gather(1, ids)).abs().max() / scale).item() < 1e-4


def test_greedy_tokens_and_logprobs_of_64_varied_prompts_equal_transformers(llm, reference):
    two_thousand = llm.engine.tokenizer.encode("Tell me a story about the sea and the wind. " * 300)[:2000]
    one_token = [llm.engine.tokenizer.encode("Hello")[0]]
    prompts = [*VARIED, one_token, two_thousand]
    assert len(prompts) >= 64
    results = llm.generate(prompts, GREEDY, progress=False)
    assert min(len(result.prompt_token_ids) for result in results) == 1
    assert max(len(result.prompt_token_ids) for result in results) == 2000
    for result in results:
        assert len(result.outputs[0].token_ids) == NUM_TOKENS
        assert_greedy_under(reference, result)


def test_greedy_tokens_equal_transformers_own_generate(llm, reference):
    for prompt in VARIED[:3]:
        (result,) = llm.generate(prompt, GREEDY, progress=False)
        expected = reference.generate(torch.tensor([result.prompt_token_ids]), do_sample=False, max_new_tokens=NUM_TOKENS,
                                      min_new_tokens=NUM_TOKENS, pad_token_id=0, repetition_penalty=1.0)
        # min_new_tokens forbids the end token, as ignore_eos does not: compare up to the first one.
        ours = result.prompt_token_ids + result.outputs[0].token_ids
        end = next((at for at, token_id in enumerate(ours) if at >= len(result.prompt_token_ids)
                    and token_id in llm.engine.eos_token_ids), len(ours))
        assert ours[:end] == expected[0, :end].tolist()


def test_prompt_logprobs_equal_transformers(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for result in llm.generate(VARIED[10:40:7], params, progress=False):
        with torch.inference_mode():
            logprobs = reference(torch.tensor([result.prompt_token_ids])).logits[0].log_softmax(-1)
        assert result.prompt_logprobs[0] is None
        ours = torch.tensor([entry.logprob for entry in result.prompt_logprobs[1:]])
        targets = torch.tensor(result.prompt_token_ids[1:])[:, None]
        torch.testing.assert_close(ours, logprobs[:-1].gather(1, targets)[:, 0], rtol=1e-4, atol=1e-3)


def test_NU_02_secrets_stay_with_their_prompts_alone_batched_and_reversed(llm):
    words = ["banana", "violin", "glacier", "pepper", "lantern", "tiger", "copper", "meadow"]
    prompts = [f"{'Listen carefully. ' * (3 * index)}The secret word is {word}. Repeat the secret word: {word}. "
               "The secret word is" for index, word in enumerate(words)]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    alone = [llm.generate(prompt, params, progress=False)[0].outputs[0] for prompt in prompts]
    together = [result.outputs[0] for result in llm.generate(prompts, params, progress=False)]
    backwards = [result.outputs[0] for result in llm.generate(prompts[::-1], params, progress=False)][::-1]
    for index, word in enumerate(words):
        assert alone[index].token_ids == together[index].token_ids == backwards[index].token_ids
        for one, other in zip(alone[index].logprobs, together[index].logprobs):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert word in alone[index].text
        assert not any(other in alone[index].text for other in words if other != word)


def test_NU_05_bfloat16_stays_near_transformers_bfloat16(smollm2_path, reference):
    llm = LLM(str(smollm2_path), dtype="bfloat16", num_kv_blocks=200)
    half = reference.to(torch.bfloat16)
    try:
        num_equal, worst = 0, 0.0
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)
        for result in llm.generate(VARIED[:10], params, progress=False):
            prompt, output = result.prompt_token_ids, result.outputs[0]
            with torch.inference_mode():
                generated = half.generate(torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False)
                logits = half(torch.tensor([prompt + output.token_ids])).logits[0].float()
            num_equal += generated[0, len(prompt) :].tolist() == output.token_ids[:10]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            worst = max(worst, (chosen - torch.tensor([entry.logprob for entry in output.logprobs])).abs().median().item())
        assert num_equal >= 8
        assert worst < 0.05
    finally:
        reference.to(torch.float32)


def test_NU_05_float16_works_on_this_device(smollm2_path):
    llm = LLM(str(smollm2_path), dtype="float16", num_kv_blocks=64)
    (result,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), progress=False)
    assert "Paris" in result.outputs[0].text
