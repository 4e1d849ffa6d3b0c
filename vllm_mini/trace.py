"""Traces: the live records in a file of JSON lines, read again, and as a timeline for Perfetto or chrome://tracing.

The first line is a snapshot, every other one a record that follows it. `LiveState` is what the lines up to one come to:
for the terminal's view, and for tests that compare it with the engine itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from vllm_mini.config import ConfigError

__all__ = ["RECORD_VERSION", "LiveState", "Record", "TraceWriter", "read_trace", "to_perfetto"]

logger = logging.getLogger(__name__)

RECORD_VERSION = 1

Record = dict[str, Any]  # one of the records that live.py makes


class TraceWriter:
    """A sink that appends records to a file, each as soon as it comes. A full disk ends the trace, not the server."""

    def __init__(self, path: Path) -> None:
        """Begins a new file. ConfigError where that is not possible."""
        try:
            self._file: TextIO | None = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the trace cannot be written to {path}: {error.strerror}") from error

    def write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            logger.error("the trace ends here: %s", error.strerror)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # what was buffered does not fit either
                logger.error("the end of the trace was lost: %s", error.strerror)


def read_trace(path: Path) -> Iterator[Record]:
    """The records of a file. ConfigError for one that is no trace; a last line that was cut off is left out."""
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    if not line.endswith("\n") and number > 1:
                        return
                    raise ConfigError(f"{path}, line {number}: not a record of a trace") from error
                if number == 1:
                    _check_first(path, record)
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from error
    if not number:
        raise ConfigError(f"{path} is no trace: it is empty")


def _check_first(path: Path, record: Any) -> None:
    if not isinstance(record, dict) or record.get("type") != "snapshot":
        raise ConfigError(f"{path} is no trace: it does not begin with a snapshot")
    if record.get("version") != RECORD_VERSION:
        raise ConfigError(f"{path} is a trace of version {record.get('version')!r:.20}; this is for {RECORD_VERSION}")


class LiveState:
    """The engine as the records so far describe it."""

    def __init__(self, snapshot: Record) -> None:
        self.apply(snapshot)

    def apply(self, record: Record) -> None:
        if record["type"] == "snapshot":
            self._begin(record)
        elif record["type"] in ("step", "change"):
            self._change(record)

    def _begin(self, snapshot: Record) -> None:
        self.config = {name: value for name, value in snapshot.items() if not isinstance(value, (list, dict))}
        self.ref_counts: list[int] = list(snapshot["ref_counts"])
        self.cached: set[int] = set(snapshot["cached"])
        self.free: list[int] = list(snapshot["free"])
        self.tables: dict[int, list[int]] = {int(seq_id): table for seq_id, table in snapshot["tables"].items()}
        self.seqs: dict[int, Record] = {}
        self.step: int = snapshot["step"]
        self.totals = _totals(snapshot)
        self._meet(snapshot["seqs"], snapshot["states"])
        for seq in snapshot["seqs"]:
            self._add_tokens(seq["id"], seq["tokens"])

    def _change(self, record: Record) -> None:
        self._meet(record["new"], record["states"])
        for seq_id, tokens in record["tokens"].items():
            self._add_tokens(int(seq_id), tokens)
        for seq_id, table in record["tables"].items():
            self.tables[int(seq_id)] = table
            if not table:
                del self.tables[int(seq_id)]
        touched = set()
        for block_id, ref_count, block_hash in record["blocks"]:
            touched.add(block_id)
            self.ref_counts[block_id] = ref_count
            (self.cached.add if block_hash else self.cached.discard)(block_id)
        front, back = record["free"]
        self.free = [*front, *(block_id for block_id in self.free if block_id not in touched), *back]
        self.totals = _totals(record)
        if record["type"] == "step":
            self.step = record["step"] + 1

    def _meet(self, new: Iterable[Record], states: Iterable[list[Any]]) -> None:
        for seq in new:
            self.seqs[seq["id"]] = {**seq, "num_tokens": 0}
        for seq_id, status, num_computed, num_cached, num_host_blocks, finish_reason in states:
            self.seqs[seq_id].update(status=status, num_computed_tokens=num_computed, num_cached_tokens=num_cached,
                                     num_host_blocks=num_host_blocks, finish_reason=finish_reason)

    def _add_tokens(self, seq_id: int, tokens: list[str] | int) -> None:
        self.seqs[seq_id]["num_tokens"] += tokens if isinstance(tokens, int) else len(tokens)


def _totals(record: Record) -> Record:
    return {name: record[name] for name in ("running", "swapped", "waiting", "num_preemptions", "num_prefix_queries",
                                            "num_prefix_hits", "num_free_host_blocks")}


def to_perfetto(records: Iterable[Record]) -> Record:
    """Chrome's trace event format: a track for the steps, one for each sequence, and counters of blocks and tokens."""
    events: list[Record] = [_name("process_name", "mini-vLLM", 0), _name("thread_name", "steps", 0)]
    state: LiveState | None = None
    for record in records:
        if record["type"] == "snapshot":
            state = LiveState(record)
            continue
        assert state is not None  # read_trace begins with a snapshot
        state.apply(record)
        for seq in record["new"]:
            events.append(_name("thread_name", f"{seq['request']} #{seq['index']} (seq {seq['id']})", seq["id"] + 1))
        if record["type"] == "step":
            events += _step_events(record, state)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step_events(record: Record, state: LiveState) -> Iterator[Record]:
    end = record["time"] * 1e6
    span = {"ph": "X", "pid": 0, "ts": max(0.0, end - record["seconds"] * 1e6), "dur": record["seconds"] * 1e6}
    num_tokens = sum(item[3] for item in record["scheduled"])
    yield {**span, "tid": 0, "name": f"step {record['step']}",
           "args": {"tokens": num_tokens, "sequences": len(record["scheduled"])}}
    for seq_id, kind, start, count, _ in record["scheduled"]:
        yield {**span, "tid": seq_id + 1, "name": kind, "args": {"start": start, "tokens": count}}
    for seq_id in record["preempted"]:
        yield {"ph": "i", "s": "t", "pid": 0, "tid": seq_id + 1, "ts": span["ts"], "name": "preempted"}
    num_used = len(state.ref_counts) - len(state.free)
    num_cached = sum(block_id in state.cached for block_id in state.free)
    yield {"ph": "C", "pid": 0, "ts": end, "name": "blocks",
           "args": {"used": num_used, "cached": num_cached, "free": len(state.free) - num_cached}}
    yield {"ph": "C", "pid": 0, "ts": end, "name": "tokens in a step", "args": {"tokens": num_tokens}}


def _name(what: str, name: str, thread: int) -> Record:
    return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": {"name": name}}
