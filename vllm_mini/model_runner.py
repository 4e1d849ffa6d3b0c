"""From a scheduler's step to tensors, through the model, to sampled ids: the one place that knows both worlds.

Keeps no copy of any request's state: what a step needs is read from its sequences, step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vllm_mini.llama import DummyModel, LlamaForCausalLM
from vllm_mini.paged_attention import AttentionBackend, AttentionMetadata
from vllm_mini.sampler import (
    MIN_LOGPROB,
    AllowedTokens,
    SamplingMetadata,
    TokenPairs,
    gather_logprobs,
    sample,
    uniform_numbers,
)
from vllm_mini.scheduler import ScheduledSequence, SequenceOutput
from vllm_mini.sequence import SampledToken, Sequence, TokenLogprobs

__all__ = ["DummyModel", "ModelRunner"]

PROMPT_LOGPROBS_ROWS = 256  # rows of logits held at once while a prompt is scored


class ModelRunner:
    """Runs a model over one K/V pool."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: Tensor, attention: AttentionBackend, *, vocab_size: int
    ) -> None:
        """`vocab_size` bounds the ids that may be drawn: a model's logits can be wider than its tokenizer."""
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.vocab_size = vocab_size
        self.block_size = kv_cache.shape[3]
        self.device = kv_cache.device

    @torch.inference_mode()
    def execute(self, scheduled: SequenceOf[ScheduledSequence]) -> list[SequenceOutput]:
        """One forward pass over all scheduled tokens; an answer for each scheduled sequence, in the same order."""
        num_tokens = np.array([item.num_tokens for item in scheduled])
        query_start_loc = np.concatenate([[0], num_tokens.cumsum()])  # [num_seqs + 1]
        hidden = self._forward(scheduled, num_tokens, query_start_loc)  # [total_num_tokens, hidden_size]
        rows = [row for row, item in enumerate(scheduled) for _ in range(item.num_samples)]
        choices = [choice for item in scheduled for choice in range(item.num_samples)]
        samples = self._sample(hidden, query_start_loc, [scheduled[row].seq for row in rows], rows, choices)
        results = []
        for row, item in enumerate(scheduled):
            prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
            if item.seq.needs_prompt_logprobs:
                prompt_logprobs = self._score_prompt(item, hidden[query_start_loc[row] : query_start_loc[row + 1]])
            results.append(SequenceOutput(tuple(next(samples) for _ in range(item.num_samples)), prompt_logprobs))
        return results

    def _forward(
        self, scheduled: SequenceOf[ScheduledSequence], num_tokens: np.ndarray, query_start_loc: np.ndarray
    ) -> Tensor:
        starts = np.array([item.start for item in scheduled])
        token_ids = chain.from_iterable(
            item.seq.token_ids[item.start : item.start + item.num_tokens] for item in scheduled)
        input_ids = np.fromiter(token_ids, dtype=np.int64, count=query_start_loc[-1])
        row_of = np.repeat(np.arange(len(scheduled)), num_tokens)  # [total_num_tokens], which sequence
        positions = np.arange(len(input_ids)) - query_start_loc[row_of] + starts[row_of]
        block_table = _pad_rows([item.seq.block_table for item in scheduled])  # [num_seqs, max_num_blocks]
        slots = block_table[row_of, positions // self.block_size] * self.block_size + positions % self.block_size
        metadata = AttentionMetadata(query_start_loc, starts + num_tokens, block_table, self._tensor(slots), self.block_size)
        return self.model(self._tensor(input_ids), self._tensor(positions), self.kv_cache, self.attention,
                          self.attention.prepare(metadata))

    def _sample(
        self, hidden: Tensor, query_start_loc: np.ndarray, seqs: list[Sequence], rows: list[int], choices: list[int]
    ) -> Iterator[SampledToken]:
        """The tokens drawn from each row's last position, in order."""
        if not seqs:
            return iter(())
        last = self._tensor(query_start_loc[np.array(rows) + 1] - 1)  # [num_samples]
        logits = self.model.compute_logits(hidden[last])[:, : self.vocab_size]  # [num_samples, vocab_size]
        output = sample(logits, self._sampling_metadata(seqs, choices))
        token_ids = output.token_ids.tolist()
        if output.logprobs is None or output.top_logprobs is None or output.top_token_ids is None:
            return map(SampledToken, token_ids)
        entries = _logprob_entries(output.logprobs, output.top_token_ids, output.top_logprobs)
        wanted = [seq.params.logprobs for seq in seqs]
        return (SampledToken(token_id, None if count is None else entry._replace(top=entry.top[:count]))
                for token_id, entry, count in zip(token_ids, entries, wanted))

    def _score_prompt(self, item: ScheduledSequence, hidden: Tensor) -> tuple[TokenLogprobs | None, ...]:
        """Log-probabilities of the prompt tokens that this chunk's positions predict; the first token has none."""
        targets = item.seq.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, item.seq.num_prompt_tokens)]
        entries: list[TokenLogprobs | None] = [None] if item.start == 0 else []
        for first in range(0, len(targets), PROMPT_LOGPROBS_ROWS):
            chunk = self._tensor(np.array(targets[first : first + PROMPT_LOGPROBS_ROWS]))
            logits = self.model.compute_logits(hidden[first : first + len(chunk)])[:, : self.vocab_size]
            entries += _logprob_entries(*gather_logprobs(logits, chunk, item.seq.params.prompt_logprobs or 0))
        return tuple(entries)

    def _sampling_metadata(self, seqs: list[Sequence], choices: list[int]) -> SamplingMetadata:
        params = [seq.params for seq in seqs]
        temperature = [0.0 if p.is_greedy else p.temperature for p in params]
        uniform = None
        if any(temperature):
            uniform = self._tensor(uniform_numbers(
                [seq.seed for seq in seqs], [seq.index + choice for seq, choice in zip(seqs, choices)],
                [seq.num_tokens for seq in seqs]))
        penalized = [row for row, p in enumerate(params)
                     if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty]
        bias = [(row, token_id, value) for row, p in enumerate(params) for token_id, value in p.logit_bias.items()]
        banned = [(row, token_id) for row, seq in enumerate(seqs) for token_id in _banned_ids(seq)]
        logprobs = [p.logprobs for p in params if p.logprobs is not None]
        return SamplingMetadata(
            temperature=self._floats(temperature),
            uniform=uniform,
            top_k=self._tensor(np.array([p.top_k if p.top_k > 0 else self.vocab_size for p in params]).clip(
                max=self.vocab_size)) if any(p.top_k > 0 for p in params) else None,
            top_p=self._floats([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None,
            min_p=self._floats([p.min_p for p in params]) if any(p.min_p > 0 for p in params) else None,
            penalties=torch.stack([self._floats([getattr(p, name) for p in params]) for name in (
                "repetition_penalty", "presence_penalty", "frequency_penalty")]) if penalized else None,
            prompt_tokens=self._pairs((row, token_id) for row in penalized
                                      for token_id in seqs[row].token_ids[: seqs[row].num_prompt_tokens]),
            output_tokens=self._pairs((row, token_id) for row in penalized for token_id in seqs[row].output_token_ids),
            bias=self._pairs((row, token_id) for row, token_id, _ in bias) if bias else None,
            bias_values=self._floats([value for _, _, value in bias]) if bias else None,
            allowed=self._allowed_tokens(seqs),
            banned=self._pairs(banned) if banned else None,
            num_logprobs=max(logprobs, default=None),
        )

    def _allowed_tokens(self, seqs: list[Sequence]) -> AllowedTokens | None:
        """The masks of the rows that ask for one."""
        rows = [row for row, seq in enumerate(seqs) if seq.constraint or seq.params.allowed_token_ids]
        if not rows:
            return None
        mask = np.zeros((len(rows), self.vocab_size), dtype=bool)
        for allowed, seq in zip(mask, (seqs[row] for row in rows)):
            if seq.constraint is not None:
                bits = np.frombuffer(seq.constraint.allowed_tokens, dtype=np.uint8)
                allowed[:] = np.unpackbits(bits, count=self.vocab_size, bitorder="little")
            else:
                allowed[list(seq.params.allowed_token_ids or ())] = True
        return AllowedTokens(self._tensor(np.array(rows)), self._tensor(mask))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _pairs(self, pairs: Iterable[tuple[int, int]]) -> TokenPairs:
        rows, token_ids = torch.tensor(list(pairs), dtype=torch.int64, device=self.device).reshape(-1, 2).T
        return TokenPairs(rows, token_ids)


def _banned_ids(seq: Sequence) -> Iterator[int]:
    """Stop tokens before min_tokens, and the last token of each bad word whose other tokens have just been written."""
    if seq.num_output_tokens < seq.params.min_tokens:
        yield from seq.stop_ids
    for *beginning, last in seq.bad_words:
        if len(beginning) <= seq.num_output_tokens and seq.token_ids[seq.num_tokens - len(beginning) :] == beginning:
            yield last


def _pad_rows(rows: list[list[int]]) -> np.ndarray:
    """Lists of different length as one zero-padded array [len(rows), longest]."""
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    return padded


def _logprob_entries(logprobs: Tensor, top_token_ids: Tensor, top_logprobs: Tensor) -> list[TokenLogprobs]:
    """Tensors [num_rows], [num_rows, k], [num_rows, k] as one TokenLogprobs a row, without tokens that are impossible."""
    columns = zip(logprobs.tolist(), top_token_ids.tolist(), top_logprobs.tolist())
    return [TokenLogprobs(logprob, tuple(pair for pair in zip(ids, values) if pair[1] > MIN_LOGPROB))
            for logprob, ids, values in columns]
