"""Who runs, who waits, who makes way, and what each gets. Ids as SC-01 name field cases.

`FakeEngine.step` checks after every step that all runners were served in order of arrival within the budget, that no
sequence waits without a reason, and that queues, blocks, events, prefix index and device agree.
"""

from __future__ import annotations

import random

import pytest
from fake_device import FakeEngine, make_engine, make_scheduler, make_sequence, prompt_logprobs_alone, run_alone

from vllm_mini.config import ConfigError, SchedulerConfig
from vllm_mini.scheduler import Scheduler, SchedulerOutput, SequenceOutput
from vllm_mini.sequence import RequestError, SampledToken, Sequence, SequenceStatus

MODES = [{"preemption_mode": "recompute"}] + [
    {"preemption_mode": "swap", "num_host_blocks": num_host_blocks} for num_host_blocks in (0, 1, 4, 100)]
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=["recompute", "swap-0", "swap-1", "swap-4", "swap-100"])


def shares(output) -> dict[int, int]:
    """seq_id -> number of tokens in this step."""
    return {item.seq.seq_id: item.num_tokens for item in output.scheduled}


def step_until_preempted(engine: FakeEngine) -> Sequence:
    while not (output := engine.step()).preempted:
        pass
    return output.preempted[0]


def step_without_a_device(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update(output, [SequenceOutput((SampledToken(7),) * item.num_samples) for item in output.scheduled])
    scheduler.check()
    return output


def two_that_cannot_both_grow(**kwargs) -> FakeEngine:
    """Two runners that outgrow a pool of six blocks together: each begins with two and would come to five."""
    engine = make_engine(6, 4, **kwargs)
    engine.add(make_sequence(0, 8, max_tokens=12), make_sequence(1, 8, max_tokens=12))
    return engine


class TestOneStep:
    def test_a_new_sequence_gets_its_whole_prompt_and_one_sample(self):
        engine = make_engine()
        seq = make_sequence(prompt=10)
        engine.add(seq)
        output = engine.step()
        (item,) = output.scheduled
        assert (item.seq, item.start, item.num_tokens, item.num_known_tokens, item.num_samples) == (seq, 0, 10, 10, 1)
        assert (output.admitted, output.resumed, output.preempted) == ((seq,), (), ())
        assert item.is_prefill
        assert output.num_batched_tokens == 10

    def test_later_steps_give_one_token_and_are_no_prefill(self):
        engine = make_engine()
        engine.add(make_sequence(prompt=10))
        engine.step()
        (item,) = engine.step().scheduled
        assert (item.start, item.num_tokens, item.num_samples) == (10, 1, 1)
        assert not item.is_prefill

    def test_steps_are_numbered_from_zero(self):
        engine = make_engine()
        engine.run(make_sequence(max_tokens=3))
        assert [output.step_id for output in engine.steps] == [0, 1, 2]

    def test_nothing_to_do_is_an_empty_step(self):
        scheduler = make_scheduler()
        assert scheduler.schedule().scheduled == ()
        assert not scheduler.has_unfinished()

    def test_work_that_cannot_start_raises_instead_of_waiting_for_ever(self):
        scheduler = make_scheduler(4, 4)
        scheduler.add(make_sequence(1, 8))
        assert scheduler.block_manager.admit(make_sequence(0, 16))  # somebody holds the pool without being served
        with pytest.raises(RuntimeError, match="1 waiting"):
            scheduler.schedule()

    def test_decodes_and_prompts_share_a_step(self):
        engine = make_engine(max_num_batched_tokens=16)
        engine.add(make_sequence(0, 4))
        engine.step()
        engine.add(make_sequence(1, 6), make_sequence(2, 20))
        assert shares(engine.step()) == {0: 1, 1: 6, 2: 9}
        assert shares(engine.step()) == {0: 1, 1: 1, 2: 11}
        engine.run()
        engine.check_outputs()

    def test_an_answer_for_fewer_sequences_than_were_scheduled_is_an_error(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0))
        output = scheduler.schedule()
        with pytest.raises(ValueError, match="shorter"):
            scheduler.update(output, [])

    def test_update_returns_who_got_a_token_and_not_who_is_in_the_middle_of_a_prompt(self):
        scheduler = make_scheduler(max_num_batched_tokens=12)
        first, second = make_sequence(0, 4), make_sequence(1, 20)
        scheduler.add(first)
        scheduler.add(second)
        output = scheduler.schedule()
        answer = [SequenceOutput((SampledToken(7),)), SequenceOutput()]
        assert scheduler.update(output, answer) == [first]
        assert first.output_token_ids == [7]
        assert second.num_computed_tokens == 8

    @pytest.mark.parametrize("n", [1, 2, 3, 7])
    def test_the_fake_engine_agrees_with_the_reference_in_a_roomy_pool(self, n):
        request = make_sequence(prompt=9, max_tokens=11, n=n, stop_ids=(0,))
        engine = make_engine(500)
        for choice in engine.run(request):
            alone = run_alone(make_sequence(prompt=9, max_tokens=11, stop_ids=(0,)), index=choice.index)
            assert (choice.output_token_ids, choice.finish_reason, choice.logprobs) == alone


