"""From logits to token ids, each row by its own parameters. Does not know sequences, requests or text.

One vectorized pass over the batch. Randomness is one number in [0, 1) for each row, made from (seed, choice, position)
alone, and turned into a token by inverting the row's cumulative distribution: so a row's token depends neither on its
neighbours nor on how often it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["AllowedTokens", "SamplerOutput", "SamplingMetadata", "TokenPairs", "gather_logprobs", "sample",
           "uniform_numbers"]

MIN_LOGPROB = -9999.0  # what an impossible token reports: finite, so that it survives JSON


class TokenPairs(NamedTuple):
    """Scattered entries of a [num_rows, vocab_size] matrix."""

    rows: Tensor  # [num_pairs]
    token_ids: Tensor  # [num_pairs]


class AllowedTokens(NamedTuple):
    """What may be drawn in some of the rows; in the others it is everything."""

    rows: Tensor  # [num_allowed_rows]
    mask: Tensor  # [num_allowed_rows, vocab_size] bool


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling parameters of a batch, one entry a row; None where no row asks for the feature."""

    temperature: Tensor  # [num_rows], 0: greedy
    uniform: Tensor | None = None  # [num_rows] float64 in [0, 1); None: every row is greedy
    top_k: Tensor | None = None  # [num_rows], at least 1; vocab_size: off
    top_p: Tensor | None = None  # [num_rows], 1: off
    min_p: Tensor | None = None  # [num_rows], 0: off
    penalties: Tensor | None = None  # [3, num_rows]: repetition, presence, frequency
    prompt_tokens: TokenPairs | None = None  # of the rows with penalties
    output_tokens: TokenPairs | None = None
    bias: TokenPairs | None = None
    bias_values: Tensor | None = None  # [num_pairs of bias]
    allowed: AllowedTokens | None = None
    banned: TokenPairs | None = None  # may not be drawn now (stop tokens before min_tokens, ends of bad words)
    num_logprobs: int | None = None  # the most any row asks for


class SamplerOutput(NamedTuple):
    """One token a row; a row whose logits are not numbers has token_id -1."""

    token_ids: Tensor  # [num_rows]
    logprobs: Tensor | None  # [num_rows], of the chosen token
    top_token_ids: Tensor | None  # [num_rows, num_logprobs], best first
    top_logprobs: Tensor | None


def uniform_numbers(seeds: list[int], choices: list[int], positions: list[int]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, choice, position): a counter-based splitmix64 (Steele et al. 2014)."""
    state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    for counter in (choices, positions):
        state = _mix(state + np.array(counter, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Draw one token for each row of logits [num_rows, vocab_size] float32, which may be changed in place.

    Log-probabilities are those after penalties, bias, masks and bans, before temperature, top_k, top_p and min_p.
    """
    _adjust(logits, metadata)
    token_ids = logits.argmax(dim=-1)  # [num_rows]
    is_number = logits.gather(1, token_ids[:, None])[:, 0].isfinite()  # argmax finds a NaN before anything else
    if metadata.uniform is not None:
        drawn = _draw(logits, metadata, metadata.uniform)
        token_ids = torch.where(metadata.temperature > 0, drawn, token_ids)
    valid_ids = torch.where(is_number, token_ids, -1)
    if metadata.num_logprobs is None:
        return SamplerOutput(valid_ids, None, None, None)
    return SamplerOutput(valid_ids, *gather_logprobs(logits, token_ids, metadata.num_logprobs))


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [num_rows] of the given tokens; ids and log-probabilities [num_rows, num_logprobs] of the best."""
    logprobs = logits.log_softmax(dim=-1).clamp_(min=MIN_LOGPROB)
    chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
    top, top_token_ids = logprobs.topk(min(num_logprobs, logits.shape[1]), dim=-1)
    return chosen, top_token_ids, top


def _adjust(logits: Tensor, metadata: SamplingMetadata) -> None:
    """Penalties, bias, what is allowed and what is banned, in place."""
    if metadata.penalties is not None:
        _penalize(logits, metadata)
    if metadata.bias is not None and metadata.bias_values is not None:
        logits.index_put_(tuple(metadata.bias), metadata.bias_values, accumulate=True)
    if metadata.allowed is not None:
        rows, mask = metadata.allowed
        logits[rows] = logits[rows].masked_fill(~mask, float("-inf"))
    if metadata.banned is not None:
        _ban(logits, metadata.banned)


def _ban(logits: Tensor, banned: TokenPairs) -> None:
    """A row that would be left without any token keeps those it has: a ban is a wish, what is allowed is a rule."""
    rows = banned.rows.unique()
    before = logits[rows]  # [num_rows with bans, vocab_size]
    logits[banned.rows, banned.token_ids] = float("-inf")
    after = logits[rows]
    is_empty = after.amax(dim=-1, keepdim=True) == float("-inf")
    logits[rows] = torch.where(is_empty, before, after)


def _penalize(logits: Tensor, metadata: SamplingMetadata) -> None:
    """Repetition (CTRL, Keskar et al. 2019) looks at prompt and output; presence and frequency (OpenAI) at the output."""
    assert metadata.penalties is not None and metadata.prompt_tokens is not None and metadata.output_tokens is not None
    repetition, presence, frequency = metadata.penalties[:, :, None]  # [num_rows, 1] each
    counts = torch.zeros_like(logits)  # of output tokens
    counts.index_put_(tuple(metadata.output_tokens), torch.ones((), device=logits.device), accumulate=True)
    seen = counts > 0
    seen[metadata.prompt_tokens.rows, metadata.prompt_tokens.token_ids] = True
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, repeated, logits))
    logits -= presence * (counts > 0) + frequency * counts


def _draw(logits: Tensor, metadata: SamplingMetadata, uniform: Tensor) -> Tensor:
    """A token [num_rows] from each row's distribution; rows that are greedy get one that nobody uses."""
    temperature = metadata.temperature.masked_fill(metadata.temperature == 0, 1.0)[:, None]
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature  # the best is 0, so no overflow
    if metadata.min_p is not None:
        scaled.masked_fill_(scaled < metadata.min_p.log()[:, None], float("-inf"))
    if metadata.top_k is not None or metadata.top_p is not None:
        scaled = _keep_top(scaled, metadata)
    cdf = scaled.softmax(dim=-1).to(torch.float64).cumsum(dim=-1)  # [num_rows, vocab_size]
    target = uniform[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def _keep_top(scaled: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Everything but the top_k best, and of these but the smallest set that holds top_p of the mass, set to -inf."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if metadata.top_k is not None:
        rank = torch.arange(scaled.shape[1], device=scaled.device)
        ordered.masked_fill_(rank >= metadata.top_k[:, None], float("-inf"))
    if metadata.top_p is not None:
        probs = ordered.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        # top_p = 1 keeps all: rounding must not cut the tail
        ordered.masked_fill_((mass_before >= metadata.top_p[:, None]) & (metadata.top_p[:, None] < 1), float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, ordered)
