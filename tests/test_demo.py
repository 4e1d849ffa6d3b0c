"""The demo as a learner runs it: what it prints is what happened, and every answer is what its request gets alone."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_mini import demo
from vllm_mini.demo import REQUESTS, Narrator, make_config, make_params
from vllm_mini.engine import LLMEngine, StepSnapshot
from vllm_mini.llm import LLM

EVENT_KINDS = {"allocate", "share", "fork", "copy", "evict", "preempt", "swap_out", "swap_in", "release"}
NUM_SEQS = sum(request.n for request in REQUESTS)


class Run(NamedTuple):
    returncode: int
    lines: list[str]
    stderr: str
    cpu_seconds: float


def kinds_of(lines: list[str]) -> list[str]:
    """The kinds of the block lines, in order."""
    return [line.split()[0] for line in lines if line.startswith(" " * 9) and line.split()[0] in EVENT_KINDS]


def block_lists(lines: list[str], kind: str) -> list[list[str]]:
    """The block ids of each bracket on the lines of one kind."""
    told = [line for line in lines if line.startswith(f"{'':9}{kind} ")]
    return [ids.split() for line in told for ids in re.findall(r"\[(.*?)\]", line)]


def story(lines: list[str]) -> dict[str, list[str]]:
    """The rows of the closing table: label -> the other cells."""
    rows = ([cell.strip() for cell in line.strip("│\n").split("│")] for line in lines if line.startswith("│"))
    return {label: cells for label, *cells in rows}


def answers(lines: list[str]) -> dict[str, str]:
    """What each [Done] line says: name -> the quoted output."""
    return dict(re.fullmatch(r"\[Done\] (seq_\d+) output: (.*)", line).groups()
                for line in lines if line.startswith("[Done]"))


def run_main(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert demo.main(list(argv)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def run() -> Run:
    """`python -m vllm_mini.demo`, piped."""
    hints = ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")
    environment = {name: value for name, value in os.environ.items() if name not in hints}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "vllm_mini.demo"], capture_output=True, encoding="utf-8", timeout=120,
                          env={**environment, "PYTHONIOENCODING": "utf-8"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(done.returncode, done.stdout.splitlines(), done.stderr, cpu_seconds)


def test_it_succeeds_within_five_seconds_of_work_and_complains_about_nothing(run: Run) -> None:
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.cpu_seconds < 5


def test_the_first_three_iterations_read_as_promised(run: Run) -> None:
    outside_events = [line for line in run.lines if not line.startswith(" ")]
    assert run.lines[0] == outside_events[0]
    assert outside_events[:3] == [
        "[Iter 0] Prefill seq_0 (tokens=10), seq_1 (tokens=5)",
        "[Iter 1] Decode seq_0, seq_1, seq_2(prefill)",
        "[Iter 2] Decode seq_0, seq_1, seq_2",
    ]


def test_iterations_are_numbered_without_a_gap(run: Run) -> None:
    numbers = [int(number) for number in re.findall(r"^\[Iter (\d+)\]", "\n".join(run.lines), re.MULTILINE)]
    assert numbers == list(range(len(numbers)))


def test_every_kind_of_block_event_is_seen(run: Run) -> None:
    assert set(kinds_of(run.lines)) == EVENT_KINDS


def test_a_preempted_sequence_comes_back_in_both_ways(run: Run) -> None:
    text = "\n".join(run.lines)
    assert re.search(r"share +seq_4 is back: 20 of its 22 tokens are still in \[[\d ]+\]\n"
                     r" +allocate +seq_4 takes \[\d+\] to compute 2 tokens again\n", text)
    assert re.search(r"swap_in +seq_5 is back: copied from host memory to \[[\d ]+\]\n", text)


def test_a_prompt_beyond_the_budget_says_how_much_of_it_was_computed(run: Run) -> None:
    assert any("seq_3(prefill 14 of 18)" in line for line in run.lines)


def test_it_is_short_narrow_and_plain_when_piped(run: Run) -> None:
    assert len(run.lines) < 90
    assert max(map(len, run.lines)) <= 80
    assert all(line.isprintable() for line in run.lines)  # no escape sequence, no stray byte of the dummy's


def test_each_answer_is_what_the_request_gets_alone(run: Run) -> None:
    llm = LLM("dummy", dtype="float32")
    alone = [repr(choice.text) for request in REQUESTS
             for choice in llm.generate(request.prompt, make_params(request), progress=False)[0].outputs]
    assert answers(run.lines) == {f"seq_{seq_id}": text for seq_id, text in enumerate(alone)}
    assert len(set(alone)) == NUM_SEQS  # mixed-up answers would show


def test_the_story_adds_up_to_the_events(run: Run) -> None:
    def count(kind: str) -> int:
        return sum(map(len, block_lists(run.lines, kind)))

    kinds = kinds_of(run.lines)
    copies = kinds.count("copy")
    rows = {label: cells[0] for label, cells in story(run.lines).items()}
    assert rows["blocks taken"] == str(count("allocate") + count("swap_in") + copies)
    assert rows["blocks shared (prefix + fork)"] == f"{count('share')} + {count('fork')}"
    assert rows["blocks copied on write"] == str(copies)
    assert rows["blocks evicted (old prefixes)"] == str(count("evict"))
    assert rows["blocks swapped (out + in)"] == f"{count('swap_out')} + {count('swap_in')}"
    swapped = kinds.count("swap_out")
    assert rows["preemptions (swap + recompute)"] == f"{swapped} + {kinds.count('preempt') - swapped}"
    recomputed = re.findall(r"to compute (\d+) tokens again", "\n".join(run.lines))
    assert rows["tokens computed again"] == str(sum(map(int, recomputed)))


def test_the_story_compares_with_reserving_the_longest_length(run: Run) -> None:
    rows, config = story(run.lines), make_config()
    longest = max(line.count("seq_") for line in run.lines if line.startswith("[Iter"))
    fits = config.num_kv_blocks * config.block_size // config.max_model_len
    assert rows["sequences running at once, at most"] == [str(longest), str(fits)]
    paged, contiguous = map(float, rows["empty slots per running sequence, mean"])
    assert paged < config.block_size <= contiguous < config.max_model_len


def test_without_swap_every_preemption_is_recomputed_and_no_answer_changes(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_main(capsys, "--preemption-mode", "recompute")
    kinds = set(kinds_of(lines))
    assert kinds == EVENT_KINDS - {"swap_out", "swap_in"}
    assert answers(lines) == answers(run.lines)
    assert "host" not in "\n".join(lines)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("num_kv_blocks", [8, 9, 10, 11, 12, 13, 40])
def test_the_tables_told_by_the_events_are_those_of_the_block_manager(num_kv_blocks: int, mode: str) -> None:
    config = replace(make_config(), num_kv_blocks=num_kv_blocks, preemption_mode=mode)
    narrator = Narrator(config)
    used_blocks, preemptions = [0], []

    def on_step(step: StepSnapshot) -> None:
        narrator(step)
        blocks = engine.scheduler.block_manager
        assert narrator.tables == blocks.block_tables
        used_blocks.append(blocks.num_used_blocks)
        preemptions.extend(step.schedule.preempted)

    engine = LLMEngine.from_config(config, on_step=on_step)
    demo.play(engine)
    assert narrator.tables == {}
    assert max(used_blocks) <= narrator.peak_blocks <= num_kv_blocks
    assert narrator.num_preemptions.total() == len(preemptions) == engine.scheduler.num_preemptions


def test_the_real_model_lives_through_the_same_story(
    run: Run, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_main(capsys, "--real")
    assert [line for line in lines if not line.startswith("[Done]")] == [
        line for line in run.lines if not line.startswith("[Done]")]
    assert answers(lines)["seq_1"] == "' Paris.\\n'"
    assert len(answers(lines)) == NUM_SEQS


def test_a_reader_that_has_had_enough_is_no_error():
    command = f"{sys.executable} -m vllm_mini.demo | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("[Iter 0] Prefill seq_0") and result.stderr == ""
