"""The engine's steps as JSON records: what the live page, the trace file and `vllm-mini top` are fed with.

A snapshot record says everything about the scheduler and its blocks, a step or change record what differs since the
record before. All states in them are read from the engine after the fact and none is worked out again, so a record is
right whatever led to it, and taking one twice does no harm. Without a sink nothing is read at all.

Does not know HTTP, files or who listens. Belongs to the thread that runs the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_mini.block_manager import BlockEvent
from vllm_mini.engine import LLMEngine, StepSnapshot
from vllm_mini.scheduler import Refusal, SchedulerOutput
from vllm_mini.sequence import Sequence
from vllm_mini.trace import RECORD_VERSION, Record

__all__ = ["LiveRecorder"]

logger = logging.getLogger(__name__)

HASH_BYTES = 4  # of a block's hash: enough to tell blocks apart by eye

Sink = Callable[[Record], None]


class LiveRecorder:
    """An observer of one engine's steps that hands a record of each to its sinks."""

    def __init__(
        self, engine: LLMEngine, *, model: str = "", hide_text: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `hide_text` records hold numbers of tokens instead of their texts, and no hashes (texts can be guessed)."""
        self._engine = engine
        self._scheduler = engine.scheduler
        self._blocks = engine.scheduler.block_manager
        self._model = model
        self._hide_text = hide_text
        self._clock = clock
        self._start = clock()
        self._sinks: list[Sink] = []
        self._next_id = 0
        self._texts: dict[int, str] = {}  # token id -> text
        # What the records so far have told; meaningless without a sink.
        self._known: dict[int, Sequence] = {}  # unfinished ones
        self._num_told_tokens: dict[int, int] = {}
        self._told_tables: dict[int, list[int]] = {}
        self._num_told_events = 0  # of those that wait for the next step's snapshot
        self._num_told_prefixes = 0
        self._step_start = self._start
        engine.observers.append(self.on_step)

    def open(self, sink: Sink) -> Record:
        """Hand all records from now on to `sink`; returns the snapshot that they build on."""
        if not self._sinks:
            self._next_id += 1  # a gap, for those who hold older records: something may have happened unseen
            self._reset()
        if sink not in self._sinks:
            self._sinks.append(sink)
        return self.snapshot()

    def close(self, sink: Sink) -> None:
        """The end of open(); a sink that is not open is left alone."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    def snapshot(self) -> Record:
        """Everything, as it is now. To be taken between two steps, while at least one sink is open."""
        config, scheduler, blocks = self._scheduler.config, self._scheduler, self._blocks
        hashes = {} if self._hide_text else {block_id: _short(block_hash) for block_hash, block_id
                                             in blocks.cached_blocks.items()}
        return {
            "type": "snapshot", "version": RECORD_VERSION, "id": self._next_id - 1, "time": self._now(),
            "wall_time": time.time(), "model": self._model, "shows_text": not self._hide_text,
            "block_size": blocks.block_size, "num_blocks": blocks.num_blocks, "num_host_blocks": blocks.num_host_blocks,
            "max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": scheduler.max_num_tokens, "preemption_mode": config.preemption_mode,
            "prefix_caching": blocks.enable_prefix_caching, "chunked_prefill": config.enable_chunked_prefill,
            "continuous_batching": config.enable_continuous_batching,
            "step": scheduler.num_steps, "ref_counts": list(blocks.ref_counts),
            "cached": list(blocks.cached_blocks.values()), "hashes": hashes, "free": list(blocks.free_blocks),
            "tables": {seq_id: list(table) for seq_id, table in blocks.block_tables.items()},
            "seqs": [self._describe(seq) | {"tokens": self._tokens(seq.token_ids)} for seq in scheduler.unfinished()],
            "states": [_state(seq) for seq in scheduler.unfinished()], **self._totals(),
        }

    def between_steps(self) -> None:
        """For whoever runs the engine, before each step: notes the time, and tells what came or went since the last."""
        if not self._sinks:
            return
        self._step_start = self._clock()
        if self._has_changed():
            self._tell(lambda: {"type": "change", **self._difference(tuple(self._blocks.events[self._num_told_events :]))})
            self._num_told_events = len(self._blocks.events)
            self._tell_if_prefixes_were_forgotten()

    def on_step(self, step: StepSnapshot) -> None:
        """The observer that the engine calls after each step."""
        if not self._sinks:
            return
        events = step.events[self._num_told_events :]
        self._num_told_events = 0
        self._tell(lambda: self._describe_step(step.schedule) | self._difference(events, step.schedule, step.finished))
        self._tell_if_prefixes_were_forgotten()
        self._step_start = self._clock()

    def _tell_if_prefixes_were_forgotten(self) -> None:
        """That happens to all blocks at once after a failure, without an event, so all has to be told again."""
        if not self._blocks.cached_blocks and self._num_told_prefixes:
            self._tell(self.snapshot)
        self._num_told_prefixes = len(self._blocks.cached_blocks)

    def _tell(self, make: Callable[[], Record]) -> None:
        """Hand a record to all sinks. Whatever goes wrong with it must not take the engine's step down."""
        try:
            record = {**make(), "id": self._next_id}
            self._next_id += 1
            for sink in tuple(self._sinks):
                sink(record)
        except Exception:
            logger.exception("a live record could not be made: nothing is recorded from here on")
            self._sinks.clear()

    def _reset(self) -> None:
        self._known = {seq.seq_id: seq for seq in self._scheduler.unfinished()}
        self._num_told_tokens = {seq.seq_id: seq.num_tokens for seq in self._scheduler.unfinished()}
        self._told_tables = {seq_id: list(table) for seq_id, table in self._blocks.block_tables.items()}
        self._num_told_events = len(self._blocks.events)
        self._num_told_prefixes = len(self._blocks.cached_blocks)
        self._step_start = self._clock()

    def _has_changed(self) -> bool:
        waiting = self._scheduler.waiting
        return (len(self._blocks.events) > self._num_told_events
                or bool(waiting and waiting[-1].seq_id not in self._known)
                or any(seq.is_finished for seq in self._known.values()))

    def _describe_step(self, schedule: SchedulerOutput) -> Record:
        return {
            "type": "step", "step": schedule.step_id, "seconds": round(self._clock() - self._step_start, 6),
            "scheduled": [[item.seq.seq_id, "prefill" if item.is_prefill else "decode", item.start, item.num_tokens,
                           item.num_known_tokens] for item in schedule.scheduled],
            "admitted": _ids(schedule.admitted), "resumed": _ids(schedule.resumed), "preempted": _ids(schedule.preempted),
            "refusal": _refusal(schedule.refusal),
        }

    def _difference(
        self, events: tuple[BlockEvent, ...], schedule: SchedulerOutput | None = None, finished: Iterable[Sequence] = (),
    ) -> Record:
        """What is not as the record before said. Afterwards it counts as told."""
        scheduled = [] if schedule is None else [item.seq for item in schedule.scheduled]
        preempted = () if schedule is None else schedule.preempted
        new = {seq.seq_id: seq for seq in (*self._scheduler.unfinished(), *scheduled, *finished)
               if seq.seq_id not in self._known}
        self._known.update(new)
        ended = [seq for seq in self._known.values() if seq.is_finished]
        changed = {seq.seq_id: seq for seq in (*new.values(), *scheduled, *preempted, *ended)}
        tables = {event.seq_id: list(self._blocks.block_tables.get(event.seq_id, ())) for event in events
                  if event.seq_id >= 0}
        # A swap_out names the blocks that are copied, but releases all that the sequence held.
        held = [block_id for event in events if event.kind == "swap_out"
                for block_id in self._told_tables.get(event.seq_id, ())]
        parents = self._parents(events, schedule)
        touched = {*parents, *held, *(block_id for event in events for block_id in event.block_ids)}
        record = {
            "time": self._now(), "new": [self._describe(seq) for seq in new.values()],
            "tokens": {seq_id: self._tokens(seq.token_ids[self._num_told_tokens.get(seq_id, 0) :])
                       for seq_id, seq in changed.items() if seq.num_tokens > self._num_told_tokens.get(seq_id, 0)},
            "states": [_state(seq) for seq in changed.values()],
            "events": [[event.kind, event.seq_id, *event.block_ids] for event in events], "tables": tables,
            "blocks": [[block_id, self._blocks.ref_counts[block_id], self._hash(block_id)] for block_id in sorted(touched)],
            "parents": {} if self._hide_text else parents, "free": self._free_ends(touched), **self._totals(),
        }
        self._num_told_tokens.update((seq_id, seq.num_tokens) for seq_id, seq in changed.items())
        self._told_tables.update(tables)
        for seq in ended:
            del self._known[seq.seq_id], self._num_told_tokens[seq.seq_id]
            self._told_tables.pop(seq.seq_id, None)
        return record

    def _parents(self, events: tuple[BlockEvent, ...], schedule: SchedulerOutput | None) -> dict[int, str | None]:
        """The blocks that the step filled, each with the hash of the block before it in its sequence."""
        size = self._blocks.block_size
        released = {event.seq_id: event.block_ids for event in events if event.kind == "release"}
        found: dict[int, str | None] = {}
        for item in () if schedule is None else schedule.scheduled:
            table = item.seq.block_table or released.get(item.seq.seq_id, ())
            hashes = item.seq.block_hashes
            for index in range(item.start // size, (item.start + item.num_tokens) // size):
                if index < min(len(table), len(hashes)):
                    found[table[index]] = _short(hashes[index - 1]) if index else None
        return found

    def _free_ends(self, touched: set[int]) -> list[list[int]]:
        """What now stands at the front and at the back of the free list; between them is all that was not touched."""
        front: list[int] = []
        back: list[int] = []
        for end, order in ((front, iter(self._blocks.free_blocks)), (back, reversed(self._blocks.free_blocks))):
            for block_id in order:
                if block_id not in touched:
                    break
                end.append(block_id)
        return [front, back[::-1]] if len(front) < len(self._blocks.free_blocks) else [front, []]

    def _totals(self) -> Record:
        scheduler, blocks = self._scheduler, self._blocks
        return {
            "running": _ids(scheduler.running), "swapped": _ids(scheduler.swapped), "waiting": _ids(scheduler.waiting),
            "num_preemptions": scheduler.num_preemptions, "num_prefix_queries": blocks.num_prefix_queries,
            "num_prefix_hits": blocks.num_prefix_hits, "num_free_host_blocks": len(blocks.free_host_blocks),
        }

    def _describe(self, seq: Sequence) -> Record:
        """What stays as it is for all of its life."""
        return {"id": seq.seq_id, "request": seq.request_id, "index": seq.index, "num_prompt_tokens": seq.num_prompt_tokens,
                "max_num_tokens": seq.max_num_tokens, "n": seq.params.n, "seen": self._now()}

    def _tokens(self, token_ids: list[int]) -> list[str] | int:
        """Their texts, or only how many there are."""
        if self._hide_text:
            return len(token_ids)
        return [self._text(token_id) for token_id in token_ids]

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            tokenizer = self._engine.tokenizer
            text = self._texts[token_id] = f"<{token_id}>" if tokenizer is None else tokenizer.token_text(token_id)
        return text

    def _hash(self, block_id: int) -> str | bool:
        """A block's hash in short; only whether it has one, where texts are hidden."""
        block_hash = self._blocks.block_hashes[block_id]
        return block_hash is not None and (True if self._hide_text else block_hash[:HASH_BYTES].hex())

    def _now(self) -> float:
        return round(self._clock() - self._start, 6)


def _short(block_hash: bytes) -> str:
    return block_hash[:HASH_BYTES].hex()


def _ids(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs]


def _state(seq: Sequence) -> list[Any]:
    """What changes in its life, but for tokens and blocks."""
    return [seq.seq_id, seq.status.value, seq.num_computed_tokens, seq.num_cached_tokens, len(seq.host_blocks),
            seq.finish_reason]


def _refusal(refusal: Refusal | None) -> list[Any] | None:
    return None if refusal is None else [refusal.seq.seq_id, refusal.cause, refusal.num_needed, refusal.num_left]