class TestLimits:
    def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody_SC_01(self):
        engine = make_engine(8, 4, max_model_len=64)
        with pytest.raises(RequestError, match=r"32 tokens \(8 blocks of 4\)") as error:
            engine.add(make_sequence(0, 40, max_tokens=5))
        assert "45 tokens" in str(error.value)
        assert "12 blocks" in str(error.value)
        assert error.value.code == "kv_capacity_exceeded"
        assert error.value.param
        assert not engine.scheduler.has_unfinished()
        engine.run(make_sequence(1, 5, max_tokens=5))
        assert len(engine.steps) == 5
        engine.check_outputs()

    @pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "fits"), [
        (31, 1, True), (7, 25, True), (1, 31, True), (32, 1, False), (31, 2, False), (33, 1, False), (1, 32, False),
    ])
    @in_each_mode
    def test_whatever_fits_the_pool_to_the_last_slot_is_served_SC_01(self, num_prompt_tokens, max_tokens, fits, mode):
        engine = make_engine(8, 4, max_model_len=64, **mode)
        small = make_sequence(1, 5, max_tokens=5)
        if fits:
            engine.add(make_sequence(0, num_prompt_tokens, max_tokens=max_tokens))
        else:
            with pytest.raises(RequestError, match="KV cache holds 32 tokens"):
                engine.add(make_sequence(0, num_prompt_tokens, max_tokens=max_tokens))
        engine.run(small)
        assert len(engine.sequences) == 1 + fits
        engine.check_outputs()

    @pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "fits"), [
        (63, 1, True), (1, 63, True), (64, 1, False), (65, 1, False), (63, 2, False), (100, 10, False),
    ])
    def test_context_length_counts_prompt_and_output(self, num_prompt_tokens, max_tokens, fits):
        engine = make_engine(100, 4, max_model_len=64)
        seq = make_sequence(0, num_prompt_tokens, max_tokens=max_tokens)
        if fits:
            engine.run(seq)
            assert seq.num_tokens == num_prompt_tokens + max_tokens
        else:
            with pytest.raises(RequestError, match="maximum context length is 64 tokens") as error:
                engine.add(seq)
            assert error.value.code == "context_length_exceeded"
            assert str(num_prompt_tokens + max_tokens) in str(error.value)

    def test_max_num_tokens_is_the_smaller_of_context_and_pool(self):
        assert make_scheduler(8, 4, max_model_len=64).max_num_tokens == 32
        assert make_scheduler(100, 4, max_model_len=64).max_num_tokens == 64

    @pytest.mark.parametrize(("max_num_seqs", "budget", "limit"), [(2, 512, 2), (4, 3, 3), (1, 512, 1), (8, 8, 8)])
    def test_more_choices_than_may_run_are_refused_with_the_limit_SC_07(self, max_num_seqs, budget, limit):
        engine = make_engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        with pytest.raises(RequestError, match=f"at most {limit}") as error:
            engine.add(make_sequence(0, n=limit + 1, max_tokens=4))
        assert error.value.param == "n"
        assert not engine.scheduler.has_unfinished()
        engine.run(make_sequence(10, n=limit, max_tokens=4), make_sequence(50, max_tokens=4))
        assert len(engine.sequences) == limit + 1
        engine.check_outputs()

    def test_running_choices_never_exceed_max_num_seqs(self):
        engine = make_engine(max_num_seqs=3)
        engine.add(make_sequence(0, max_tokens=3), make_sequence(1, n=2, max_tokens=4),
                   make_sequence(3, n=3, max_tokens=3), make_sequence(6))
        counts = []
        while engine.scheduler.has_unfinished():
            engine.step()
            counts.append(len(engine.scheduler.running))
        assert max(counts) == 3
        assert engine.first_scheduled == [0, 1, 3, 6], "the single one may not overtake the three"
        engine.check_outputs()

    def test_more_runners_than_budget_are_not_admitted(self):
        engine = make_engine(max_num_seqs=50, max_num_batched_tokens=4)
        engine.run(*(make_sequence(seq_id, 1, max_tokens=6) for seq_id in range(12)))
        assert max(len(output.scheduled) for output in engine.steps) == 4
        engine.check_outputs()


