"""Watch the engine at work: six sequences, a pool too small for them, and every block event in plain words.

    python -m vllm_mini.demo           a tiny random model: no weights, no network, a few seconds
    python -m vllm_mini.demo --real    the same script on SmolLM2, which continues real sentences

It only tells what the engine's StepSnapshots say: the scheduler and the block manager decide all of it, on the same
path that serves real requests. The second column of a block line is BlockEvent.kind in block_manager.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from vllm_mini.block_manager import BlockEvent
from vllm_mini.config import ConfigError, EngineConfig
from vllm_mini.engine import LLMEngine, StepSnapshot
from vllm_mini.fetch import FetchError, fetch_default_model
from vllm_mini.loader import DUMMY_NAME
from vllm_mini.scheduler import ScheduledSequence
from vllm_mini.sequence import SamplingParams, Sequence

__all__ = ["REQUESTS", "Narrator", "Request", "main", "make_config", "make_params"]


class Request(NamedTuple):
    """A line of the script. Both prompts have the same number of tokens, so both models live through the same story."""

    arrival: int  # iteration
    prompt: str  # for the dummy: a token is a byte
    real_prompt: str
    max_tokens: int
    n: int = 1


REQUESTS = (
    Request(0, "The sun is", "Once upon a time there was a little girl who", 4),  # 10 tokens
    Request(0, "Hello", "The capital of France is", 3),  # 5 tokens
    Request(1, "The sun rises", "Once upon a time there was a little boy who lived in the", 10),  # 13, 8 as in seq_0
    Request(3, "Tell me two jokes:", "Dear Grandma, thank you so much for the lovely birthday present. "
            "I have always wanted a", 6, n=2),  # 18: more than the rest of a step's budget; forks into seq_3 and seq_4
    Request(4, "Hi!", "I like to", 4),  # 3 tokens
)
LETTERS = dict.fromkeys(b"abcdefghijklmnopqrstuvwxyz ", 100.0)  # logit_bias: the dummy shall babble readably


def make_config(model: str = DUMMY_NAME, preemption_mode: Literal["swap", "recompute"] = "swap") -> EngineConfig:
    """Small blocks and few of them, so that all happens soon; float32, so that no answer depends on the others."""
    return EngineConfig(model=model, dtype="float32", block_size=4, num_kv_blocks=13, num_host_blocks=4,
                        max_model_len=32, max_num_batched_tokens=16, preemption_mode=preemption_mode)


def make_params(request: Request, *, real: bool = False) -> SamplingParams:
    """Greedy, but for the request that forks: its two answers shall differ. Ending early would change the story."""
    return SamplingParams(n=request.n, temperature=0.0 if request.n == 1 else 0.7, seed=11, ignore_eos=True,
                          max_tokens=request.max_tokens, logit_bias={} if real else LETTERS)


class Narrator:
    """Tells each step on paper, and keeps the books that the closing table is made of. A sink for `on_step`.

    `tables` is a replay of the events alone; it equals BlockManager.block_tables after every step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tables: dict[int, list[int]] = {}  # seq_id -> block ids
        self.num_blocks: Counter[str] = Counter()  # by kind of event
        self.num_preemptions: Counter[str] = Counter()  # by the event that takes the blocks away
        self.peak_blocks = 0
        self.peak_seqs = 0
        self.num_recomputed_tokens = 0
        self.empty_paged: list[int] = []  # for each sequence and step: slots in its blocks that hold no token
        self.empty_contiguous: list[int] = []  # the same, had it reserved max_model_len slots
        self._stored: dict[int, int] = {}  # seq_id -> tokens whose K/V it had after its last step
        self._texts: dict[tuple[str, int], str] = {}  # (request_id, index) -> answer so far

    def __call__(self, step: StepSnapshot) -> None:
        print(iteration_line(step))
        if step.schedule.step_id == 0:
            can_swap = self.config.preemption_mode == "swap"
            host = f", and {self.config.num_host_blocks} in host memory" if can_swap else ""
            _tell("pool", f"{self.config.num_kv_blocks} blocks of {self.config.block_size} tokens{host}")
        for event in step.events:
            self._tell_preemption(event, step)
            others = self._replay(event)
            _tell(event.kind, self._sentence(event, others, step))
        self._measure(step)
        for output in step.outputs:
            key = (output.request_id, output.index)
            self._texts[key] = self._texts.get(key, "") + output.text
        for seq in step.finished:
            print(f"[Done] {_name(seq.seq_id)} output: {self._texts[seq.request_id, seq.index]!r}")

    def _tell_preemption(self, event: BlockEvent, step: StepSnapshot) -> None:
        """A line more before the event that takes a preempted sequence's blocks away."""
        if event.seq_id not in _ids(step.schedule.preempted) or event.kind not in ("swap_out", "release"):
            return
        self.num_preemptions[event.kind] += 1
        reason = "; no room to swap" if self.config.preemption_mode == "swap" and event.kind == "release" else ""
        _tell("preempt", f"no free block: {_name(event.seq_id)}, the youngest, makes way{reason}")

    def _replay(self, event: BlockEvent) -> dict[int, list[int]]:
        """Do to `tables` what the event did to the block tables; returns who else holds its blocks: seq_id -> ids."""
        others = {seq_id: held for seq_id, table in self.tables.items() if seq_id != event.seq_id
                  and (held := [block_id for block_id in event.block_ids if block_id in table])}
        self.num_blocks[event.kind] += 1 if event.kind == "copy" else len(event.block_ids)
        if event.kind == "copy":
            source, target = event.block_ids
            table = self.tables[event.seq_id]
            table[table.index(source)] = target
        elif event.kind in ("release", "swap_out"):
            del self.tables[event.seq_id]
        elif event.kind != "evict":
            self.tables.setdefault(event.seq_id, []).extend(event.block_ids)
        self.peak_blocks = max(self.peak_blocks, len(set(itertools.chain(*self.tables.values()))))
        return others

    def _sentence(self, event: BlockEvent, others: dict[int, list[int]], step: StepSnapshot) -> str:
        """One event in words; `others` are the sequences that hold some of its blocks too."""
        name, blocks = _name(event.seq_id), _list(event.block_ids)
        also = " and ".join(map(_name, others))
        match event.kind:
            case "allocate" | "share":
                item = next(item for item in step.schedule.scheduled if item.seq.seq_id == event.seq_id)
                if item.seq in step.schedule.resumed:
                    return self._resume_sentence(event, item)
                if item.seq not in step.schedule.admitted:
                    return f"{name} grows into {blocks}"
                if event.kind == "share":
                    return f"{name} shares {blocks}{also and f' with {also}'}: the same first {item.start} tokens"
                rest = "the other " if item.start else ""
                return f"{name} takes {blocks} for {rest}{item.num_known_tokens - item.start} tokens"
            case "fork":
                parent = next(item for item in step.schedule.scheduled
                              if item.seq.seq_id < event.seq_id < item.seq.seq_id + item.num_samples)
                self._stored[event.seq_id] = parent.num_known_tokens
                return f"{name} forks off {_name(parent.seq.seq_id)}: the same blocks {blocks}"
            case "copy":
                source, target = event.block_ids
                return f"{name} writes to [{source}], which {also} has too: into a copy, [{target}]"
            case "evict":
                return f"{blocks} is taken for new tokens: the old prefix in it is forgotten"
            case "swap_out":
                return f"{name} leaves {blocks}, copied to host memory"
            case "swap_in":
                return f"{name} is back: copied from host memory to {blocks}"
            case _:  # "release"
                kept = {block_id for held in others.values() for block_id in held}
                freed = _list(block_id for block_id in event.block_ids if block_id not in kept)
                cause = "lets go" if event.seq_id in _ids(step.schedule.preempted) else "is done"
                stay = f", {_list(sorted(kept))} stay with {also}" if kept else ""
                return f"{name} {cause}: {freed} free again{stay}"

    def _resume_sentence(self, event: BlockEvent, item: ScheduledSequence) -> str:
        """How a preempted sequence that was not swapped out comes back; `allocate` is its last event."""
        name, blocks = _name(event.seq_id), _list(event.block_ids)
        stored = self._stored[event.seq_id]
        if event.kind == "share":
            return f"{name} is back: {item.start} of its {stored} tokens are still in {blocks}"
        self.num_recomputed_tokens += stored - item.start
        return f"{name}{'' if item.start else ' is back:'} takes {blocks} to compute {stored - item.start} tokens again"

    def _measure(self, step: StepSnapshot) -> None:
        scheduled = step.schedule.scheduled
        self.peak_seqs = max(self.peak_seqs, len(scheduled))
        assert self.config.max_model_len is not None
        for item in scheduled:
            self._stored[item.seq.seq_id] = item.start + item.num_tokens
            self.empty_paged.append(-item.num_known_tokens % self.config.block_size)
            self.empty_contiguous.append(self.config.max_model_len - item.num_known_tokens)

    def closing_table(self) -> Table:
        """What happened to blocks, in numbers, beside a cache that reserves max_model_len slots for each sequence."""
        config, blocks, preemptions = self.config, self.num_blocks, self.num_preemptions
        assert config.num_kv_blocks is not None
        assert config.max_model_len is not None
        num_slots = config.num_kv_blocks * config.block_size
        rows = [
            ("sequences running at once, at most", self.peak_seqs, num_slots // config.max_model_len),
            ("empty slots per running sequence, mean", _mean(self.empty_paged), _mean(self.empty_contiguous)),
            ("blocks in use, at most", f"{self.peak_blocks} of {config.num_kv_blocks}", ""),
            ("blocks taken", blocks["allocate"] + blocks["copy"] + blocks["swap_in"], ""),
            ("blocks shared (prefix + fork)", f"{blocks['share']} + {blocks['fork']}", ""),
            ("blocks copied on write", blocks["copy"], ""),
            ("blocks evicted (old prefixes)", blocks["evict"], ""),
            ("blocks swapped (out + in)", f"{blocks['swap_out']} + {blocks['swap_in']}", ""),
            ("preemptions (swap + recompute)", f"{preemptions['swap_out']} + {preemptions['release']}", ""),
            ("tokens computed again", self.num_recomputed_tokens, ""),
        ]
        table = Table("", "paged", "contiguous*", title="The block tables' story",
                      caption=f"{num_slots} slots ({config.num_kv_blocks} blocks of {config.block_size}).\n"
                              f"* if each sequence reserved max_model_len = {config.max_model_len} slots")
        for row in rows:
            table.add_row(*map(str, row))
        return table


def iteration_line(step: StepSnapshot) -> str:
    """`Prefill a (tokens=n), ...` where nothing decodes, else `Decode a, b, c(prefill)`; a cut prompt says where."""
    scheduled = step.schedule.scheduled
    only_prefills = all(item.is_prefill for item in scheduled)
    parts = []
    for item in scheduled:
        name = _name(item.seq.seq_id)
        is_cut = item.start + item.num_tokens < item.num_known_tokens
        of_how_many = f" of {item.num_known_tokens}" if is_cut else ""
        if only_prefills:
            parts.append(f"{name} (tokens={item.num_tokens}{of_how_many})")
        elif item.is_prefill:
            parts.append(f"{name}(prefill{f' {item.num_tokens}{of_how_many}' if is_cut else ''})")
        else:
            parts.append(name)
    return f"[Iter {step.schedule.step_id}] {'Prefill' if only_prefills else 'Decode'} {', '.join(parts)}"


def play(engine: LLMEngine, *, real: bool = False) -> None:
    """Let the requests arrive, each before its iteration, and run until all are answered."""
    pending = list(REQUESTS)
    for iteration in itertools.count():
        while pending and pending[0].arrival <= iteration:
            request = pending.pop(0)
            prompt = request.real_prompt if real else request.prompt
            engine.add_request(prompt, prompt, make_params(request, real=real))
        if not engine.has_unfinished():
            return
        engine.step()


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status, 1 when there is no real model to be had."""
    parser = argparse.ArgumentParser(prog="python -m vllm_mini.demo", description="Watch the engine at work.")
    parser.add_argument("--real", action="store_true", help="use SmolLM2 (fetched on first use: 93 MB)")
    parser.add_argument("--preemption-mode", choices=("swap", "recompute"), default="swap",
                        help="swap (default): copy to host memory what fits there, recompute the rest; "
                             "recompute: never swap")
    args = parser.parse_args(argv)
    try:
        config = make_config(str(fetch_default_model()) if args.real else DUMMY_NAME, args.preemption_mode)
        narrator = Narrator(config)
        engine = LLMEngine.from_config(config, on_step=narrator)
    except (FetchError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        play(engine, real=args.real)
        print()
        Console().print(narrator.closing_table())
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _tell(kind: str, sentence: str) -> None:
    print(f"         {kind:<8} {sentence}")


def _name(seq_id: int) -> str:
    return f"seq_{seq_id}"


def _ids(seqs: Iterable[Sequence]) -> set[int]:
    return {seq.seq_id for seq in seqs}


def _list(block_ids: Iterable[int]) -> str:
    return f"[{' '.join(map(str, block_ids))}]"


def _mean(values: list[int]) -> str:
    return f"{sum(values) / len(values):.1f}"


if __name__ == "__main__":
    sys.exit(main())
