"""A device one can reason about: the K/V entry of a slot is the hash of the tokens up to there. No tensors.

`FakeDevice` answers a step as the worker does, but draws the next token only from the entries it reads through the
block table, after it has made sure that each is the entry of the sequence's own prefix. So a wrong table, a lost copy
or a false prefix hit cannot hide. `FakeEngine` is the engine's loop around it and recounts everything after each step.
`run_alone` is the reference: the same rule without blocks, batches or a scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vllm_mini.block_manager import BlockEvent, BlockManager, Transfers
from vllm_mini.config import SchedulerConfig
from vllm_mini.scheduler import ScheduledSequence, Scheduler, SchedulerOutput, SequenceOutput
from vllm_mini.sequence import SampledToken, SamplingParams, Sequence, SequenceStatus, TokenLogprobs

VOCAB_SIZE = 5
Errors = Mapping[tuple[int, int], int]  # (seed, index) -> num_tokens at which the logits stop being numbers


class Outcome(NamedTuple):
    """How one sequence ends."""

    output_token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs | None]


def make_sequence(
    seq_id: int = 0, prompt: int | Iterable[int] = 8, *, max_tokens: int = 8, n: int = 1, index: int = 0,
    seed: int | None = None, stop_ids: Iterable[int] = (), **params,
) -> Sequence:
    """A new sequence; a prompt given as a length is made of ids that no other sequence has."""
    token_ids = [1000 * (seq_id + 1) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Sequence(
        seq_id=seq_id, request_id=f"request-{seq_id - index}", token_ids=token_ids,
        params=SamplingParams(n=n, max_tokens=max_tokens, **params), seed=seq_id if seed is None else seed,
        max_num_tokens=len(token_ids) + max_tokens, stop_ids=frozenset(stop_ids), index=index, num_forks=n - 1)


def make_block_manager(num_blocks: int = 64, block_size: int = 4, **kwargs) -> BlockManager:
    return BlockManager(num_blocks, block_size, **kwargs)


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, *, num_host_blocks: int = 0, enable_prefix_caching: bool = True,
    **config,
) -> Scheduler:
    """A scheduler with a pool of its own; other keywords are those of SchedulerConfig."""
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 512, **config}
    blocks = make_block_manager(num_blocks, block_size, num_host_blocks=num_host_blocks,
                                enable_prefix_caching=enable_prefix_caching)
    return Scheduler(SchedulerConfig(**settings), blocks)


def make_engine(*args, vocab_size: int = VOCAB_SIZE, errors: Errors | None = None, **kwargs) -> FakeEngine:
    """A fake engine around `make_scheduler(...)`."""
    return FakeEngine(make_scheduler(*args, **kwargs), vocab_size=vocab_size, errors=errors)


def prefix_entries(token_ids: Iterable[int], entry: int = 0) -> list[int]:
    """The K/V entry of each position: the hash of all tokens up to it. `entry` is that of the position before."""
    entries = []
    for token_id in token_ids:
        entry = hash((entry, token_id))
        entries.append(entry)
    return entries


def sample(entries: list[int], seed: int, index: int, vocab_size: int, errors: Errors) -> SampledToken:
    """The token after a context, drawn from its entries, the seed, the choice's index and the position."""
    if errors.get((seed, index)) == len(entries):
        return SampledToken(-1)
    draw = hash((seed, index, *entries))
    return SampledToken(draw % vocab_size, TokenLogprobs(-(draw % 1009) / 100, ()))


def run_alone(
    seq: Sequence, *, index: int | None = None, vocab_size: int = VOCAB_SIZE, errors: Errors | None = None,
) -> Outcome:
    """What a choice of this request gets with a device of its own: its context in one piece, recomputed each time."""
    index = seq.index if index is None else index
    token_ids = seq.token_ids[: seq.num_prompt_tokens]
    logprobs: list[TokenLogprobs | None] = []
    reason = None
    while reason is None:
        token = sample(prefix_entries(token_ids), seq.seed, index, vocab_size, errors or {})
        if token.token_id < 0:
            reason = "error"
            break
        token_ids.append(token.token_id)
        logprobs.append(token.logprobs)
        if token.token_id in seq.stop_ids:
            reason = "stop"
        elif len(token_ids) == seq.max_num_tokens:
            reason = "length"
    return Outcome(token_ids[seq.num_prompt_tokens :], reason, logprobs)


