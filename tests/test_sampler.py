"""The sampler against plain definitions and against the exact distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_mini.sampler import AllowedTokens, SamplingMetadata, TokenPairs, gather_logprobs, sample, uniform_numbers

VOCAB = 50


def make_logits(num_rows=1, seed=0):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(logits, num_draws=20000, **settings):
    """Relative frequencies of `num_draws` draws from one row of logits."""
    settings = {name: value.expand(num_draws) for name, value in settings.items()}
    temperature = settings.pop("temperature", torch.ones(num_draws))
    uniform = torch.from_numpy(uniform_numbers(list(range(num_draws)), [0] * num_draws, [0] * num_draws))
    metadata = SamplingMetadata(temperature=temperature, uniform=uniform, **settings)
    tokens = sample(logits.expand(num_draws, -1).clone(), metadata).token_ids
    return torch.bincount(tokens, minlength=VOCAB) / num_draws


def assert_frequencies(observed, expected):
    """Within five standard errors everywhere."""
    error = (expected * (1 - expected) / 20000).sqrt()
    assert ((observed - expected).abs() <= 5 * error + 1e-9).all()


def test_temperature_zero_takes_the_best_token_and_needs_no_random_number():
    logits = make_logits(5)
    output = sample(logits.clone(), SamplingMetadata(temperature=torch.zeros(5)))
    assert output.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_tempered_logits(temperature):
    logits = make_logits()
    observed = draw_many(logits, temperature=torch.tensor([temperature]))
    assert_frequencies(observed, (logits[0] / temperature).softmax(-1))


@pytest.mark.parametrize("top_k", [1, 3, VOCAB])
def test_top_k_keeps_just_the_k_best_in_their_proportions(top_k):
    logits = make_logits()
    expected = logits[0].softmax(-1)
    expected[expected < expected.sort(descending=True).values[top_k - 1]] = 0
    assert_frequencies(draw_many(logits, top_k=torch.tensor([top_k])), expected / expected.sum())


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1.0])
def test_top_p_keeps_the_smallest_set_that_holds_that_mass(top_p):
    logits = make_logits()
    probs = logits[0].softmax(-1)
    kept, mass = [], 0.0
    for token in probs.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept.append(token)
        mass += probs[token].item()
    expected = torch.zeros(VOCAB).index_copy_(0, torch.tensor(kept), probs[kept])
    assert_frequencies(draw_many(logits, top_p=torch.tensor([top_p])), expected / expected.sum())


def test_min_p_drops_what_is_less_likely_than_that_share_of_the_best():
    logits = make_logits()
    expected = logits[0].softmax(-1)
    expected[expected < 0.2 * expected.max()] = 0
    assert_frequencies(draw_many(logits, min_p=torch.tensor([0.2])), expected / expected.sum())


def test_top_k_cuts_before_top_p_does():
    logits = make_logits()
    probs = logits[0].softmax(-1)
    best = probs.argsort(descending=True)[:4]
    of_four = probs[best] / probs[best].sum()
    num_kept = int(((of_four.cumsum(0) - of_four) < 0.6).sum())
    expected = torch.zeros(VOCAB)
    expected[best[:num_kept]] = of_four[:num_kept] / of_four[:num_kept].sum()
    assert_frequencies(draw_many(logits, top_k=torch.tensor([4]), top_p=torch.tensor([0.6])), expected)


@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-30, 1e-42])
def test_SA_01_a_tiny_temperature_means_greedy_and_never_a_nan(temperature):
    logits = make_logits(3) * 1e4
    metadata = SamplingMetadata(temperature=torch.full((3,), temperature), uniform=torch.rand(3, dtype=torch.float64),
                                top_p=torch.full((3,), 0.9), num_logprobs=2)
    output = sample(logits.clone(), metadata)
    assert output.token_ids.tolist() == logits.argmax(-1).tolist()
    assert output.logprobs.isfinite().all()
    assert output.top_logprobs.isfinite().all()


def test_SA_05_rows_with_and_without_top_k_do_not_touch_each_other():
    logits = make_logits(1).expand(4, -1)
    metadata = SamplingMetadata(
        temperature=torch.tensor([0.0, 1.0, 1.0, 1.0]), uniform=torch.full((4,), 0.999, dtype=torch.float64),
        top_k=torch.tensor([VOCAB, 5, VOCAB, VOCAB]))
    tokens = sample(logits.clone(), metadata).token_ids.tolist()
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] in logits[0].topk(5).indices
    assert tokens[2] == tokens[3]


def test_a_row_depends_on_its_own_number_only():
    logits = make_logits(6)
    uniform = torch.from_numpy(uniform_numbers([3] * 6, [0] * 6, list(range(6))))
    together = sample(logits.clone(), SamplingMetadata(temperature=torch.ones(6), uniform=uniform)).token_ids
    for row in range(6):
        alone = SamplingMetadata(temperature=torch.ones(1), uniform=uniform[row : row + 1])
        assert sample(logits[row : row + 1].clone(), alone).token_ids.item() == together[row]


def test_uniform_numbers_fill_the_interval_and_differ_by_seed_choice_and_position():
    numbers = uniform_numbers([7] * 10000, [0] * 10000, list(range(10000)))
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert counts.sum() == 10000
    assert abs(counts - 1000).max() < 150
    triples = [(seed, choice, position) for seed in range(20) for choice in range(20) for position in range(20)]
    assert len(set(uniform_numbers(*map(list, zip(*triples))))) == len(triples)
    below_zero, wrapped = uniform_numbers([-1, 2**64 - 1], [0, 0], [0, 0])
    assert below_zero == wrapped


def test_the_extreme_random_numbers_give_possible_tokens():
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 10:20] = 0.0
    uniform = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(logits, SamplingMetadata(temperature=torch.ones(2), uniform=uniform)).token_ids.tolist() == [10, 19]


def pairs(*entries):
    return TokenPairs(torch.tensor([row for row, _ in entries]), torch.tensor([token for _, token in entries]))


def adjusted(logits, **settings):
    """The logits a row is drawn from, as the change in its log-probabilities shows them."""
    num_rows = len(logits)
    metadata = SamplingMetadata(temperature=torch.zeros(num_rows), num_logprobs=VOCAB, **settings)
    output = sample(logits.clone(), metadata)
    return torch.empty_like(logits).scatter_(1, output.top_token_ids, output.top_logprobs)


def test_SA_10_each_penalty_counts_just_the_tokens_it_should():
    logits = make_logits(4, seed=3)
    prompt = [(row, token) for row in range(4) for token in (5, 5, 6)]
    output = [(row, token) for row in range(4) for token in (8, 9, 9)]
    penalties = torch.tensor([[1.0, 1.0, 1.0, 2.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    logprobs = adjusted(logits, penalties=penalties, prompt_tokens=pairs(*prompt), output_tokens=pairs(*output))
    expected = logits.clone()
    expected[1, [8, 9]] -= 2.0
    expected[2, 8] -= 0.5
    expected[2, 9] -= 1.0
    for token in (5, 6, 8, 9):
        expected[3, token] = expected[3, token] / 2 if expected[3, token] > 0 else expected[3, token] * 2
    torch.testing.assert_close(logprobs, expected.log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_bias_moves_and_a_ban_removes_just_the_named_tokens():
    logits = make_logits(2)
    logprobs = adjusted(logits, bias=pairs((0, 3), (1, 4)), bias_values=torch.tensor([100.0, -100.0]),
                        banned=pairs((1, 7), (1, 8)))
    assert logprobs[0].argmax() == 3
    assert logprobs[1, 7] == logprobs[1, 8] == -9999.0
    expected = logits[1].clone()
    expected[4] -= 100
    expected[[7, 8]] = float("-inf")
    torch.testing.assert_close(logprobs[1], expected.log_softmax(-1).clamp(min=-9999.0))


def test_a_row_that_is_not_numbers_gives_no_token_and_harms_no_other():
    logits = make_logits(4)
    expected = logits.argmax(-1).tolist()
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    uniform = torch.full((4,), 0.5, dtype=torch.float64)
    for temperature in (0.0, 1.0):
        metadata = SamplingMetadata(temperature=torch.full((4,), temperature), uniform=uniform if temperature else None)
        tokens = sample(logits.clone(), metadata).token_ids.tolist()
        assert tokens[1:3] == [-1, -1]
        assert min(tokens[0], tokens[3]) >= 0
    assert sample(logits.clone(), SamplingMetadata(temperature=torch.zeros(4))).token_ids.tolist()[0] == expected[0]


def test_logprobs_are_those_before_temperature_and_truncation():
    logits = make_logits(2)
    plain = logits.log_softmax(-1)
    metadata = SamplingMetadata(temperature=torch.full((2,), 2.0), uniform=torch.full((2,), 0.9, dtype=torch.float64),
                                top_k=torch.tensor([3, 3]), num_logprobs=5)
    output = sample(logits.clone(), metadata)
    torch.testing.assert_close(output.logprobs, plain.gather(1, output.token_ids[:, None])[:, 0])
    torch.testing.assert_close(output.top_logprobs, plain.topk(5).values)


def test_more_alternatives_than_the_vocabulary_has_gives_the_whole_vocabulary():
    _, top_ids, _ = gather_logprobs(make_logits(1), torch.tensor([0]), VOCAB + 10)
    assert sorted(top_ids[0].tolist()) == list(range(VOCAB))


def test_only_allowed_tokens_are_drawn_and_rows_without_a_mask_are_untouched():
    logits = make_logits()
    mask = torch.zeros(1, VOCAB, dtype=torch.bool)
    mask[0, [3, 30]] = True
    allowed = AllowedTokens(torch.tensor([1]), mask)
    metadata = SamplingMetadata(temperature=torch.zeros(3), allowed=allowed, num_logprobs=2)
    output = sample(logits.repeat(3, 1), metadata)
    best = logits[0].argmax().item()
    assert output.token_ids.tolist() == [best, 3 if logits[0, 3] > logits[0, 30] else 30, best]
    assert set(output.top_token_ids[1].tolist()) == {3, 30}
    assert output.top_logprobs[1].exp().sum().item() == pytest.approx(1)
    assert torch.equal(output.logprobs[0], logits.log_softmax(-1)[0, best])


def test_a_ban_is_not_kept_where_it_would_leave_nothing():
    logits = make_logits(2)
    mask = torch.zeros(1, VOCAB, dtype=torch.bool)
    mask[0, 7] = True
    pairs = TokenPairs(torch.tensor([0, 1]), torch.tensor([7, logits[1].argmax().item()]))
    metadata = SamplingMetadata(temperature=torch.zeros(2), allowed=AllowedTokens(torch.tensor([0]), mask), banned=pairs)
    drawn = sample(logits.clone(), metadata).token_ids.tolist()
    assert drawn == [7, logits[1].argsort(descending=True)[1].item()]


def test_a_row_that_is_not_a_number_is_noticed_behind_a_mask_too():
    mask = torch.ones(1, VOCAB, dtype=torch.bool)
    mask[0, 0] = False
    metadata = SamplingMetadata(temperature=torch.zeros(1), allowed=AllowedTokens(torch.tensor([0]), mask))
    assert sample(torch.full((1, VOCAB), float("nan")), metadata).token_ids.tolist() == [-1]
