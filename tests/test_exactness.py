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


@torch.inference_mode()
def logits_after(model, results):
    """The model's own float32 scores where each result's tokens were chosen: [all tokens, vocab_size]."""
    return torch.cat([model(torch.tensor([result.prompt_token_ids + result.outputs[0].token_ids])).logits[
        0, len(result.prompt_token_ids) - 1 : -1].float() for result in results])


def test_NU_05_bfloat16_stays_near_transformers_bfloat16(smollm2_path, reference):
    """Equal tokens cannot be asked of bfloat16: scores that tie after rounding fall as the CPU's kernels round. But no
    token may be worse than such a tie, and the scores are no further from float32's than transformers' bfloat16 ones."""
    llm = LLM(str(smollm2_path), dtype="bfloat16", num_kv_blocks=200)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=5)
    results = llm.generate(VARIED[:10], params, progress=False)
    outputs = [result.outputs[0] for result in results]
    exact = logits_after(reference, results)
    try:
        half = logits_after(reference.to(torch.bfloat16), results)
    finally:
        reference.to(torch.float32)
    chosen = torch.tensor([token_id for output in outputs for token_id in output.token_ids])
    best = half.max(-1).values
    rounding = 2 ** (best.log2().floor() - 7)  # between neighbouring bfloat16 numbers of that size
    assert ((best - half.gather(1, chosen[:, None])[:, 0]) / rounding).max() <= 2

    entries = [entry for output in outputs for entry in output.logprobs]
    ids = torch.tensor([[token_id for token_id, _ in entry.top] for entry in entries])  # [all tokens, 5]
    ours = torch.tensor([[logprob for _, logprob in entry.top] for entry in entries])
    expected = exact.log_softmax(-1).gather(1, ids)
    our_error = (ours - expected).abs().mean()
    assert our_error <= 1.1 * (half.log_softmax(-1).gather(1, ids) - expected).abs().mean()


def test_NU_05_float16_works_on_this_device(smollm2_path):
    llm = LLM(str(smollm2_path), dtype="float16", num_kv_blocks=64)
    (result,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), progress=False)
    assert "Paris" in result.outputs[0].text
