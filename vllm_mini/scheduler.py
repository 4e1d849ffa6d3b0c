"""Which sequences run in the next step, and how many of their tokens. Does not know tensors, text or clocks.

Iteration-level scheduling (Orca, Yu et al. 2022) over paged blocks (vLLM, Kwon et al. 2023), with chunked prefill
(Sarathi-Serve, Agrawal et al. 2024). One rule covers prefill, chunk, prefix hit, recomputation and decode: a step gives
a sequence `min(num_tokens - num_computed_tokens, budget left)` tokens, and it samples when none is left uncomputed.

Invariant: running, swapped, waiting, read in that order, list the unfinished sequences in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm_mini.block_manager import BlockManager, Transfers
from vllm_mini.config import SchedulerConfig
from vllm_mini.sequence import RequestError, SampledToken, Sequence, SequenceStatus, TokenLogprobs

__all__ = ["Refusal", "ScheduledSequence", "Scheduler", "SchedulerOutput", "SequenceOutput"]


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: its tokens [start, start + num_tokens)."""

    seq: Sequence
    start: int  # num_computed_tokens before the step
    num_tokens: int
    num_known_tokens: int  # seq.num_tokens before the step
    num_samples: int  # new tokens to draw from the last position: 0 in the middle of a prompt, n when it forks

    @property
    def is_prefill(self) -> bool:
        """A label for people; nothing is scheduled by it."""
        return self.start < max(self.seq.num_prompt_tokens, self.num_known_tokens - 1)


class Refusal(NamedTuple):
    """Why the first sequence in line did not get into a step; all behind it wait for it."""

    seq: Sequence
    cause: str  # "blocks", "budget", "max_num_seqs", "preemption" (nobody comes in then) or "batch" (static batching)
    num_needed: int = 0  # blocks (the ones kept for runners counted in), tokens or sequences
    num_left: int = 0