def prompt_logprobs_alone(seq: Sequence) -> list[TokenLogprobs | None]:
    """What `FakeDevice` must have said about a prompt, in however many chunks: nothing about its first token."""
    entries = prefix_entries(seq.token_ids[: seq.num_prompt_tokens])
    return [None] + [_token_logprobs(entry) for entry in entries[1:]]


def _token_logprobs(entry: int) -> TokenLogprobs:
    return TokenLogprobs(-(entry % 1013) / 100, ())


class FakeDevice:
    """Blocks of slots on a device and on its host, and the copies between them. A slot never written holds None."""

    def __init__(self, blocks: BlockManager, *, vocab_size: int = VOCAB_SIZE, errors: Errors | None = None) -> None:
        self.block_size = blocks.block_size
        self.blocks: list[list[int | None]] = [[None] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.host_blocks: list[list[int | None]] = [[None] * blocks.block_size for _ in range(blocks.num_host_blocks)]
        self.vocab_size = vocab_size
        self.errors = dict(errors or {})
        self._entries: dict[Sequence, list[int]] = {}

    def execute(self, output: SchedulerOutput) -> list[SequenceOutput]:
        """One step: the copies, then the K/V of the whole batch, and only then does anybody attend."""
        self.transfer(output.transfers)
        self.write([(item.seq, item.start, item.num_tokens) for item in output.scheduled])
        return [self._answer(item) for item in output.scheduled]

    def transfer(self, transfers: Transfers) -> None:
        """The three kinds of copies in their order; within a kind everything is read before anything is written."""
        for pairs, sources, targets in (
            (transfers.swap_out, self.blocks, self.host_blocks),
            (transfers.swap_in, self.host_blocks, self.blocks),
            (transfers.copies, self.blocks, self.blocks),
        ):
            written = [target for _, target in pairs]
            assert len(set(written)) == len(written), f"a block is the target of two copies: {pairs}"
            for target, content in [(target, list(sources[source])) for source, target in pairs]:
                targets[target] = content

    def write(self, shares: list[tuple[Sequence, int, int]]) -> None:
        """Store the entries of tokens [start, start + num_tokens) of each sequence, all in one step."""
        writers: dict[int, int] = {}
        for seq, start, num_tokens in shares:
            entries = self.entries(seq)
            for position in range(start, start + num_tokens):
                block_id = seq.block_table[position // self.block_size]
                writer = writers.setdefault(block_id, seq.seq_id)
                assert writer == seq.seq_id, f"sequences {writer} and {seq.seq_id} both write block {block_id}"
                self.blocks[block_id][position % self.block_size] = entries[position]

    def read(self, seq: Sequence, num_tokens: int) -> list[int]:
        """The first entries of a sequence through its block table; AssertionError unless each is that of its prefix."""
        found = [entry for block_id in seq.block_table for entry in self.blocks[block_id]][:num_tokens]
        expected = self.entries(seq)[:num_tokens]
        if found != expected:
            assert len(found) == num_tokens, f"sequence {seq.seq_id}: table {seq.block_table} ends before {num_tokens}"
            position = next(i for i in range(num_tokens) if found[i] != expected[i])
            state = "was never written" if found[position] is None else "holds another prefix"
            block_id = seq.block_table[position // self.block_size]
            raise AssertionError(f"sequence {seq.seq_id}, position {position}: its slot in block {block_id} {state}")
        return expected

    def entries(self, seq: Sequence) -> list[int]:
        """The right entries of all its known tokens."""
        entries = self._entries.setdefault(seq, [])
        if len(entries) < seq.num_tokens:
            entries += prefix_entries(seq.token_ids[len(entries) :], entries[-1] if entries else 0)
        return entries

    def _answer(self, item: ScheduledSequence) -> SequenceOutput:
        seq, end = item.seq, item.start + item.num_tokens
        context = self.read(seq, end)
        prompt_logprobs: list[TokenLogprobs | None] = []
        if seq.needs_prompt_logprobs:
            # The logits of position p judge token p + 1, so a chunk speaks of the tokens one further on.
            judged = self.entries(seq)[item.start + 1 : min(end + 1, seq.num_prompt_tokens)]
            prompt_logprobs = [None] * (item.start == 0) + [_token_logprobs(entry) for entry in judged]
        samples = tuple(sample(context, seq.seed, seq.index + i, self.vocab_size, self.errors)
                        for i in range(item.num_samples))
        return SequenceOutput(samples, tuple(prompt_logprobs))


class FakeEngine:
    """The engine's loop around a fake device; after each step everything that must hold is checked."""

    def __init__(self, scheduler: Scheduler, *, vocab_size: int = VOCAB_SIZE, errors: Errors | None = None) -> None:
        self.scheduler = scheduler
        self.blocks = scheduler.block_manager
        self.device = FakeDevice(self.blocks, vocab_size=vocab_size, errors=errors)
        self.sequences: dict[int, Sequence] = {}  # every one that was ever accepted or forked
        self.steps: list[SchedulerOutput] = []
        self.first_scheduled: list[int] = []  # seq_ids in the order in which they first got tokens
        self.finished: list[int] = []  # seq_ids in the order in which they ended
        self.num_preemptions: dict[int, int] = {}  # by seq_id
        self._replayed: dict[int, list[int]] = {}  # the block tables as the events tell them
        self._prefixes: dict[bytes, list[int]] = {}  # block hash -> the entries of a block so named
        self._num_hashes: dict[int, int] = {}
        self._live: list[Sequence] = []
        self._max_num_steps = 0

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)
            self._meet(seq)
            self._max_num_steps += seq.max_num_tokens * (1 + seq.num_forks)

    def step(self) -> SchedulerOutput:
        # The oldest sequence goes on in every step and is never set back, so no load can take longer than this.
        assert len(self.steps) < self._max_num_steps, "no end in sight"
        oldest = next(self.scheduler.unfinished())
        output = self.scheduler.schedule()
        assert output.scheduled[0].seq is oldest, "the oldest sequence got nothing"
        self._check_output(output)
        self.steps.append(output)
        for item in output.scheduled:
            if item.seq.seq_id not in self.first_scheduled and not item.seq.index:
                self.first_scheduled.append(item.seq.seq_id)
        for seq in output.preempted:
            self.num_preemptions[seq.seq_id] = self.num_preemptions.get(seq.seq_id, 0) + 1
        for seq in self.scheduler.update(output, self.device.execute(output)):
            if seq.seq_id not in self.sequences:
                self._meet(seq)
            assert self.sequences[seq.seq_id] is seq
            if seq.is_finished:
                self.finished.append(seq.seq_id)
        self.check()
        return output

    def run(self, *seqs: Sequence) -> list[Sequence]:
        """Serve these and whatever else is unfinished to the end; returns all choices ever seen, by seq_id."""
        self.add(*seqs)
        while self.scheduler.has_unfinished():
            self.step()
        self.check_drained()
        return [self.sequences[seq_id] for seq_id in sorted(self.sequences)]

    def finish(self, seq: Sequence, reason: str = "abort") -> None:
        self.scheduler.finish(seq, reason)
        self.check()

    def alone(self, seq: Sequence) -> Outcome:
        """The reference for this sequence."""
        return run_alone(seq, vocab_size=self.device.vocab_size, errors=self.device.errors)

    def check_outputs(self) -> None:
        """Every sequence ended as it would have ended alone; one that was aborted got that far."""
        for seq in self.sequences.values():
            expected = self.alone(seq)
            num_outputs = seq.num_output_tokens
            assert seq.is_finished, f"sequence {seq.seq_id} did not end"
            assert seq.output_token_ids == expected.output_token_ids[:num_outputs], f"sequence {seq.seq_id}"
            assert seq.logprobs == expected.logprobs[:num_outputs], f"sequence {seq.seq_id}"
            if seq.finish_reason != "abort":
                assert (num_outputs, seq.finish_reason) == (len(expected.output_token_ids), expected.finish_reason)

    def check(self) -> None:
        """Queues, blocks, events and prefix index agree with each other and with what the device holds."""
        self.scheduler.check()
        for seq in self._live:
            if seq.status is not SequenceStatus.RUNNING:
                assert not seq.block_table, f"sequence {seq.seq_id}, {seq.status}: holds device blocks"
            if seq.status is not SequenceStatus.SWAPPED:
                assert not seq.host_blocks, f"sequence {seq.seq_id}, {seq.status}: holds host blocks"
        self._check_index()
        self._live = [seq for seq in self._live if not seq.is_finished]
        queued = [seq.seq_id for seq in self.scheduler.unfinished()]
        assert queued == [seq.seq_id for seq in sorted(self._live, key=lambda seq: seq.seq_id)], "not each in one queue"
        self._replay(self.blocks.take_events())
        assert self._replayed == self.blocks.block_tables, "the events tell of other block tables"

    def check_drained(self) -> None:
        """Nothing is held by anybody."""
        assert not self.scheduler.has_unfinished()
        assert self.blocks.num_used_blocks == 0
        assert len(self.blocks.free_blocks) == self.blocks.num_blocks
        assert self.blocks.ref_counts == [0] * self.blocks.num_blocks
        assert len(self.blocks.free_host_blocks) == self.blocks.num_host_blocks
        assert not self.blocks.block_tables
        assert not self.blocks.host_tables

    def _meet(self, seq: Sequence) -> None:
        self.sequences[seq.seq_id] = seq
        self._live.append(seq)

    def _check_output(self, output: SchedulerOutput) -> None:
        """Every runner gets what the one rule gives it, in order, and nobody waits without a reason."""
        config = self.scheduler.config
        assert [item.seq for item in output.scheduled] == self.scheduler.running, "a running sequence got no tokens"
        left = config.max_num_batched_tokens
        num_runners = 0
        for item in output.scheduled:
            width = 1 + item.seq.num_forks
            num_runners += width
            assert 0 < item.num_tokens == min(item.num_known_tokens - item.start, left)
            is_whole = item.start + item.num_tokens == item.num_known_tokens == item.seq.num_tokens
            assert item.num_samples == (width if is_whole else 0)
            assert is_whole or config.enable_chunked_prefill, "a chunk though chunked prefill is off"
            left -= item.num_tokens
        assert output.num_batched_tokens == config.max_num_batched_tokens - left
        behind = [*self.scheduler.swapped, *self.scheduler.waiting]
        if not behind or output.preempted or not left:
            return
        if num_runners + 1 + behind[0].num_forks > self.scheduler.max_num_seqs:
            return
        num_needed = -(-behind[0].num_tokens // self.blocks.block_size)
        fits_budget = config.enable_chunked_prefill or behind[0].num_tokens - behind[0].num_computed_tokens <= left
        assert num_needed + num_runners > len(self.blocks.free_blocks) or not fits_budget, "kept waiting for no reason"

    def _replay(self, events: Iterable[BlockEvent]) -> None:
        for kind, seq_id, block_ids in events:
            table = self._replayed.setdefault(seq_id, [])
            if kind in ("share", "fork", "swap_in"):
                assert not table, f"{kind}: sequence {seq_id} already had blocks"
                table.extend(block_ids)
            elif kind == "allocate":
                table.extend(block_ids)
            elif kind == "copy":
                table[table.index(block_ids[0])] = block_ids[1]
            elif kind in ("release", "swap_out"):
                assert list(block_ids) == table[: len(block_ids)], f"{kind}: sequence {seq_id} held {table}"
                table.clear()
            else:
                assert (kind, seq_id) == ("evict", -1), f"unknown event {kind}"
            if not table:
                del self._replayed[seq_id]

    def _check_index(self) -> None:
        """No hash names two prefixes, and each indexed block holds the prefix of its hash."""
        size = self.blocks.block_size
        for seq in self._live:
            for i in range(self._num_hashes.get(seq.seq_id, 0), len(seq.block_hashes)):
                named = self.device.entries(seq)[i * size : (i + 1) * size]
                assert self._prefixes.setdefault(seq.block_hashes[i], named) == named, "one hash for two prefixes"
            self._num_hashes[seq.seq_id] = len(seq.block_hashes)
        for block_hash, block_id in self.blocks.cached_blocks.items():
            assert self.device.blocks[block_id] == self._prefixes[block_hash], f"block {block_id}: the index is wrong"