class TestChunks:
    @pytest.mark.parametrize(("n", "budget"), [
        *((1, budget) for budget in (1, 7, 8, 10, 15, 29, 30, 31, 4096)),
        *((3, budget) for budget in (3, 7, 29, 30, 31)),
    ])
    @pytest.mark.parametrize("enable_prefix_caching", [True, False])
    def test_only_the_last_chunk_samples_SC_05(self, budget, n, enable_prefix_caching):
        engine = make_engine(64, 4, max_num_batched_tokens=budget, enable_prefix_caching=enable_prefix_caching)
        engine.run(make_sequence(prompt=30, max_tokens=5, n=n))
        num_chunks = -(-30 // budget)
        num_samples = [sum(item.num_samples for item in output.scheduled) for output in engine.steps]
        assert num_samples == [0] * (num_chunks - 1) + [n] * 5
        prompt_shares = [output.scheduled[0].num_tokens for output in engine.steps[:num_chunks]]
        assert sum(prompt_shares) == 30
        assert set(prompt_shares[:-1]) <= {budget}
        for i, output in enumerate(engine.steps):
            assert {item.is_prefill for item in output.scheduled} == {i < num_chunks}
        for seq in engine.sequences.values():
            assert seq.num_prompt_tokens == 30
            assert len(seq.logprobs) == seq.num_output_tokens == 5
        engine.check_outputs()

    @pytest.mark.parametrize("budget", [32, 3, 2, 33])
    @in_each_mode
    def test_a_decode_gets_its_token_in_each_step_of_a_long_prompt_SC_03(self, budget, mode):
        engine = make_engine(400, 4, max_num_batched_tokens=budget, max_model_len=2048, **mode)
        short = make_sequence(0, 5, max_tokens=200)
        engine.add(short)
        while short.num_output_tokens < 10:
            engine.step()
        long = make_sequence(1, 1000, max_tokens=5)
        engine.add(long)
        while not short.is_finished:
            before = short.num_output_tokens, long.num_computed_tokens
            engine.step()
            assert short.num_output_tokens == before[0] + 1
            assert long.is_finished or long.num_computed_tokens > before[1]
        engine.run()
        engine.check_outputs()

    def test_a_long_prompt_gets_all_the_budget_that_decodes_leave_SC_03(self):
        engine = make_engine(400, 4, max_num_batched_tokens=32, max_model_len=2048)
        engine.add(*(make_sequence(seq_id, 2, max_tokens=100) for seq_id in range(4)))
        engine.step()
        engine.add(make_sequence(4, 200))
        for _ in range(200 // 28):
            assert shares(engine.step()) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 28}
        assert shares(engine.step())[4] == 200 % 28

    def test_a_budget_below_the_context_length_serves_long_prompts_in_chunks_CF_02(self):
        engine = make_engine(max_num_batched_tokens=32, max_model_len=256)
        seq = make_sequence(prompt=200, max_tokens=6)
        engine.run(seq)
        assert len(engine.steps) == 7 + 5
        engine.check_outputs()

    def test_a_budget_below_the_context_length_is_refused_without_chunks_CF_02(self):
        with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(32\).*max_model_len \(256\)"):
            SchedulerConfig(max_num_batched_tokens=32, max_model_len=256, enable_chunked_prefill=False)
        SchedulerConfig(max_num_batched_tokens=256, max_model_len=256, enable_chunked_prefill=False)  # just enough

    @in_each_mode
    def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole_CF_02(self, mode):
        engine = make_engine(
            40, 4, max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False, **mode)
        lengths = [5, 63, 1, 62, 60, 3, 40, 30]
        engine.run(*(make_sequence(seq_id, length, max_tokens=64 - length if length > 50 else 9)
                     for seq_id, length in enumerate(lengths)))
        for output in engine.steps:
            assert all(item.num_samples for item in output.scheduled), "a step without a sample is a chunk"
        assert engine.first_scheduled == list(range(8))
        engine.check_outputs()

    def test_a_prompt_of_exactly_the_budget_needs_one_step(self):
        engine = make_engine(max_num_batched_tokens=30)
        engine.add(make_sequence(0, 30), make_sequence(1, 4))
        assert shares(engine.step()) == {0: 30}
        assert shares(engine.step()) == {0: 1, 1: 4}


class TestOrder:
    @pytest.mark.parametrize("max_num_batched_tokens", [512, 8])
    def test_small_requests_do_not_overtake_a_large_one_SC_06(self, max_num_batched_tokens):
        engine = make_engine(9, 4, max_num_batched_tokens=max_num_batched_tokens)
        engine.add(make_sequence(0, 12, max_tokens=20))
        engine.step()
        engine.add(make_sequence(1, 23, max_tokens=1))
        next_id = 2
        while engine.scheduler.has_unfinished():
            for _ in range(2):
                if next_id <= 40:
                    engine.add(make_sequence(next_id, 3, max_tokens=1))
                    next_id += 1
            engine.step()
        assert engine.first_scheduled == list(range(41))
        engine.check_outputs()

    def test_a_stream_of_arrivals_does_not_keep_the_oldest_from_ending(self):
        engine = make_engine(8, 4, max_num_batched_tokens=8)
        seq = make_sequence(0, 20, max_tokens=10)
        engine.add(seq)
        next_id = 1
        while not seq.is_finished:
            engine.add(make_sequence(next_id, 3, max_tokens=6))
            next_id += 1
            engine.step()
        assert len(engine.steps) == 3 + 9

    @in_each_mode
    def test_preempted_sequence_resumes_before_any_waiting_one(self, mode):
        engine = two_that_cannot_both_grow(**mode)
        victim = step_until_preempted(engine)
        engine.add(make_sequence(2, 1, max_tokens=1))
        joined = []
        while engine.scheduler.has_unfinished():
            output = engine.step()
            assert not (output.resumed and output.preempted)
            joined += [*output.resumed, *output.admitted]
        assert [seq.seq_id for seq in joined] == [victim.seq_id, 2]
        engine.check_outputs()

    def test_the_youngest_runner_makes_way(self):
        engine = make_engine(7, 4)
        engine.add(make_sequence(0, 4, max_tokens=12), make_sequence(1, 4, max_tokens=12))
        engine.step()
        engine.add(make_sequence(2, 3, max_tokens=12))
        assert step_until_preempted(engine).seq_id == 2
        assert [seq.seq_id for seq in engine.scheduler.running] == [0, 1]

    def test_nobody_makes_way_without_need(self):
        # All three need a block in the same step; what the youngest held is enough for the two others.
        engine = make_engine(9, 1)
        engine.add(*(make_sequence(seq_id, 2, max_tokens=7) for seq_id in range(3)))
        assert step_until_preempted(engine).seq_id == 2
        assert [seq.seq_id for seq in engine.steps[-1].preempted] == [2]
        assert [seq.seq_id for seq in engine.scheduler.running] == [0, 1]

    def test_several_victims_of_one_step_wait_in_order_of_arrival(self):
        # One block free, three runners that all need one in the same step.
        engine = make_engine(8, 1)
        engine.add(*(make_sequence(seq_id, 1, max_tokens=7) for seq_id in range(3)))
        victims = []
        while engine.scheduler.has_unfinished():
            output = engine.step()
            victims.append([seq.seq_id for seq in output.preempted])
            waiting = [seq.seq_id for seq in engine.scheduler.swapped]
            assert waiting == sorted(waiting)
        assert any(victims)
        engine.check_outputs()

    def test_victims_of_one_step_go_youngest_first(self):
        # The choices hold nothing of their own, so it takes two of them until the first needs no copy of the block it
        # is about to write.
        engine = make_engine(2, 4)
        engine.add(make_sequence(0, 6, max_tokens=2, n=3))
        step_until_preempted(engine)
        assert [seq.seq_id for seq in engine.steps[-1].preempted] == [2, 1]
        assert [seq.seq_id for seq in engine.scheduler.swapped] == [1, 2]
        engine.run()
        engine.check_outputs()

    def test_a_step_that_preempted_admits_nobody(self):
        engine = two_that_cannot_both_grow()
        engine.add(make_sequence(2, 1, max_tokens=1), make_sequence(3, 1, max_tokens=1))
        while engine.scheduler.has_unfinished():
            output = engine.step()
            assert not output.preempted or not (output.admitted or output.resumed)
        assert engine.scheduler.num_preemptions

    def test_a_step_that_preempted_does_not_take_its_victim_back(self):
        # The victim computed for itself two blocks that the other holds too, so it would fit as soon as it is gone.
        engine = make_engine(7, 4)
        engine.add(make_sequence(0, range(9), max_tokens=12), make_sequence(1, range(9), max_tokens=12, prompt_logprobs=0))
        victim = step_until_preempted(engine)
        assert engine.steps[-1].resumed == ()
        assert victim.status is SequenceStatus.SWAPPED
        assert engine.step().resumed == (victim,), "this test is of no use unless it would have fitted"

    def test_nobody_waits_while_everything_fits(self):
        engine = make_engine(64, 4)
        engine.add(*(make_sequence(seq_id, 8, max_tokens=8) for seq_id in range(10)))
        assert len(engine.step().admitted) == 10
        engine.run()
        assert len(engine.steps) == 8
        assert engine.scheduler.num_preemptions == 0

    def test_admission_leaves_each_runner_a_block_to_grow_into(self):
        engine = make_engine(6, 4)
        engine.add(*(make_sequence(seq_id, 4, max_tokens=4) for seq_id in range(6)))
        engine.step()
        # With three running, the fourth would leave two blocks for three runners.
        assert len(engine.scheduler.running) == 3
        assert len(engine.blocks.free_blocks) == 3
        engine.run()
        assert engine.scheduler.num_preemptions == 0

    @pytest.mark.parametrize(("num_blocks", "num_running"), [(4, 3), (5, 4)])
    def test_choices_still_to_be_forked_are_runners_that_need_a_block_too(self, num_blocks, num_running):
        engine = make_engine(num_blocks, 4)
        engine.add(make_sequence(0, 4, n=3), make_sequence(3, 4))
        engine.step()
        assert len(engine.scheduler.running) == num_running

    def test_resuming_leaves_each_runner_a_block_to_grow_into(self):
        # The victim computed for itself one block that the other holds too, so it fits again, but to the last block.
        engine = make_engine(5, 4)
        engine.add(make_sequence(0, range(5), max_tokens=7), make_sequence(1, range(5), max_tokens=7, prompt_logprobs=0))
        victim = step_until_preempted(engine)
        assert len(engine.blocks.free_blocks) == 2
        while not engine.sequences[0].is_finished:
            assert engine.step().resumed == ()
        assert engine.step().resumed == (victim,)


class TestRefusals:
    """The first in line that a step left where it is, and why."""

    @pytest.mark.parametrize(("config", "first", "second", "refusal"), [
        ({}, {}, {}, None),
        ({"num_blocks": 4}, {}, {}, ("blocks", 2 + 1, 2)),  # one more than its own for the runner to grow into
        ({"num_blocks": 5}, {}, {}, None),
        ({"num_blocks": 4}, {"prompt": range(9), "max_tokens": 4}, {"prompt": range(9), "max_tokens": 4},
         ("blocks", 1 + 1, 1)),  # two of three are hits
        ({"num_blocks": 4}, {"prompt": 4, "n": 3}, {"prompt": 4}, ("blocks", 1 + 3, 3)),
        ({"max_num_batched_tokens": 8}, {}, {}, ("budget", 8, 0)),
        ({"max_num_batched_tokens": 9}, {}, {}, None),
        ({"max_num_batched_tokens": 15, "max_model_len": 15, "enable_chunked_prefill": False},
         {"max_tokens": 4}, {"max_tokens": 4}, ("budget", 8, 7)),
        ({"max_num_seqs": 3}, {"n": 2}, {"n": 2}, ("max_num_seqs", 2, 1)),
        ({"max_num_seqs": 3}, {"n": 2}, {}, None),
    ])
    def test_a_newcomer_is_refused_with_what_it_needs_and_what_is_left(self, config, first, second, refusal):
        scheduler = make_scheduler(**config)
        newcomer = make_sequence(10, **second)
        for seq in (make_sequence(0, **first), newcomer, make_sequence(20, 1, max_tokens=1)):
            scheduler.add(seq)
        output = scheduler.schedule()
        if refusal is None:
            assert newcomer in output.admitted
        else:
            assert output.refusal == (newcomer, *refusal)
            assert scheduler.waiting[0] is newcomer

    def test_free_blocks_that_a_newcomer_would_share_are_not_left_for_it_to_fill(self):
        engine = make_engine(5, 4)
        engine.run(make_sequence(0, range(9), max_tokens=1))
        newcomer = make_sequence(2, range(13), max_tokens=1)  # four blocks, the first two of them still there
        engine.add(make_sequence(1, 8), newcomer)
        assert engine.step().refusal == (newcomer, "blocks", 2 + 1, 3 - 2)

    def test_nobody_is_refused_when_nobody_is_left_waiting(self):
        scheduler = make_scheduler(4)
        first, second = make_sequence(0), make_sequence(1, max_tokens=1)
        scheduler.add(first)
        assert step_without_a_device(scheduler).refusal is None
        scheduler.add(second)
        assert step_without_a_device(scheduler).refusal is not None
        scheduler.finish(first, "abort")
        assert step_without_a_device(scheduler).refusal is None

    @in_each_mode
    def test_a_step_that_preempted_refuses_its_victim_for_that_and_later_ones_for_blocks(self, mode):
        engine = two_that_cannot_both_grow(**mode)
        engine.add(make_sequence(2, 1, max_tokens=1))
        victim = step_until_preempted(engine)
        assert engine.steps[-1].refusal == (victim, "preemption", 0, 0)
        refusal = engine.step().refusal
        assert (refusal.seq, refusal.cause) == (victim, "blocks")
        assert refusal.num_needed > refusal.num_left


class TestStaticBatching:
    def test_nobody_joins_before_all_that_run_have_finished(self):
        scheduler = make_scheduler(enable_continuous_batching=False)
        first, second, late = make_sequence(0, max_tokens=2), make_sequence(1, max_tokens=4), make_sequence(2)
        scheduler.add(first)
        scheduler.add(second)
        assert step_without_a_device(scheduler).admitted == (first, second), "a batch is as large as what waits for it"
        scheduler.add(late)
        for _ in range(3):
            output = step_without_a_device(scheduler)
            assert output.admitted == ()
            assert output.refusal == (late, "batch", 0, 0)
        assert first.is_finished and second.is_finished
        assert step_without_a_device(scheduler).admitted == (late,)

    def test_one_that_made_way_comes_back_to_its_batch(self):
        scheduler = make_scheduler(10, 1, enable_continuous_batching=False)
        batch = [make_sequence(seq_id, 2, max_tokens=8) for seq_id in range(3)]
        for seq in batch:
            scheduler.add(seq)
        assert step_without_a_device(scheduler).admitted == tuple(batch)
        step_without_a_device(scheduler)
        assert step_without_a_device(scheduler).preempted == (batch[2],)
        scheduler.finish(batch[1], "abort")
        assert step_without_a_device(scheduler).resumed == (batch[2],)

    def test_nobody_joins_one_that_comes_back_alone(self):
        scheduler = make_scheduler(10, 1, enable_continuous_batching=False)
        batch = [make_sequence(seq_id, 2, max_tokens=8) for seq_id in range(3)]
        for seq in batch:
            scheduler.add(seq)
        for _ in range(3):
            output = step_without_a_device(scheduler)
        assert output.preempted == (batch[2],)
        scheduler.add(make_sequence(3, 2))
        for seq in batch[:2]:
            scheduler.finish(seq, "abort")
        output = step_without_a_device(scheduler)
        assert (output.resumed, output.admitted, output.refusal.cause) == ((batch[2],), (), "batch")


class TestPreemption:
    @pytest.mark.parametrize("max_tokens", [2, 20])
    def test_one_that_can_never_have_enough_is_refused_at_once_PR_01(self, max_tokens):
        engine = make_engine(2, 4, max_model_len=64)
        with pytest.raises(RequestError, match="holds 8 tokens"):
            engine.add(make_sequence(0, 7, max_tokens=max_tokens))
        engine.run(make_sequence(1, 3, max_tokens=3))
        engine.check_outputs()

    @in_each_mode
    @pytest.mark.parametrize("block_size", [1, 2, 4, 16])
    def test_one_that_fills_the_pool_alone_ends_without_preempting_itself_PR_01(self, block_size, mode):
        engine = make_engine(2, block_size, **mode)
        seq = make_sequence(0, 1, max_tokens=2 * block_size - 1)
        engine.add(seq)
        engine.step()
        engine.run(make_sequence(1, 1, max_tokens=1))
        assert 0 not in engine.num_preemptions
        assert seq.num_tokens == 2 * block_size
        engine.check_outputs()

    @in_each_mode
    @pytest.mark.parametrize("enable_prefix_caching", [True, False])
    @pytest.mark.parametrize(("block_size", "num_blocks"), [(4, 20), (1, 80), (2, 40), (16, 5)])
    def test_outputs_under_pressure_are_those_without_PR_02_PR_05_PR_06(
        self, block_size, num_blocks, enable_prefix_caching, mode,
    ):
        engine = make_engine(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, **mode)
        engine.run(*(make_sequence(seq_id, 8, max_tokens=40) for seq_id in range(6)))
        assert engine.scheduler.num_preemptions > 0
        assert all(seq.num_output_tokens == 40 for seq in engine.sequences.values())
        engine.check_outputs()

    def test_swapping_is_used_when_the_host_has_room_and_recomputation_when_not_PR_06(self):
        for num_host_blocks, is_swapped in ((0, False), (1, False), (3, True), (100, True)):
            engine = two_that_cannot_both_grow(preemption_mode="swap", num_host_blocks=num_host_blocks)
            victim = step_until_preempted(engine)
            assert bool(victim.host_blocks) == is_swapped
            num_stored = victim.num_computed_tokens
            assert (num_stored > 0) == is_swapped
            while victim.status is SequenceStatus.SWAPPED:
                output = engine.step()
            (share,) = (item for item in output.scheduled if item.seq is victim)
            assert share.is_prefill != is_swapped
            if is_swapped:
                assert (share.start, share.num_tokens) == (num_stored, 1), "what was copied is not computed again"
            engine.run()
            engine.check_outputs()

    def test_recompute_mode_leaves_the_host_alone(self):
        engine = two_that_cannot_both_grow(preemption_mode="recompute", num_host_blocks=100)
        assert not step_until_preempted(engine).host_blocks
        engine.run()
        assert not any(output.transfers.swap_out or output.transfers.swap_in for output in engine.steps)

    def test_a_swapped_prompt_goes_on_in_the_middle(self):
        # The older one grows by a block each step, so the younger has to go before its prompt is done.
        engine = make_engine(40, 1, max_num_batched_tokens=4, preemption_mode="swap", num_host_blocks=40)
        engine.add(make_sequence(0, 1, max_tokens=20))
        engine.step()
        young = make_sequence(1, 37, max_tokens=3)
        engine.add(young)
        assert step_until_preempted(engine) is young
        num_computed = young.num_computed_tokens
        assert 0 < num_computed < 37
        assert len(young.host_blocks) == num_computed
        engine.run()
        resumed = [item for output in engine.steps for item in output.scheduled if item.seq in output.resumed]
        assert [item.start for item in resumed] == [num_computed]
        engine.check_outputs()

    def test_recomputing_an_output_is_called_a_prefill_even_beyond_the_prompt(self):
        engine = make_engine(5, 4)
        engine.add(make_sequence(0, range(8), max_tokens=12), make_sequence(1, range(8), max_tokens=12))
        victim = step_until_preempted(engine)
        engine.run()
        (item,) = (item for output in engine.steps for item in output.scheduled if item.seq in output.resumed)
        assert (item.seq, item.start, item.num_tokens) == (victim, 8, 5), "all of its prompt was to be a hit"
        assert item.is_prefill

    @pytest.mark.parametrize("num_requests", [2, 5])
    @in_each_mode
    def test_large_requests_do_not_preempt_each_other_again_and_again_PR_08(self, num_requests, mode):
        def requests():
            return [make_sequence(seq_id, 30, max_tokens=45) for seq_id in range(num_requests)]

        roomy = [make_engine(100, 4) for _ in range(num_requests)]
        for engine, seq in zip(roomy, requests()):
            engine.run(seq)
        engine = make_engine(20, 4, **mode)
        engine.run(*requests())
        assert all(count <= 5 for count in engine.num_preemptions.values())
        assert 0 not in engine.num_preemptions
        assert engine.finished[0] == 0
        assert engine.finished == list(range(num_requests))
        assert len(engine.steps) <= 3 * sum(len(alone.steps) for alone in roomy)
        engine.check_outputs()

    @pytest.mark.parametrize("seed", range(20))
    def test_a_live_request_is_in_one_queue_and_a_preempted_one_holds_no_block_PR_10(self, seed):
        # FakeEngine.check says so after each step.
        rng = random.Random(seed)
        mode = MODES[seed % len(MODES)]
        engine = make_engine(6, 2, **mode, vocab_size=3)
        next_id = 0
        while next_id < 200 or engine.scheduler.has_unfinished():
            while next_id < 200 and rng.random() < 0.5:
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
                engine.add(make_sequence(next_id, prompt, max_tokens=rng.randint(1, 6)))
                next_id += 1
            if engine.scheduler.has_unfinished():
                engine.step()
        assert engine.scheduler.num_preemptions > 0
        assert engine.first_scheduled == list(range(200))
        engine.check_drained()
        engine.check_outputs()

    @in_each_mode
    @pytest.mark.parametrize("num_blocks", [7, 8, 10, 13])
    def test_forks_under_pressure_get_what_they_would_get_alone(self, num_blocks, mode):
        engine = make_engine(num_blocks, 4, max_num_seqs=6, **mode)
        engine.run(make_sequence(0, 6, max_tokens=20, n=3), make_sequence(3, 5, max_tokens=20, n=6),
                   make_sequence(9, 7))
        assert engine.num_preemptions
        assert set(engine.num_preemptions) & {1, 2, 4, 5, 6, 7, 8}
        assert len(engine.sequences) == 10
        engine.check_outputs()

    @in_each_mode
    def test_prompt_logprobs_are_whole_however_often_the_prompt_is_interrupted(self, mode):
        engine = make_engine(40, 1, max_num_batched_tokens=4, **mode)
        engine.add(make_sequence(0, 1, max_tokens=20))
        engine.step()
        young = make_sequence(1, 37, max_tokens=3, prompt_logprobs=0)
        engine.add(young)
        assert step_until_preempted(engine) is young
        assert young.num_output_tokens == 0
        engine.run()
        assert young.prompt_logprobs == prompt_logprobs_alone(young)

    @in_each_mode
    def test_prompt_logprobs_are_kept_when_the_output_is_interrupted(self, mode):
        engine = make_engine(6, 4, **mode)
        engine.add(make_sequence(0, 8, max_tokens=12), make_sequence(1, 8, max_tokens=12, prompt_logprobs=0))
        victim = step_until_preempted(engine)
        assert victim.num_output_tokens > 0
        engine.run()
        assert victim.prompt_logprobs == prompt_logprobs_alone(victim)

    @pytest.mark.parametrize("num_cached", [0, 8])
    def test_prompt_logprobs_do_not_depend_on_the_prefix_cache_PC_07(self, num_cached):
        engine = make_engine(64, 16)
        if num_cached:
            engine.run(make_sequence(0, range(33), max_tokens=1))
        seq = make_sequence(1, range(33), max_tokens=1, prompt_logprobs=1)
        engine.run(seq)
        assert len(seq.prompt_logprobs) == 33
        assert seq.prompt_logprobs[0] is None
        assert seq.prompt_logprobs == prompt_logprobs_alone(seq)


class TestEndings:
    def test_a_stop_token_ends_a_sequence_and_only_an_asked_one_is_the_reason(self):
        engine = make_engine(vocab_size=2)
        by_eos = make_sequence(0, max_tokens=200, stop_ids=(0, 1))
        asked = make_sequence(1, max_tokens=200, stop_ids=(0, 1), stop_token_ids=[0, 1])
        engine.run(by_eos, asked)
        assert (by_eos.finish_reason, by_eos.stop_reason) == ("stop", None)
        assert (asked.finish_reason, asked.stop_reason) == ("stop", asked.token_ids[-1])
        assert by_eos.num_output_tokens == asked.num_output_tokens == 1
        engine.check_outputs()

    def test_a_stop_token_at_the_length_limit_is_a_stop(self):
        engine = make_engine(vocab_size=1)
        seq = make_sequence(max_tokens=1, stop_ids=(0,))
        engine.run(seq)
        assert seq.finish_reason == "stop"

    @pytest.mark.parametrize("max_tokens", [1, 2, 7])
    def test_the_length_limit_is_exact(self, max_tokens):
        engine = make_engine()
        seq = make_sequence(max_tokens=max_tokens)
        engine.run(seq)
        assert (seq.finish_reason, seq.stop_reason, seq.num_output_tokens) == ("length", None, max_tokens)
        assert len(engine.steps) == max_tokens

    @in_each_mode
    @pytest.mark.parametrize("status", ["waiting", "running", "swapped"])
    def test_an_abort_in_any_state_frees_all_and_disturbs_nobody(self, status, mode):
        engine = two_that_cannot_both_grow(**mode, max_num_seqs=2)
        engine.add(make_sequence(2, 8, max_tokens=12))
        victim = step_until_preempted(engine)
        target = {"waiting": engine.sequences[2], "running": engine.sequences[0], "swapped": victim}[status]
        assert target.status is SequenceStatus(status)
        engine.finish(target)
        assert target.is_finished
        assert target.finish_reason == "abort"
        assert not target.block_table
        assert not target.host_blocks
        num_tokens = target.num_tokens
        engine.run()
        assert target.num_tokens == num_tokens, "it went on after its end"
        engine.check_outputs()

    def test_an_abort_before_the_first_step_leaves_nothing(self):
        engine = make_engine()
        seq = make_sequence()
        engine.add(seq)
        engine.finish(seq)
        engine.check_drained()
        assert seq.num_output_tokens == 0

    def test_an_abort_between_the_chunks_of_a_prompt_frees_its_blocks(self):
        engine = make_engine(max_num_batched_tokens=8)
        seq, other = make_sequence(0, 30, n=3), make_sequence(3, 30)
        engine.add(seq, other)
        engine.step()
        assert engine.blocks.num_used_blocks
        engine.finish(seq)
        assert engine.blocks.num_used_blocks == 0
        engine.run()
        assert list(engine.sequences) == [0, 3], "it forked after its end"
        engine.check_outputs()

    def test_a_second_ending_changes_nothing(self):
        engine = make_engine()
        seq = make_sequence(max_tokens=1)
        engine.run(seq)
        engine.finish(seq)
        assert seq.finish_reason == "length"
        engine.check_drained()

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_an_aborted_fork_leaves_its_siblings_alone(self, index):
        engine = make_engine()
        engine.add(make_sequence(prompt=6, max_tokens=10, n=3))
        engine.step()
        engine.step()
        engine.finish(engine.sequences[index])
        engine.run()
        assert [seq.finish_reason for seq in engine.sequences.values()].count("length") == 2
        engine.check_outputs()

    def test_the_reason_given_is_the_reason_kept(self):
        scheduler = make_scheduler()
        seq = make_sequence()
        scheduler.add(seq)
        scheduler.finish(seq, "stop", "END")
        assert (seq.finish_reason, seq.stop_reason) == ("stop", "END")

    def test_logits_that_are_no_numbers_end_one_sequence_and_empty_the_prefix_index(self):
        engine = make_engine(errors={(0, 0): 10})
        broken, healthy = make_sequence(0, 8), make_sequence(1, 8, max_tokens=20)
        engine.add(broken, healthy)
        while not broken.is_finished:
            engine.step()
        assert (broken.finish_reason, broken.num_output_tokens) == ("error", 2)
        assert not engine.blocks.cached_blocks
        again = make_sequence(2, broken.token_ids[:8])
        engine.run(again)
        assert again.num_cached_tokens == 0
        engine.check_outputs()

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_choice_whose_first_token_cannot_be_drawn_leaves_its_siblings_alone(self, index):
        engine = make_engine(errors={(0, index): 8})
        choices = engine.run(make_sequence(0, 8, n=3))
        assert [seq.finish_reason for seq in choices] == ["error" if i == index else "length" for i in range(3)]
        engine.check_outputs()


class TestForking:
    @pytest.mark.parametrize("n", [1, 2, 3, 8])
    def test_n_choices_come_from_one_computed_prompt(self, n):
        engine = make_engine(max_num_seqs=8)
        choices = engine.run(make_sequence(0, 10, max_tokens=6, n=n))
        assert [seq.index for seq in choices] == list(range(n)) == [seq.seq_id for seq in choices]
        assert {seq.request_id for seq in choices} == {"request-0"}
        prefills = [item for output in engine.steps for item in output.scheduled if item.is_prefill]
        assert [item.num_tokens for item in prefills] == [10]
        engine.check_outputs()

    def test_choices_run_right_behind_the_first_one(self):
        engine = make_engine()
        engine.add(make_sequence(0), make_sequence(1, n=3), make_sequence(4))
        engine.step()
        assert [seq.seq_id for seq in engine.scheduler.running] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_choice_that_ends_with_its_first_token_leaves_the_others_running(self, index):
        def lengths(seed):
            request = make_sequence(0, 6, max_tokens=9, seed=seed, stop_ids=(0,))
            return [len(run_alone(request, index=i, vocab_size=2).output_token_ids) for i in range(3)]

        seed = next(seed for seed in range(1000) if lengths(seed)[index] == 1 and sorted(lengths(seed))[1] > 3)
        engine = make_engine(vocab_size=2)
        choices = engine.run(make_sequence(0, 6, max_tokens=9, n=3, seed=seed, stop_ids=(0,)))
        assert [seq.num_output_tokens for seq in choices] == lengths(seed)
        engine.check_outputs()


class TestCounters:
    def test_prefix_hits_are_counted_in_tokens_ME_03(self):
        engine = make_engine(64, 16)
        for seq_id in range(3):
            engine.run(make_sequence(seq_id, range(50)))
        engine.run(make_sequence(3, range(100, 120)))
        assert (engine.blocks.num_prefix_queries, engine.blocks.num_prefix_hits) == (170, 96)
        assert engine.blocks.num_prefix_hits == sum(seq.num_cached_tokens for seq in engine.sequences.values())

    @in_each_mode
    def test_recomputed_tokens_are_no_hits_ME_03(self, mode):
        engine = make_engine(20, 4, **mode)
        engine.run(*(make_sequence(seq_id, 8, max_tokens=40) for seq_id in range(6)))
        assert engine.scheduler.num_preemptions > 0
        assert (engine.blocks.num_prefix_queries, engine.blocks.num_prefix_hits) == (48, 0)
        assert all(seq.num_cached_tokens == 0 for seq in engine.sequences.values())

    def test_a_request_that_has_to_wait_is_counted_once_ME_03(self):
        engine = make_engine(5, 4)
        engine.run(*(make_sequence(seq_id, 8, max_tokens=8) for seq_id in range(5)))
        assert engine.blocks.num_prefix_queries == 40

    def test_n_choices_count_their_prompt_once_ME_03(self):
        engine = make_engine(64, 4)
        engine.run(make_sequence(0, range(9), n=4))
        engine.run(make_sequence(4, range(9), n=4))
        assert (engine.blocks.num_prefix_queries, engine.blocks.num_prefix_hits) == (18, 8)

    def test_refused_and_unstarted_requests_are_not_counted_ME_03(self):
        engine = make_engine(8, 4, max_num_seqs=1)
        with pytest.raises(RequestError):
            engine.add(make_sequence(0, 40))
        engine.add(make_sequence(1, 8), make_sequence(2, 8))
        engine.step()
        engine.finish(engine.sequences[2])
        engine.run()
        assert engine.blocks.num_prefix_queries == 8

    @in_each_mode
    def test_preemptions_are_counted_one_by_one(self, mode):
        engine = make_engine(20, 4, **mode)
        engine.run(*(make_sequence(seq_id, 8, max_tokens=40) for seq_id in range(6)))
        assert engine.scheduler.num_preemptions == sum(len(output.preempted) for output in engine.steps)

    def test_used_blocks_are_those_somebody_holds(self):
        engine = make_engine(64, 4)
        assert engine.blocks.num_used_blocks == 0
        engine.add(make_sequence(0, 37, max_tokens=3), make_sequence(1, 1, max_tokens=1))
        engine.step()
        assert engine.blocks.num_used_blocks == 10
        engine.run()
        assert engine.blocks.num_used_blocks == 0
        assert engine.blocks.cached_blocks


class TestCheck:
    @pytest.mark.parametrize("fault", ["status", "order", "queue", "computed", "table", "blocks", "seats", "counts"])
    def test_check_raises_when_queues_and_blocks_do_not_agree(self, fault):
        scheduler = make_scheduler()
        for seq_id in range(3):
            scheduler.add(make_sequence(seq_id))
        scheduler.update(output := scheduler.schedule(), [SequenceOutput((SampledToken(1),)) for _ in output.scheduled])
        scheduler.add(make_sequence(3, 2))
        scheduler.check()
        first = scheduler.running[0]
        if fault == "status":
            first.status = SequenceStatus.WAITING
        elif fault == "order":
            scheduler.running.reverse()
        elif fault == "queue":
            scheduler.waiting.append(first)
        elif fault == "computed":
            first.num_computed_tokens = first.num_tokens
        elif fault == "blocks":
            first.block_table = []
        elif fault == "seats":
            scheduler.max_num_seqs = 2
        elif fault == "counts":
            scheduler.block_manager.ref_counts[first.block_table[0]] += 1
        else:
            scheduler.running.pop()
        with pytest.raises(AssertionError):
            scheduler.check()