@dataclass(frozen=True)
class SchedulerOutput:
    """The snapshot of one step: all that the device needs, and what an observer wants to know."""

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    transfers: Transfers
    admitted: tuple[Sequence, ...]  # from waiting
    resumed: tuple[Sequence, ...]  # from swapped
    preempted: tuple[Sequence, ...]
    refusal: Refusal | None = None  # None: nobody was left waiting

    @property
    def num_batched_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class SequenceOutput(NamedTuple):
    """What the device answers for one scheduled sequence."""

    samples: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class Scheduler:
    """First come, first served; when blocks run out the youngest runner makes way."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        # Every running sequence is owed one token a step, so more runners than budget would starve the youngest.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.running: list[Sequence] = []
        self.swapped: deque[Sequence] = deque()  # preempted: with host blocks copied out, without to be recomputed
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_steps = 0

    @property
    def max_num_tokens(self) -> int:
        """The most tokens (prompt + output) that one sequence can come to, in this context and this pool."""
        return min(self.config.max_model_len, self.block_manager.num_blocks * self.block_manager.block_size)

    def unfinished(self) -> Iterator[Sequence]:
        """All live sequences, in order of arrival."""
        yield from self.running
        yield from self.swapped
        yield from self.waiting

    def has_unfinished(self) -> bool:
        return bool(self.running or self.swapped or self.waiting)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int = 1) -> None:
        """RequestError for a prompt, or a prompt and its output, that could never be served whole."""
        wanted = num_prompt_tokens + max_tokens
        request = f"you asked for {wanted} tokens ({num_prompt_tokens} in the prompt, {max_tokens} for the output)"
        if num_prompt_tokens >= self.config.max_model_len or wanted > self.config.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.config.max_model_len} tokens. However, {request}; "
                "please shorten the prompt or the output", param="prompt", code="context_length_exceeded")
        if wanted > self.max_num_tokens:
            blocks = self.block_manager
            raise RequestError(
                f"The KV cache holds {self.max_num_tokens} tokens ({blocks.num_blocks} blocks of {blocks.block_size}). "
                f"However, {request}, which need {blocks.num_blocks_for(wanted)} blocks",
                param="max_tokens", code="kv_capacity_exceeded")

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises RequestError, and keeps nothing, when it could never run."""
        self.check_fits(seq.num_prompt_tokens, seq.max_num_tokens - seq.num_prompt_tokens)
        if _width(seq) > self.max_num_seqs:
            raise RequestError(f"n must be at most {self.max_num_seqs}, the number of sequences that may run at once, "
                               f"got {_width(seq)}", param="n")
        self.waiting.append(seq)

    def schedule(self) -> SchedulerOutput:
        """Decide one step. RuntimeError when nothing can run though something should: a bug, never a state to wait in."""
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        while len(scheduled) < len(self.running):
            seq = self.running[len(scheduled)]  # oldest first, so a victim is always behind the one being served
            if not self._make_room(seq, preempted):
                break
            scheduled.append(self._give_tokens(seq, budget))
            budget -= scheduled[-1].num_tokens
        admitted: list[Sequence] = []
        resumed: list[Sequence] = []
        refusal: Refusal | None = None
        has_begun = bool(self.running or self.swapped)
        is_closed = has_begun and not self.config.enable_continuous_batching  # static batching: nobody joins
        while self.swapped or self.waiting:
            queue, joined = (self.swapped, resumed) if self.swapped else (self.waiting, admitted)
            refusal = self._admit(queue[0], budget, preempted, is_closed=is_closed and not self.swapped)
            if refusal is not None:
                break
            joined.append(queue.popleft())
            self.running.append(joined[-1])
            scheduled.append(self._give_tokens(joined[-1], budget))
            budget -= scheduled[-1].num_tokens
        if not scheduled and self.has_unfinished():
            raise RuntimeError(f"empty step with work left: {len(self.swapped)} swapped, {len(self.waiting)} waiting")
        self.num_steps += 1
        return SchedulerOutput(self.num_steps - 1, tuple(scheduled), self.block_manager.take_transfers(),
                               tuple(admitted), tuple(resumed), tuple(preempted), refusal)

    def update(self, output: SchedulerOutput, results: Iterable[SequenceOutput]) -> list[Sequence]:
        """Take in what a step computed; returns the sequences that got a token, forks included, finished ones too."""
        advanced: list[Sequence] = []
        for item, result in zip(output.scheduled, results, strict=True):
            item.seq.num_computed_tokens += item.num_tokens
            item.seq.prompt_logprobs.extend(result.prompt_logprobs)
            if not item.num_samples:
                continue
            for seq, sample in zip(self._fork(item.seq), result.samples, strict=True):
                self._append(seq, sample)
                advanced.append(seq)
        return advanced

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence in whatever state it is and take its blocks back; a finished one is left as it is."""
        if seq.is_finished:
            return
        queues = {SequenceStatus.RUNNING: self.running, SequenceStatus.SWAPPED: self.swapped,
                  SequenceStatus.WAITING: self.waiting}
        queues[seq.status].remove(seq)
        self.block_manager.release(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def check(self) -> None:
        """AssertionError when queues, statuses and blocks do not agree."""
        for status, queue in ((SequenceStatus.RUNNING, self.running), (SequenceStatus.SWAPPED, self.swapped),
                              (SequenceStatus.WAITING, self.waiting)):
            for seq in queue:
                assert seq.status is status, f"sequence {seq.seq_id} is {seq.status} in the {status} queue"
                assert seq.num_computed_tokens < seq.num_tokens, f"sequence {seq.seq_id} has nothing left to compute"
                assert bool(seq.block_table) == (status is SequenceStatus.RUNNING), f"blocks of sequence {seq.seq_id}"
        order = [seq.seq_id for seq in self.unfinished()]
        assert order == sorted(set(order)), f"not in order of arrival: {order}"
        assert self._num_runners() <= self.max_num_seqs, "more runners than max_num_seqs"
        assert set(self.block_manager.block_tables) == {seq.seq_id for seq in self.running}, "a table outlived its sequence"
        self.block_manager.check()

    def _num_runners(self) -> int:
        return sum(_width(seq) for seq in self.running)

    def _make_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Blocks for the next step of `seq`, from younger runners if need be; False when it had to go itself."""
        while not self.block_manager.grow(seq):
            victim = self.running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        if self.config.preemption_mode != "swap" or not self.block_manager.swap_out(victim):
            self.block_manager.release(victim)
            victim.num_computed_tokens = 0
            if victim.needs_prompt_logprobs:  # to be asked for again; those of a prompt already answered are kept
                victim.prompt_logprobs.clear()
        victim.status = SequenceStatus.SWAPPED
        self.swapped.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, seq: Sequence, budget: int, preempted: list[Sequence], *, is_closed: bool) -> Refusal | None:
        """Let `seq` run from this step on; or say why not, and change nothing."""
        if preempted or is_closed:
            return Refusal(seq, "preemption" if preempted else "batch")
        num_runners = self._num_runners()
        if num_runners + _width(seq) > self.max_num_seqs:
            return Refusal(seq, "max_num_seqs", _width(seq), self.max_num_seqs - num_runners)
        num_needed = 1 if self.config.enable_chunked_prefill else seq.num_tokens - seq.num_computed_tokens
        if num_needed > budget:
            return Refusal(seq, "budget", seq.num_tokens - seq.num_computed_tokens, budget)
        # One block spare for each runner: most would otherwise be preempting again within a few steps.
        if not self.block_manager.admit(seq, headroom=num_runners):
            demand = self.block_manager.demand(seq)
            return Refusal(seq, "blocks", demand.num_new + num_runners, demand.num_free)
        seq.status = SequenceStatus.RUNNING
        return None

    def _give_tokens(self, seq: Sequence, budget: int) -> ScheduledSequence:
        start = seq.num_computed_tokens
        num_tokens = min(seq.num_tokens - start, budget)
        assert num_tokens > 0, f"sequence {seq.seq_id} was given no token"
        self.block_manager.commit(seq, num_tokens)
        num_samples = _width(seq) if start + num_tokens == seq.num_tokens else 0
        return ScheduledSequence(seq, start, num_tokens, seq.num_tokens, num_samples)

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """`seq` and, once its prompt is computed, its other choices: they share every block of it."""
        children = [seq.fork(seq.index + offset) for offset in range(1, seq.num_forks + 1)]
        seq.num_forks = 0
        for child in children:
            self.block_manager.fork(seq, child)
        if children:
            position = self.running.index(seq) + 1
            self.running[position:position] = children
        return [seq, *children]

    def _append(self, seq: Sequence, sample: SampledToken) -> None:
        if sample.token_id < 0:  # not a number: nothing can be drawn, and what was written may not be shared either
            self.finish(seq, "error")
            self.block_manager.forget_prefixes()
            return
        seq.token_ids.append(sample.token_id)
        seq.logprobs.append(sample.logprobs)
        if sample.token_id in seq.stop_ids:
            self.finish(seq, "stop", sample.token_id if sample.token_id in (seq.params.stop_token_ids or ()) else None)
        elif seq.num_tokens >= seq.max_num_tokens:
            self.finish(seq, "length")


def _width(seq: Sequence) -> int:
    """The sequences it will be once its prompt is computed."""
    return 1 + seq.num_forks
