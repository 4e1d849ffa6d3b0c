"""Which block holds which tokens: counts, forks, host blocks, prefixes, events. BM_01 and the like name field cases."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from fake_device import FakeDevice, make_block_manager, make_engine, make_sequence
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_mini.block_manager import BlockManager, Transfers
from vllm_mini.sequence import Sequence, SequenceStatus


def state_of(blocks: BlockManager) -> tuple:
    """All that a call which refuses must leave alone."""
    tables = {seq_id: list(table) for seq_id, table in blocks.block_tables.items()}
    hosts = {seq_id: list(table) for seq_id, table in blocks.host_tables.items()}
    return (list(blocks.ref_counts), list(blocks.free_blocks), tables, list(blocks.free_host_blocks), hosts,
            list(blocks.block_hashes), dict(blocks.cached_blocks), blocks.num_prefix_queries, blocks.num_prefix_hits)


def compute(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """What a step does for the next tokens of a sequence (all that are left, unless said otherwise)."""
    num_tokens = seq.num_tokens - seq.num_computed_tokens if num_tokens is None else num_tokens
    assert blocks.grow(seq)
    blocks.commit(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    seq.status = SequenceStatus.RUNNING


def admit_and_compute(blocks: BlockManager, *seqs: Sequence) -> None:
    for seq in seqs:
        assert blocks.admit(seq)
        compute(blocks, seq)


class TestBlockCounts:
    @pytest.mark.parametrize(("block_size", "num_tokens", "num_blocks"), [
        (4, 0, 0), (4, 1, 1), (4, 3, 1), (4, 4, 1), (4, 5, 2), (4, 8, 2), (4, 9, 3), (1, 7, 7), (16, 16, 1),
        (16, 17, 2),
    ])
    def test_num_blocks_for_rounds_up_to_whole_blocks(self, block_size, num_tokens, num_blocks):
        assert make_block_manager(8, block_size).num_blocks_for(num_tokens) == num_blocks

    def test_admission_takes_blocks_for_all_known_tokens_at_once(self):
        blocks = make_block_manager(8, 4)
        seq = make_sequence(prompt=9)
        assert blocks.admit(seq)
        assert len(seq.block_table) == 3
        assert blocks.num_used_blocks == 3
        assert blocks.block_tables == {seq.seq_id: seq.block_table}
        assert [blocks.ref_counts[block_id] for block_id in seq.block_table] == [1, 1, 1]

    def test_admission_that_does_not_fit_changes_nothing(self):
        blocks = make_block_manager(4, 4)
        admit_and_compute(blocks, make_sequence(0, 8))
        before = state_of(blocks)
        late = make_sequence(1, 9)
        assert not blocks.admit(late)
        assert state_of(blocks) == before
        assert not late.block_table
        assert late.num_computed_tokens == 0
        assert blocks.admit(make_sequence(2, 8)), "what is left must still be usable to the last block"

    def test_admission_leaves_the_asked_headroom_free_and_not_more(self):
        blocks = make_block_manager(4, 4)
        assert not blocks.admit(make_sequence(0, 8), headroom=3)
        assert blocks.admit(make_sequence(0, 8), headroom=2)
        assert len(blocks.free_blocks) == 2

    def test_admission_with_hits_needs_room_for_the_rest_only(self):
        blocks = make_block_manager(5, 4)
        first = make_sequence(0, range(9))
        admit_and_compute(blocks, first)
        second = make_sequence(1, range(12))  # two blocks shared with the first, one of its own
        assert not blocks.admit(second, headroom=2)
        assert blocks.admit(second, headroom=1)
        assert second.block_table[:2] == first.block_table[:2]

    def test_a_free_block_that_is_a_hit_is_not_counted_as_free_too(self):
        blocks = make_block_manager(3, 4)
        first = make_sequence(0, range(9))
        admit_and_compute(blocks, first)
        blocks.release(first)
        assert not blocks.admit(make_sequence(1, range(13))), "two hits and one other free block are not four blocks"
        assert not blocks.admit(make_sequence(2, range(9)), headroom=1)
        assert blocks.admit(make_sequence(3, range(9)))
        assert not blocks.free_blocks
        blocks.check()

    def test_grow_takes_a_block_only_when_the_next_token_starts_one(self):
        blocks = make_block_manager(4, 4)
        seq = make_sequence(prompt=3)
        admit_and_compute(blocks, seq)
        held = []
        for _ in range(6):
            seq.token_ids.append(0)
            compute(blocks, seq)
            held.append((seq.num_tokens, len(seq.block_table)))
        assert held == [(4, 1), (5, 2), (6, 2), (7, 2), (8, 2), (9, 3)]

    def test_grow_that_does_not_fit_changes_nothing(self):
        blocks = make_block_manager(1, 4)
        seq = make_sequence(prompt=4)
        admit_and_compute(blocks, seq)
        seq.token_ids.append(0)
        before = state_of(blocks)
        assert not blocks.grow(seq)
        assert state_of(blocks) == before

    @pytest.mark.parametrize("block_size", [1, 2, 4, 16])
    @pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
    @pytest.mark.parametrize("enable_prefix_caching", [True, False])
    def test_blocks_held_are_those_that_stored_tokens_need_BM_03(
        self, block_size, num_prompt_tokens, enable_prefix_caching,
    ):
        for max_tokens in (1, 3, 4, 5, 9):
            # Exactly as many blocks as prompt and output could fill.
            num_blocks = -(-(num_prompt_tokens + max_tokens) // block_size)
            engine = make_engine(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
            seq = make_sequence(prompt=num_prompt_tokens, max_tokens=max_tokens)
            engine.add(seq)
            while not seq.is_finished:
                engine.step()
                stored = 0 if seq.is_finished else seq.num_computed_tokens
                assert engine.blocks.num_used_blocks == len(seq.block_table) == -(-stored // block_size)
            assert seq.num_output_tokens == max_tokens
            engine.check_drained()
            engine.check_outputs()

    @pytest.mark.parametrize("enable_prefix_caching", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    def test_pool_is_whole_again_after_each_of_200_requests_BM_02(self, enable_prefix_caching, n):
        engine = make_engine(8, 4, enable_prefix_caching=enable_prefix_caching)
        for i in range(200):
            engine.run(make_sequence(n * i, 3, max_tokens=2, n=n))
            assert engine.blocks.num_used_blocks == 0
            assert min(engine.blocks.ref_counts) == max(engine.blocks.ref_counts) == 0
        assert len(engine.steps) == 400, "a request late in the row takes more steps than the first"
        engine.check_outputs()

    def test_release_is_harmless_when_nothing_is_held(self):
        blocks = make_block_manager(4, 4)
        seq = make_sequence(prompt=8)
        blocks.release(seq)
        admit_and_compute(blocks, seq)
        blocks.release(seq)
        before = state_of(blocks)
        blocks.release(seq)
        assert state_of(blocks) == before
        blocks.check()
        assert blocks.num_used_blocks == 0


class TestForks:
    @pytest.mark.parametrize(("block_size", "num_prompt_tokens", "num_copies"), [
        (16, 20, 2), (16, 17, 2), (16, 31, 2), (16, 15, 2), (16, 16, 0), (16, 32, 0), (4, 20, 0), (4, 18, 2), (1, 5, 0),
    ])
    def test_forks_share_the_prompt_and_copy_only_its_partial_block_BM_05(
        self, block_size, num_prompt_tokens, num_copies,
    ):
        engine = make_engine(64, block_size)
        parent = make_sequence(prompt=num_prompt_tokens, max_tokens=20, n=3, seed=1)
        engine.add(parent)
        engine.step()
        num_full = num_prompt_tokens // block_size
        tables = list(engine.blocks.block_tables.values())
        assert len(tables) == 3
        assert tables[0] == tables[1] == tables[2]
        assert {engine.blocks.ref_counts[block_id] for block_id in tables[0]} == {3}
        copies = [*engine.step().transfers.copies]
        assert len(copies) == num_copies, "the last holder of a shared block writes in place"
        partial = [table[num_full] for table in engine.blocks.block_tables.values()]
        assert len(set(partial)) == 3
        assert all(engine.blocks.ref_counts[block_id] == 3 for block_id in tables[0][:num_full])
        engine.run()
        assert sum(len(step.transfers.copies) for step in engine.steps) == num_copies
        engine.check_outputs()
        assert len({tuple(seq.token_ids) for seq in engine.sequences.values()}) == 3, "choices are copies of each other"

    def test_copy_is_made_by_all_but_the_last_holder_of_a_block(self):
        blocks = make_block_manager(8, 4)
        parent = make_sequence(prompt=6)
        admit_and_compute(blocks, parent)
        shared = parent.block_table[1]
        child = parent.fork(1)
        blocks.fork(parent, child)
        for seq in (parent, child):
            seq.token_ids.append(seq.index)
        compute(blocks, parent)
        assert blocks.take_transfers().copies == [(shared, parent.block_table[1])]
        assert parent.block_table[1] != shared
        compute(blocks, child)
        assert blocks.take_transfers().copies == []
        assert child.block_table[1] == shared
        blocks.check()

    def test_copy_that_finds_no_block_changes_nothing(self):
        blocks = make_block_manager(2, 4)
        parent = make_sequence(prompt=6)
        admit_and_compute(blocks, parent)
        child = parent.fork(1)
        blocks.fork(parent, child)
        parent.token_ids.append(0)
        before = state_of(blocks)
        assert not blocks.grow(parent)
        assert state_of(blocks) == before
        assert blocks.take_transfers().copies == []
        blocks.release(child)
        assert blocks.grow(parent), "the only holder needs no copy"

    @pytest.mark.parametrize("survivor", [0, 1, 2])
    def test_blocks_of_a_finished_choice_stay_with_those_that_share_them(self, survivor):
        engine = make_engine(16, 4)
        engine.add(make_sequence(prompt=10, max_tokens=9, n=3))
        engine.step()
        for seq in list(engine.sequences.values()):
            if seq.index != survivor:
                engine.finish(seq)
        engine.run()
        assert sum(len(step.transfers.copies) for step in engine.steps) == 0, "nobody was left to share with"
        engine.check_outputs()
        assert engine.sequences[survivor].finish_reason == "length"

    def test_tokens_of_one_choice_are_no_hits_for_its_siblings_history(self):
        engine = make_engine(64, 4)
        choices = engine.run(make_sequence(prompt=6, max_tokens=10, n=2, seed=1))
        for i, choice in enumerate(choices):
            follow_up = make_sequence(10 + i, [*choice.token_ids, 7], max_tokens=1)
            engine.run(follow_up)
            # The last sampled token of a choice was never stored, so its block is not full.
            assert follow_up.num_cached_tokens == (choice.num_tokens - 1) // 4 * 4
        engine.check_outputs()


class TestHostBlocks:
    def test_swapping_out_copies_the_stored_blocks_and_frees_all(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        seq = make_sequence(prompt=14)
        assert blocks.admit(seq)
        compute(blocks, seq, 6)
        table = list(seq.block_table)
        assert blocks.swap_out(seq)
        assert len(table) == 4
        assert len(seq.host_blocks) == 2, "only blocks that hold something are worth a copy"
        assert blocks.take_transfers().swap_out == list(zip(table, seq.host_blocks))
        assert blocks.num_used_blocks == 0
        assert len(blocks.free_host_blocks) == 6
        assert seq.num_computed_tokens == 6, "it goes on where it was"
        blocks.check()

    def test_swapping_in_copies_back_in_order_and_frees_the_host_blocks(self):
        blocks = make_block_manager(8, 4, num_host_blocks=3)
        seq = make_sequence(prompt=10)
        admit_and_compute(blocks, seq)
        assert blocks.swap_out(seq)
        host_blocks = list(seq.host_blocks)
        blocks.take_transfers()
        assert blocks.admit(seq)
        assert blocks.take_transfers().swap_in == list(zip(host_blocks, seq.block_table))
        assert seq.num_computed_tokens == 10
        assert not seq.host_blocks
        assert len(blocks.free_host_blocks) == 3
        blocks.check()

    @pytest.mark.parametrize(("num_host_blocks", "fits"), [(0, False), (1, False), (2, False), (3, True)])
    def test_swapping_out_is_refused_when_the_host_pool_is_too_small(self, num_host_blocks, fits):
        blocks = make_block_manager(8, 4, num_host_blocks=num_host_blocks)
        seq = make_sequence(prompt=9)
        admit_and_compute(blocks, seq)
        before = state_of(blocks)
        assert blocks.swap_out(seq) == fits
        if not fits:
            assert state_of(blocks) == before
            assert blocks.take_transfers().swap_out == []

    def test_a_sequence_without_stored_tokens_is_not_swapped_out(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        seq = make_sequence(prompt=9)
        assert blocks.admit(seq)
        before = state_of(blocks)
        assert not blocks.swap_out(seq)
        assert state_of(blocks) == before

    def test_swapping_in_that_does_not_fit_changes_nothing(self):
        blocks = make_block_manager(3, 4, num_host_blocks=3)
        seq = make_sequence(0, 9)
        admit_and_compute(blocks, seq)
        assert blocks.swap_out(seq)
        admit_and_compute(blocks, make_sequence(1, 4))
        before = state_of(blocks)
        assert not blocks.admit(seq)
        assert state_of(blocks) == before

    def test_release_of_a_swapped_out_sequence_gives_its_host_blocks_back(self):
        blocks = make_block_manager(4, 4, num_host_blocks=4)
        seq = make_sequence(prompt=13)
        admit_and_compute(blocks, seq)
        assert blocks.swap_out(seq)
        blocks.release(seq)
        assert sorted(blocks.free_host_blocks) == [0, 1, 2, 3]
        assert not blocks.host_tables
        assert not seq.host_blocks
        blocks.check()

    def test_swapping_out_one_sharer_leaves_the_others_their_blocks(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        parent = make_sequence(prompt=10)
        admit_and_compute(blocks, parent)
        child = parent.fork(1)
        blocks.fork(parent, child)
        shared = list(parent.block_table)
        assert blocks.swap_out(child)
        assert parent.block_table == shared
        assert [blocks.ref_counts[block_id] for block_id in shared] == [1, 1, 1]
        assert blocks.admit(child)
        assert not set(child.block_table) & set(shared)
        blocks.check()

    def test_a_block_may_be_copied_out_and_then_be_the_target_of_a_copy_in_one_step(self):
        blocks = make_block_manager(3, 4, num_host_blocks=1)
        device = FakeDevice(blocks)
        parent, victim = make_sequence(0, 6), make_sequence(10, 4)
        admit_and_compute(blocks, parent, victim)
        device.write([(seq, 0, seq.num_tokens) for seq in (parent, victim)])
        child = parent.fork(1)
        blocks.fork(parent, child)
        (given_up,) = victim.block_table
        assert blocks.swap_out(victim)
        assert blocks.grow(parent)
        assert parent.block_table[1] == given_up
        device.transfer(blocks.take_transfers())
        device.read(parent, 6)
        blocks.release(child)
        assert blocks.admit(victim)
        device.transfer(blocks.take_transfers())
        device.read(victim, 4)

    def test_swapped_in_blocks_are_prefix_hits_again(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        seq = make_sequence(0, range(10))
        admit_and_compute(blocks, seq)
        assert blocks.swap_out(seq)
        other = make_sequence(1, range(100, 130))
        admit_and_compute(blocks, other)  # takes every block, so the device forgets the prefix
        blocks.release(other)
        assert blocks.admit(seq)
        late = make_sequence(2, range(10))
        assert blocks.admit(late)
        assert late.num_computed_tokens == 8
        assert late.block_table[:2] == seq.block_table[:2]


class TestPrefixIndex:
    def test_recycled_blocks_are_no_hits_any_more_BM_01(self):
        engine = make_engine(6, 4)
        first = make_sequence(0, range(10, 22), max_tokens=2)
        engine.run(first)
        engine.run(make_sequence(1, range(100, 120), max_tokens=2))
        again = make_sequence(2, range(10, 22), max_tokens=2, seed=first.seed)
        # Six blocks: the other request's five full ones and its partial one took the place of everything.
        engine.run(again)
        assert again.num_cached_tokens == 0
        assert again.output_token_ids == first.output_token_ids
        assert again.logprobs == first.logprobs
        engine.check_outputs()

    @pytest.mark.parametrize("num_blocks", range(5, 16))
    def test_what_survived_of_a_prefix_is_hit_and_nothing_else_BM_01(self, num_blocks):
        engine = make_engine(num_blocks, 4)
        one, other = range(10, 22), range(100, 116)
        for seq_id, prompt in enumerate((one, other, one, other, one)):
            engine.run(make_sequence(seq_id, prompt, max_tokens=2, seed=0))
        engine.check_outputs()
        if num_blocks >= 9:  # both prompts and an output block
            assert [seq.num_cached_tokens for seq in engine.sequences.values()] == [0, 0, 8, 12, 8]

    @pytest.mark.parametrize("max_tokens", [1, 30])
    def test_two_equal_prompts_in_one_step_keep_their_blocks_BM_07(self, max_tokens):
        engine = make_engine(24, 4)
        prompt = list(range(12))
        engine.add(make_sequence(0, prompt, max_tokens=max_tokens), make_sequence(1, prompt, max_tokens=max_tokens))
        next_id = 2
        while engine.scheduler.has_unfinished():
            engine.step()
            if len(engine.steps) >= 3 and next_id < 30:
                engine.add(make_sequence(next_id, 8, max_tokens=4))
                next_id += 1
            live = {block_id for table in engine.blocks.block_tables.values() for block_id in table}
            assert not live & set(engine.blocks.free_blocks)
        engine.check_outputs()
        engine.check_drained()

    @pytest.mark.parametrize("block_size", [1, 4, 16])
    @pytest.mark.parametrize("num_prompt_tokens", [1, 4, 15, 16, 17, 32, 64])
    def test_the_last_token_of_a_repeated_prompt_is_always_computed_PC_01(self, block_size, num_prompt_tokens):
        engine = make_engine(100, block_size)
        engine.run(make_sequence(0, range(num_prompt_tokens), seed=3))
        engine.add(make_sequence(1, range(num_prompt_tokens), seed=3))
        output = engine.step()
        num_cached = (num_prompt_tokens - 1) // block_size * block_size
        assert output.scheduled[0].start == num_cached
        assert output.scheduled[0].num_tokens == num_prompt_tokens - num_cached >= 1
        first, second = engine.run()
        assert second.num_cached_tokens == num_cached
        assert second.output_token_ids == first.output_token_ids
        assert second.logprobs == first.logprobs

    @pytest.mark.parametrize("budget", [64, 10, 51, 512])
    def test_equal_prompts_in_one_burst_compute_it_once_PC_02(self, budget):
        engine = make_engine(64, 16, max_num_batched_tokens=budget)
        for seq_id in range(8):
            engine.add(make_sequence(seq_id, range(50), max_tokens=6))
        engine.run()
        engine.check_outputs()
        cached = [seq.num_cached_tokens for seq in engine.sequences.values()]
        assert cached == [0] + [48] * 7
        ninth = make_sequence(8, range(50), max_tokens=6)
        engine.run(ninth)
        assert ninth.num_cached_tokens == 48
        engine.check_outputs()

    def test_a_block_is_no_hit_before_it_is_scheduled_to_be_written_PC_02(self):
        blocks = make_block_manager(32, 4)
        first, second = make_sequence(0, range(17)), make_sequence(1, range(17))
        assert blocks.admit(first)
        compute(blocks, first, 7)  # one full block and three tokens of the next
        assert blocks.admit(second)
        assert second.num_computed_tokens == 4
        assert second.block_table[0] == first.block_table[0]
        assert not set(second.block_table[1:]) & set(first.block_table)
        compute(blocks, first, 1)
        third = make_sequence(2, range(17))
        assert blocks.admit(third)
        assert third.num_computed_tokens == 8

    def test_hits_and_misses_in_one_step_get_tables_of_their_own_PC_04(self):
        engine = make_engine(64, 16)
        warm = list(range(32))
        engine.run(make_sequence(0, warm, max_tokens=2))
        hit = make_sequence(1, [*warm, 7, 8, 9])
        miss = make_sequence(2, range(100, 140))
        short = make_sequence(3, range(200, 203))
        engine.add(hit, miss, short)
        output = engine.step()
        assert len(output.scheduled) == 3
        assert [seq.num_cached_tokens for seq in (hit, miss, short)] == [32, 0, 0]
        held = [block_id for seq in (hit, miss, short) for block_id in seq.block_table]
        assert len(held) == len(set(held)) == 3 + 3 + 1
        second_hit = make_sequence(4, [*warm, 1])
        engine.add(second_hit)
        engine.step()
        assert second_hit.block_table[:2] == hit.block_table[:2]
        engine.run()
        engine.check_outputs()

    def test_only_an_identical_full_history_hits_PC_05(self):
        engine = make_engine(64, 4)
        same = [50, 51, 52, 53]
        prompts = [[1, 2, 3, 4, *same, 9], [5, 6, 7, 8, *same, 9], [*same, 9],
                   [*same, *same, 9], [1, 2, 3, 4, 9, *same, 9]]
        for seq_id, prompt in enumerate(prompts):
            engine.run(make_sequence(seq_id, prompt))
        # The last two begin as an earlier one did, for one block.
        assert [seq.num_cached_tokens for seq in engine.sequences.values()] == [0, 0, 0, 4, 4]
        engine.check_outputs()

    def test_hashes_tell_block_boundaries_and_large_ids_apart_PC_05(self):
        blocks = make_block_manager(64, 2)
        admit_and_compute(blocks, make_sequence(0, [1, 23, 4, 5, 0]), make_sequence(1, [2**31, 2**40, 1, 1, 0]))
        others = [[12, 3, 4, 5, 0], [1, 2, 3, 4, 0], [0, 0, 1, 1, 0], [23, 1, 4, 5, 0]]
        for seq_id, prompt in enumerate(others, start=2):
            seq = make_sequence(seq_id, prompt)
            assert blocks.admit(seq)
            assert seq.num_computed_tokens == 0, prompt

    @pytest.mark.parametrize("block_size", [1, 4, 8])
    @pytest.mark.parametrize("num_prompt_tokens", [3, 4, 5])
    def test_a_conversation_sent_back_hits_all_its_stored_full_blocks_PC_10(self, block_size, num_prompt_tokens):
        engine = make_engine(200, block_size)
        history = list(range(100, 100 + num_prompt_tokens))
        stored = 0
        for turn in range(5):
            seq = make_sequence(turn, history, max_tokens=9)
            engine.run(seq)
            assert seq.num_cached_tokens == stored // block_size * block_size
            stored = seq.num_tokens - 1  # the last sampled token is never run through the model
            history = [*seq.token_ids, 300 + turn, 400 + turn, 500 + turn]
        engine.check_outputs()

    def test_the_tail_of_an_old_prefix_is_evicted_before_its_head_PC_11(self):
        engine = make_engine(12, 4)
        engine.run(make_sequence(0, range(32), max_tokens=2))
        engine.run(make_sequence(1, range(100, 116), max_tokens=2))
        part = make_sequence(2, [*range(16), 7, 8], max_tokens=2)
        engine.run(part)
        assert part.num_cached_tokens == 16
        engine.check_outputs()

    def test_each_further_block_evicts_one_more_from_the_tail_PC_11(self):
        for num_taken in range(1, 9):
            blocks = make_block_manager(8, 4)
            first = make_sequence(0, range(32))
            admit_and_compute(blocks, first)
            blocks.release(first)
            assert blocks.admit(make_sequence(1, 4 * num_taken))
            assert len(blocks.cached_blocks) == 8 - num_taken
            for length in range(1, 8 - num_taken):
                probe = make_sequence(3, range(4 * length + 1))
                assert blocks.admit(probe)
                assert probe.num_computed_tokens == 4 * length
                blocks.release(probe)

    def test_the_least_recently_used_prefix_is_evicted_first(self):
        blocks = make_block_manager(4, 4)
        prompts = {name: [10 * i + k for k in range(5)] for i, name in enumerate("ab")}
        seqs = {name: make_sequence(i, prompt) for i, (name, prompt) in enumerate(prompts.items())}
        admit_and_compute(blocks, *seqs.values())
        blocks.release(seqs["a"])
        blocks.release(seqs["b"])
        used = make_sequence(2, prompts["a"])
        admit_and_compute(blocks, used)
        blocks.release(used)  # now a was used after b
        assert blocks.admit(make_sequence(3, 12))
        assert list(blocks.cached_blocks) == [seqs["a"].block_hashes[0]]

    def test_a_block_without_a_prefix_is_taken_before_one_with(self):
        blocks = make_block_manager(4, 4)
        seq = make_sequence(prompt=14)  # three full blocks and a partial one
        admit_and_compute(blocks, seq)
        partial = seq.block_table[3]
        blocks.release(seq)
        assert blocks.admit(make_sequence(1, 2))
        assert blocks.block_tables[1] == [partial]
        assert len(blocks.cached_blocks) == 3

    def test_a_reused_free_block_leaves_the_free_list(self):
        blocks = make_block_manager(4, 4)
        first = make_sequence(0, range(9))
        admit_and_compute(blocks, first)
        shared = first.block_table[:2]
        blocks.release(first)
        second = make_sequence(1, range(9))
        assert blocks.admit(second)
        assert second.block_table[:2] == shared
        assert not set(shared) & set(blocks.free_blocks)
        blocks.check()

    def test_without_prefix_caching_nothing_is_shared_indexed_or_counted(self):
        engine = make_engine(32, 4, enable_prefix_caching=False)
        for seq_id in range(3):
            engine.run(make_sequence(seq_id, range(9)))
            assert engine.sequences[seq_id].num_cached_tokens == 0
        assert not engine.blocks.cached_blocks
        assert set(engine.blocks.block_hashes) == {None}
        assert (engine.blocks.num_prefix_queries, engine.blocks.num_prefix_hits) == (0, 0)
        engine.check_outputs()

    def test_a_prompt_whose_logprobs_are_owed_is_computed_whole(self):
        blocks = make_block_manager(32, 4)
        admit_and_compute(blocks, make_sequence(0, range(9)))
        seq = make_sequence(1, range(9), prompt_logprobs=1)
        assert blocks.admit(seq)
        assert seq.num_computed_tokens == 0

    def test_forgotten_prefixes_are_no_hits_and_running_sequences_keep_their_blocks(self):
        blocks = make_block_manager(32, 4)
        seq, done = make_sequence(0, range(9)), make_sequence(1, range(50, 59))
        admit_and_compute(blocks, seq, done)
        blocks.release(done)
        table = list(seq.block_table)
        blocks.forget_prefixes()
        blocks.check()
        assert seq.block_table == table
        for seq_id, prompt in ((2, range(9)), (3, range(50, 59))):
            late = make_sequence(seq_id, prompt)
            assert blocks.admit(late)
            assert late.num_computed_tokens == 0
            compute(blocks, late)
        again = make_sequence(4, range(9))
        assert blocks.admit(again)
        assert again.num_computed_tokens == 8, "what was computed since then may be shared"
        blocks.check()

    def test_forgetting_prefixes_forgets_the_copies_of_the_failed_step_too(self):
        # A step that fails while it is being decided leaves copies behind that nobody came for. The blocks they name
        # have new owners by the next step, which would then write some of them twice.
        blocks = make_block_manager(8, 4, num_host_blocks=4)
        parent = make_sequence(prompt=6)
        swapped = make_sequence(10, 6)
        admit_and_compute(blocks, parent, swapped)
        child = parent.fork(1)
        blocks.fork(parent, child)
        assert blocks.swap_out(swapped)
        assert blocks.admit(swapped)
        assert blocks.grow(child)
        blocks.forget_prefixes()
        assert blocks.take_transfers() == Transfers()


class TestEvents:
    def test_events_tell_the_life_of_a_forked_sequence_in_order(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        seq = make_sequence(prompt=6)
        admit_and_compute(blocks, seq)
        child = seq.fork(1)
        blocks.fork(seq, child)
        seq.token_ids.append(0)
        compute(blocks, seq)
        assert blocks.swap_out(child)
        assert blocks.admit(child)
        blocks.release(seq)
        kinds = [(event.kind, event.seq_id) for event in blocks.take_events()]
        assert kinds == [("allocate", 0), ("fork", 1), ("copy", 0), ("swap_out", 1), ("swap_in", 1), ("release", 0)]
        assert blocks.take_events() == ()

    def test_a_hit_is_told_as_a_share_and_a_lost_prefix_as_an_eviction(self):
        blocks = make_block_manager(3, 4)
        first = make_sequence(0, range(9))
        admit_and_compute(blocks, first)
        shared = tuple(first.block_table[:2])
        blocks.release(first)
        blocks.take_events()
        second = make_sequence(1, range(9))
        assert blocks.admit(second)
        kinds = {event.kind: event for event in blocks.take_events()}
        assert set(kinds) == {"share", "allocate"}
        assert kinds["share"] == ("share", 1, shared)
        blocks.release(second)
        assert blocks.admit(make_sequence(2, 12))
        assert [event.kind for event in blocks.take_events()].count("evict") == 2

    def test_a_swap_out_tells_the_blocks_that_are_copied_and_no_others(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        seq = make_sequence(prompt=14)
        assert blocks.admit(seq)
        compute(blocks, seq, 6)
        stored = tuple(seq.block_table[:2])
        blocks.take_events()
        assert blocks.swap_out(seq)
        assert blocks.take_events() == (("swap_out", 0, stored),)

    def test_nothing_is_told_of_the_release_of_nothing(self):
        blocks = make_block_manager(8, 4, num_host_blocks=8)
        seq = make_sequence()
        blocks.release(seq)
        assert blocks.take_events() == ()
        admit_and_compute(blocks, seq)
        assert blocks.swap_out(seq)
        blocks.take_events()
        blocks.release(seq)  # from the host, which no event tells of
        assert blocks.take_events() == ()


class TestCheck:
    @pytest.mark.parametrize("fault", ["ref_count", "free_list", "index", "hash", "host", "table", "twice"])
    def test_check_raises_on_any_difference(self, fault):
        blocks = make_block_manager(8, 4, num_host_blocks=2)
        seq = make_sequence(prompt=9)
        admit_and_compute(blocks, seq)
        blocks.check()
        if fault == "ref_count":
            blocks.ref_counts[seq.block_table[0]] += 1
        elif fault == "free_list":
            blocks.free_blocks[seq.block_table[0]] = None
        elif fault == "index":
            blocks.cached_blocks[b"other"] = seq.block_table[0]
        elif fault == "hash":
            blocks.block_hashes[seq.block_table[2]] = b"other"
        elif fault == "host":
            blocks.free_host_blocks.pop()
        elif fault == "twice":  # and counted twice
            first, second, _ = seq.block_table
            seq.block_table[1] = first
            blocks.ref_counts[first], blocks.ref_counts[second], blocks.free_blocks[second] = 2, 0, None
        else:
            seq.block_table[1] = seq.block_table[0]
        with pytest.raises(AssertionError):
            blocks.check()


class BlockManagerMachine(RuleBasedStateMachine):
    """Any order of calls, with a device that holds what should be in each block; one sequence computes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_block_manager(7, 2, num_host_blocks=4)
        self.device = FakeDevice(self.blocks)
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []  # swapped out, or to be recomputed
        self.next_id = 0

    def settle(self) -> None:
        self.device.transfer(self.blocks.take_transfers())

    def admit(self, seq: Sequence, headroom: int) -> bool:
        before, num_free = state_of(self.blocks), len(self.blocks.free_blocks)
        if self.blocks.admit(seq, headroom=headroom):
            assert len(self.blocks.free_blocks) >= headroom
            assert len(seq.block_table) == -(-seq.num_tokens // 2)
            self.settle()
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            return True
        assert state_of(self.blocks) == before
        assert -(-seq.num_tokens // 2) + headroom > num_free, "refused though it would fit"
        return False

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), headroom=st.integers(0, 2))
    def arrive(self, prompt, headroom):
        seq = make_sequence(self.next_id, prompt)
        self.next_id += 10
        if self.admit(seq, headroom):
            assert seq.num_cached_tokens == seq.num_computed_tokens < seq.num_tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def compute(self, data, tokens):
        """Some of its tokens; when they were the last, it forks (unless it is a fork) and every choice gets a token."""
        seq = data.draw(st.sampled_from(self.running))
        before = state_of(self.blocks)
        if not self.blocks.grow(seq):
            assert state_of(self.blocks) == before
            return
        num_tokens = data.draw(st.integers(1, seq.num_tokens - seq.num_computed_tokens))
        self.blocks.commit(seq, num_tokens)
        self.settle()
        self.device.write([(seq, seq.num_computed_tokens, num_tokens)])
        written = seq.block_table[seq.num_computed_tokens // 2]
        assert self.blocks.ref_counts[written] == 1, "wrote into a block that others hold"
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens < seq.num_tokens:
            return
        choices = [seq]
        if seq.index == 0 and seq.num_output_tokens == 0:
            for index in range(1, len(tokens)):
                choices.append(seq.fork(index))
                self.blocks.fork(seq, choices[-1])
        self.running.extend(choices[1:])
        for choice, token in zip(choices, tokens):
            choice.token_ids.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data):
        seq = data.draw(st.sampled_from(self.running))
        before = state_of(self.blocks)
        num_stored = -(-seq.num_computed_tokens // 2)
        fits = 0 < num_stored <= len(self.blocks.free_host_blocks)
        assert self.blocks.swap_out(seq) == fits
        if not fits:
            assert state_of(self.blocks) == before
            return
        self.settle()
        self.park(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release_to_recompute(self, data):
        seq = data.draw(st.sampled_from(self.running))
        self.blocks.release(seq)
        seq.num_computed_tokens = 0
        self.park(seq)

    def park(self, seq: Sequence) -> None:
        assert not seq.block_table
        seq.status = SequenceStatus.SWAPPED
        self.running.remove(seq)
        self.parked.append(seq)

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), headroom=st.integers(0, 2))
    def resume(self, data, headroom):
        seq = data.draw(st.sampled_from(self.parked))
        num_computed, num_cached = seq.num_computed_tokens, seq.num_cached_tokens
        if self.admit(seq, headroom):
            self.parked.remove(seq)
            assert seq.num_computed_tokens >= num_computed
            assert seq.num_cached_tokens == num_cached

    @precondition(lambda self: self.running or self.parked)
    @rule(data=st.data())
    def end(self, data):
        seq = data.draw(st.sampled_from(self.running + self.parked))
        (self.running if seq in self.running else self.parked).remove(seq)
        self.blocks.release(seq)
        assert not seq.block_table
        assert not seq.host_blocks

    @rule()
    def forget_prefixes(self):
        self.blocks.forget_prefixes()
        assert not self.blocks.cached_blocks

    @invariant()
    def everything_agrees(self):
        self.blocks.check()
        held = {block_id for seq in self.running for block_id in seq.block_table}
        assert self.blocks.num_used_blocks == len(held)
        assert self.blocks.block_tables == {seq.seq_id: seq.block_table for seq in self.running}
        num_host_used = sum(len(seq.host_blocks) for seq in self.parked)
        assert len(self.blocks.free_host_blocks) == self.blocks.num_host_blocks - num_host_used

    @invariant()
    def every_running_sequence_reads_its_own_prefix(self):
        for seq in self.running:
            self.device.read(seq, seq.num_computed_tokens)

    def teardown(self):
        for seq in self.running + self.parked:
            self.blocks.release(seq)
        self.blocks.check()
        assert self.blocks.num_used_blocks == 0
        assert len(self.blocks.free_host_blocks) == self.blocks.num_host_blocks


BlockManagerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestBlockManagerUnderAnyOrderOfCalls = BlockManagerMachine.TestCase
