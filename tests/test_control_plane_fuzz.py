"""Scheduler and block manager under thousands of random loads, on a fake device that notices every wrong slot.

Each seed is one run: its own pool, limits and modes, requests that arrive at random steps and share prefixes, forks,
stop tokens, aborts in every state, and now and then logits that are not numbers. `FakeEngine` checks every step.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_device import FakeEngine, make_engine, make_sequence, prompt_logprobs_alone

from vllm_mini.sequence import RequestError, Sequence

RUNS_PER_TEST = 200
NUM_TESTS = 20
ALPHABET = 3


def make_random_engine(rng: random.Random) -> FakeEngine:
    block_size = rng.choice([1, 1, 2, 4, 16])
    max_model_len = rng.choice([6, 12, 24, 40])
    num_blocks_longest = -(-max_model_len // block_size)
    num_blocks = max(1, int(num_blocks_longest * rng.choice([0.7, 1, 1, 1.3, 1.6, 2, 3]))) + rng.randint(0, 2)
    chunked = rng.random() < 0.75
    budget = rng.choice([1, 2, 3, 4, 6, 10, 16, 64]) if chunked else max_model_len + rng.choice([0, 1, 30])
    return make_engine(
        num_blocks, block_size, vocab_size=ALPHABET,
        num_host_blocks=rng.choice([0, 2, 5, 200]),
        enable_prefix_caching=rng.random() < 0.7,
        max_num_seqs=rng.choice([1, 2, 3, 4, 8, 16]),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        preemption_mode=rng.choice(["recompute", "swap", "swap"]),
    )


def make_random_load(rng: random.Random, engine: FakeEngine) -> list[tuple[int, Sequence]]:
    """Requests with the step at which each arrives; for some, the device gets told where logits will not be numbers."""
    longest = engine.scheduler.max_num_tokens
    documents = [[rng.randrange(ALPHABET) for _ in range(rng.randint(1, longest))] for _ in range(3)]
    last_arrival, error_rate = rng.choice([0, 20, 80]), rng.choice([0, 0, 0.08])
    load: list[tuple[int, Sequence]] = []
    next_id = 0
    for step in sorted(rng.randint(0, last_arrival) for _ in range(rng.choice([2, 8, 20, 40]))):
        seq = make_random_request(rng, next_id, documents, engine)
        load.append((step, seq))
        next_id += seq.params.n
        if rng.random() < error_rate:
            engine.device.errors[seq.seed, rng.randrange(seq.params.n)] = seq.num_tokens + rng.randint(0, 3)
    return load


def make_random_request(rng: random.Random, seq_id: int, documents: list[list[int]], engine: FakeEngine) -> Sequence:
    document = rng.choice(documents)
    prompt = document[: rng.randint(0, len(document))] + [rng.randrange(ALPHABET) for _ in range(rng.randint(0, 3))]
    room = max(1, min(20, engine.scheduler.max_num_tokens - len(prompt)))
    n = min(rng.choice([1, 1, 1, 1, 2, 3, 4]), engine.scheduler.max_num_seqs + (rng.random() < 0.1))
    stop_ids = rng.choice([(), (), (), (0,)])
    return make_sequence(
        seq_id, prompt or [0], max_tokens=rng.choice([rng.randint(1, room), room, room + (rng.random() < 0.1)]), n=n,
        seed=rng.randrange(6), stop_ids=stop_ids, stop_token_ids=rng.choice([None, stop_ids]),
        prompt_logprobs=rng.choice([None] * 9 + [0]))


def should_be_refused(engine: FakeEngine, seq: Sequence) -> bool:
    config, blocks = engine.scheduler.config, engine.blocks
    return (seq.max_num_tokens > min(config.max_model_len, blocks.num_blocks * blocks.block_size)
            or seq.params.n > min(config.max_num_seqs, config.max_num_batched_tokens))


def arrive(engine: FakeEngine, seq: Sequence, seen: Counter) -> None:
    if should_be_refused(engine, seq):
        before = list(engine.scheduler.unfinished())
        with pytest.raises(RequestError):
            engine.add(seq)
        assert list(engine.scheduler.unfinished()) == before, "a refused sequence was kept"
        seen["refused"] += 1
    else:
        engine.add(seq)


def abort_one(engine: FakeEngine, rng: random.Random, seen: Counter) -> None:
    scheduler = engine.scheduler
    queue = rng.choice([queue for queue in (scheduler.running, scheduler.swapped, scheduler.waiting) if queue])
    seq = rng.choice(list(queue))
    seen[f"abort {seq.status.value}"] += 1
    seen["abort of a fork"] += seq.params.n > 1 and not seq.num_forks
    seen["abort with host blocks"] += bool(seq.host_blocks)
    engine.finish(seq)


def one_run(seed: int) -> Counter:
    """Serve one random load to the end; returns how often each interesting thing happened."""
    rng = random.Random(seed)
    engine = make_random_engine(rng)
    load = make_random_load(rng, engine)
    abort_rate = rng.choice([0, 0.02, 0.1])
    seen: Counter = Counter()
    clock = 0
    while load or engine.scheduler.has_unfinished():
        while load and load[0][0] <= clock:
            arrive(engine, load.pop(0)[1], seen)
        clock += 1
        if not engine.scheduler.has_unfinished():
            continue
        if rng.random() < abort_rate:
            abort_one(engine, rng, seen)
            continue
        note(seen, engine, engine.step())
    engine.check_drained()
    engine.check_outputs()
    check_order_and_counters(engine)
    for seq in engine.sequences.values():
        seen[f"ended by {seq.finish_reason}"] += 1
    return seen


def check_order_and_counters(engine: FakeEngine) -> None:
    started = [engine.sequences[seq_id] for seq_id in engine.first_scheduled]
    assert engine.first_scheduled == sorted(engine.first_scheduled), "not first come, first served"
    assert engine.scheduler.num_preemptions == sum(engine.num_preemptions.values())
    num_queries = sum(seq.num_prompt_tokens for seq in started) if engine.blocks.enable_prefix_caching else 0
    assert engine.blocks.num_prefix_queries == num_queries
    assert engine.blocks.num_prefix_hits == sum(seq.num_cached_tokens for seq in started)
    for seq in started:
        if seq.params.prompt_logprobs is not None and seq.num_output_tokens:
            assert seq.prompt_logprobs == prompt_logprobs_alone(seq)


def note(seen: Counter, engine: FakeEngine, output) -> None:
    seen["preempted with a copy"] += sum(bool(seq.host_blocks) for seq in output.preempted)
    seen["preempted without"] += sum(not seq.host_blocks for seq in output.preempted)
    seen["swap_out"] += len(output.transfers.swap_out)
    seen["swap_in"] += len(output.transfers.swap_in)
    seen["copy-on-write"] += len(output.transfers.copies)
    seen["prefix hit"] += sum(seq.num_cached_tokens > 0 for seq in output.admitted)
    seen["hit on resuming"] += sum(item.seq in output.resumed and item.start > 0 for item in output.scheduled)
    seen["chunk"] += sum(not item.num_samples for item in output.scheduled)
    seen["fork preempted"] += sum(seq.params.n > 1 and not seq.num_forks for seq in output.preempted)
    seen["preempted in its prompt"] += sum(not seq.num_output_tokens for seq in output.preempted)


EVERYTHING = {
    "refused", "abort running", "abort swapped", "abort waiting", "abort of a fork", "abort with host blocks",
    "preempted with a copy", "preempted without", "swap_out", "swap_in", "copy-on-write", "prefix hit",
    "hit on resuming", "chunk", "fork preempted", "preempted in its prompt",
    "ended by stop", "ended by length", "ended by abort", "ended by error",
}


@pytest.mark.parametrize("first_seed", range(0, RUNS_PER_TEST * NUM_TESTS, RUNS_PER_TEST))
def test_random_loads_give_what_each_request_gets_alone(first_seed):
    seen: Counter = Counter()
    for seed in range(first_seed, first_seed + RUNS_PER_TEST):
        try:
            seen += one_run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    missing = EVERYTHING - set(seen)
    assert not missing, f"these runs never reached: {sorted(missing)}"
