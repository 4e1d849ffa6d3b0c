"""The live page in a real browser: what it shows is what the engine holds, and its buttons do what they say.

Chromium has to be installed (on Debian: apt-get install chromium). Where it is not, these tests are skipped, unless
VLLM_MINI_NEEDS_BROWSER is set, as the project's own checks do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server, serve_app, serve_in_thread, wait_until

from vllm_mini.engine import LLMEngine
from vllm_mini.live_server import LiveSettings
from vllm_mini.replay import build_replay_app
from vllm_mini.trace import read_trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REASON = "no Chromium is installed" if CHROMIUM is None else ""
try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    REASON = "playwright is not installed"
if REASON and "VLLM_MINI_NEEDS_BROWSER" in os.environ:
    raise RuntimeError(f"the page's tests cannot run: {REASON}")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TIMEOUT = 20_000  # ms
SHOWN = """() => { const state = miniVllm.source().history.newest; return {
    ref_counts: [...state.refCounts], free: state.free, cached: [...state.hashes.keys()].sort((a, b) => a - b),
    tables: Object.fromEntries(state.tables), running: state.running, swapped: state.swapped, waiting: state.waiting,
    step: state.step, num_tokens: Object.fromEntries([...state.running].map((id) => [id, state.seqs.get(id).numTokens])),
    computed: Object.fromEntries([...state.running].map((id) => [id, state.seqs.get(id).computed]))}; }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_in_thread(num_kv_blocks=48, app_settings={"live": LiveSettings()}) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; whatever a page complains of on its console fails the test."""
    contexts, complaints = [], []

    def open_at(url: str, **options: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "locale": "en-US", **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and "401" not in message.text
                and complaints.append(message.text))
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def page(server: Server, open_page: Callable[..., Page]) -> Iterator[Page]:
    page = open_page(server.url)
    until(page, "miniVllm.state()")
    yield page
    page.close()
    server.wait_drained()


def until(page: Page, condition: str) -> None:
    """Wait for a JavaScript expression to be true. (Playwright's own way breaks the page's content security policy.)"""
    wait_until(lambda: page.evaluate(f"Boolean({condition})"), timeout=60, what=condition)


def drawn(page: Page) -> Page:
    """The page, once it shows what it knows."""
    until(page, "miniVllm.isDrawn()")
    return page


def seek(page: Page, position: int) -> None:
    page.evaluate("""(at) => { const slider = document.getElementById('seek'); slider.value = at;
        slider.dispatchEvent(new Event('input')); }""", position)


def shown(page: Page) -> dict[str, Any]:
    return json.loads(json.dumps(page.evaluate(SHOWN)))


def held(engine: LLMEngine) -> dict[str, Any]:
    """What the page has to show, from the engine itself."""
    scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
    ids = {queue: [seq.seq_id for seq in getattr(scheduler, queue)] for queue in ("running", "swapped", "waiting")}
    return {
        "ref_counts": list(blocks.ref_counts), "free": list(blocks.free_blocks),
        "cached": sorted(blocks.cached_blocks.values()), "step": scheduler.num_steps, **ids,
        "tables": {str(seq_id): list(table) for seq_id, table in blocks.block_tables.items()},
        "num_tokens": {str(seq.seq_id): seq.num_tokens for seq in scheduler.running},
        "computed": {str(seq.seq_id): seq.num_computed_tokens for seq in scheduler.running}}


def pause(page: Page) -> None:
    until(page, "miniVllm.source().pace && !miniVllm.source().isPaused")  # the pause of an earlier page has ended
    page.click("#pause")
    until(page, "miniVllm.source().isPaused")


def step(page: Page) -> None:
    """One step, to its record's arrival on the page."""
    before = page.evaluate("miniVllm.source().history.newest.step")
    page.click("#step")
    until(page, f"miniVllm.source().history.newest.step > {before}")


def ask(page: Page, box: int, text: str) -> None:
    form = page.locator(".chat-box").nth(box)
    form.locator("input").fill(text)
    form.locator("button").click()


def play(page: Page, scene: str) -> None:
    page.click(f'[data-scene="{scene}"]')


def start_sandbox(page: Page, **settings: int | bool) -> None:
    """A fresh sandbox with these settings, paused."""
    page.click("#engine-sandbox")
    until(page, "miniVllm.source().kind === 'sandbox' && miniVllm.state()")
    page.click("#sandbox-settings summary")
    for name, value in settings.items():
        field = page.locator(f"#sandbox-form [name={name}]")
        if isinstance(value, bool):
            field.set_checked(value)
        else:
            field.fill(str(value))
    wall_time = page.evaluate("miniVllm.state().config.wall_time")
    page.click("#sandbox-form button")
    until(page, f"miniVllm.source().pace && miniVllm.state()?.config.wall_time > {wall_time}")
    page.click("#sandbox-settings summary")


def words(page: Page) -> str:
    """All events in words, oldest first."""
    return "\n".join(reversed(drawn(page).locator("#events li").all_text_contents()))


def test_the_page_shows_the_engines_own_state_at_every_step(page: Page, server: Server) -> None:
    pause(page)
    play(page, "sceneShared")
    until(page, "miniVllm.state().waiting.length === 4")
    assert shown(page) == held(server.engine)
    for _ in range(6):
        step(page)
        assert shown(page) == held(server.engine)
    assert len(shown(page)["running"]) == 4
    until(page, "document.querySelectorAll('#queues .running li').length === 4")
    cards = drawn(page).locator("#queues .running .facts").all_text_contents()
    for seq, card in zip(server.engine.scheduler.running, cards, strict=True):
        assert f"prompt {seq.num_prompt_tokens}, answer {seq.num_output_tokens} · {len(seq.block_table)} blocks" in card
    rows = page.locator("#table .physical").all_text_contents()
    table = server.engine.scheduler.running[0].block_table
    assert [int(row.split()[0]) for row in rows] == table
    assert page.locator("#pool-summary").text_content().startswith(
        f"{server.engine.scheduler.block_manager.num_used_blocks} used")
    used = page.locator("[data-number=blocks]").text_content().split(" / ")[0]
    assert int(used) == server.engine.scheduler.block_manager.num_used_blocks


def test_two_chats_with_one_system_prompt_share_blocks_counted_twice(page: Page, server: Server) -> None:
    pause(page)
    question = "please name the colours of the rainbow in the right order"
    for box in (0, 1):
        ask(page, box, question + "?!"[box])
    until(page, "miniVllm.state().waiting.length === 2")
    step(page)
    counts = shown(page)["ref_counts"]
    shared = [block for block, count in enumerate(counts) if count == 2]
    assert counts == server.engine.scheduler.block_manager.ref_counts
    first = server.engine.scheduler.running[0].block_table[0]
    assert len(shared) >= 3 and first in shared
    until(page, "document.querySelector('#table .physical.shared')")
    assert page.locator("#table .physical.shared").first.text_content() == f"{first} ×2"
    page.locator("#table .physical").first.hover()
    until(page, "document.querySelector('#block-detail').textContent.includes('reference count 2')")
    detail = page.locator("#block-detail").text_content()
    assert "held by" in detail and "<|im_start|>" in detail and "16 of 16 slots" in detail
    owners = page.evaluate(f"miniVllm.state().owners().get({first})")
    assert owners == [seq.seq_id for seq in server.engine.scheduler.running]
    assert "shared: the same first" in words(page)


def test_four_answers_fork_and_copy(page: Page, server: Server) -> None:
    pause(page)
    play(page, "sceneFork")
    until(page, "miniVllm.state().waiting.length === 1")
    step(page)
    until(page, "document.querySelectorAll('#queues .running li').length === 4")
    assert max(shown(page)["ref_counts"]) == 4
    step(page)
    until(page, "document.querySelectorAll('#events .copied').length === 3")
    told = words(page)
    assert told.count("forks off") == 3
    assert "into a copy, block" in told
    assert shown(page) == held(server.engine)


def test_a_tight_pool_shows_who_makes_way_and_comes_back(page: Page) -> None:
    play(page, "sceneTight")
    until(page, "miniVllm.source().kind === 'sandbox'")
    page.select_option("#speed", "20")
    page.wait_for_selector("#queues .swapped li", timeout=TIMEOUT)
    why = "document.querySelector('#queues .swapped .why')?.textContent"
    until(page, f"/needs \\d+ blocks?, \\d+ free/.test({why})")
    pause(page)
    assert page.evaluate("miniVllm.state().finished.length") == 0, "a pause waits for no chat"
    page.click("#pause")
    page.select_option("#speed", "null")
    page.wait_for_selector("#events .resumed")
    told = words(page)
    assert "none is free" in told and "gives back" in told
    assert told.index("gives back") < told.index("is back")
    assert page.evaluate("miniVllm.state().numPreemptions") > 0
    until(page, "miniVllm.state().finished.length === 4")
    assert page.evaluate("[...miniVllm.state().refCounts].every((count) => count === 0)")


def test_pause_stops_tokens_and_a_step_adds_one_column(page: Page, server: Server) -> None:
    pause(page)
    ask(page, 0, "hello")
    until(page, "miniVllm.state().waiting.length === 1")
    columns = page.evaluate("miniVllm.source().history.steps.length")
    num_steps = server.engine.scheduler.num_steps
    page.wait_for_timeout(300)
    assert server.engine.scheduler.num_steps == num_steps
    assert page.locator(".chat-box .assistant").first.text_content() == ""
    for count in (1, 2, 3):
        step(page)
        assert page.evaluate("miniVllm.source().history.steps.length") == columns + count
        assert server.engine.scheduler.num_steps == num_steps + count
    assert "all who ask this server wait" in drawn(page).locator("#status").text_content()
    page.click("#pause")
    until(page, "miniVllm.state().running.length === 0 && miniVllm.state().waiting.length === 0")


def test_closing_the_page_ends_its_pause(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    until(page, "miniVllm.state()")
    pause(page)
    page.close()
    assert server.complete("after", timeout=TIMEOUT / 1000).status_code == 200


def test_the_sandbox_switches_make_a_fresh_engine(page: Page, server: Server) -> None:
    num_steps = server.engine.scheduler.num_steps
    start_sandbox(page, num_kv_blocks=20, enable_prefix_caching=False, enable_continuous_batching=False)
    config = page.evaluate("miniVllm.state().config")
    assert (config["num_blocks"], config["prefix_caching"], config["continuous_batching"]) == (20, False, False)
    pause(page)
    ask(page, 0, "first")
    until(page, "miniVllm.state().waiting.length === 1")
    step(page)
    ask(page, 1, "second")
    until(page, "miniVllm.state().waiting.length === 1")
    step(page)
    until(page, "document.querySelector('#queues .waiting .why')?.textContent.includes('static batching')")
    assert page.evaluate("miniVllm.state().numPrefixHits") == 0
    page.click("#engine-served")
    assert server.engine.scheduler.num_steps == num_steps


def test_a_chunk_and_what_waits_for_the_budget_are_told(page: Page) -> None:
    start_sandbox(page, num_kv_blocks=48, max_num_batched_tokens=32)
    pause(page)
    ask(page, 0, "x" * 60)
    ask(page, 1, "y")
    until(page, "miniVllm.state().waiting.length === 2")
    step(page)
    until(page, "document.querySelector('#queues .waiting .why')?.textContent.includes('budget')")
    assert "computes tokens 1–32 of" in words(page)
    assert "32 tokens in the last step, of 32" in drawn(page).locator("#timeline-summary").text_content()


def test_a_saved_trace_shows_the_same_pictures(page: Page, open_page: Callable[..., Page], tmp_path: Path) -> None:
    play(page, "scene4")
    until(page, "miniVllm.state().finished.length >= 4 && miniVllm.state().running.length === 0")
    with page.expect_download() as download:
        page.click("#save-trace")
    path = tmp_path / "trace.jsonl"
    download.value.save_as(path)
    records = list(read_trace(path))
    middle = len(records) // 2

    def look(at: int) -> dict[str, Any]:
        seek(page, at)
        return drawn(page).evaluate("""() => ({pool: document.getElementById('pool-canvas').toDataURL(),
            timeline: document.getElementById('timeline-canvas').toDataURL(),
            queues: document.getElementById('queues').textContent, table: document.getElementById('table').textContent,
            numbers: document.getElementById('numbers').textContent, step: miniVllm.state().step,
            events: document.getElementById('events').textContent})""")

    def settled() -> list[dict[str, Any]]:
        """Both pictures, once they come out the same twice: the page may still be taking in its last records."""
        earlier: list[dict[str, Any]] = []
        while (pictures := [look(at) for at in (middle, len(records) - 1)]) != earlier:
            earlier = pictures
        return pictures

    live = settled()
    assert live[0] != live[1]

    def differences() -> list[str]:
        again = settled()
        return [f"{at}: {name}" for at in (0, 1) for name in live[at] if again[at][name] != live[at][name]]

    page.set_input_files("#open-trace", path)
    until(page, "miniVllm.source().mode === 'replay'")
    assert drawn(page).locator("#status").text_content() == "replay of trace.jsonl"
    wait_until(lambda: not differences(), what="the same pictures")

    with serve_app(build_replay_app(path)) as url:
        page = open_page(url)
        until(page, "miniVllm.source().mode === 'replay' && miniVllm.state()")
        until(page, f"miniVllm.source().history.end === {len(records) - 1} && miniVllm.source().position === 1")
        wait_until(lambda: not differences(), what="the same pictures")
        position = page.evaluate("miniVllm.source().end")
        look(0)
        page.click("#step")
        assert 0 < page.evaluate("miniVllm.source().end") < position
        page.click("#pause")
        until(page, "miniVllm.source().end === miniVllm.source().history.end")


def test_a_file_that_is_no_trace_is_said_to_be_none(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"type":"step"}\n')
    page.set_input_files("#open-trace", path)
    until(page, "document.getElementById('status').textContent.includes('no trace')")
    assert page.evaluate("miniVllm.source().mode") == "live"


def test_the_slider_looks_back_while_the_engine_goes_on(page: Page, server: Server) -> None:
    ask(page, 0, "hello")
    until(page, "miniVllm.state().finished.length === 1")
    newest = page.evaluate("miniVllm.state().step")
    seek(page, 3)
    assert page.evaluate("miniVllm.state().step") < newest
    until(page, "document.getElementById('status').textContent === 'looking back'")
    page.click("#to-live")
    assert page.evaluate("miniVllm.state().step") == server.engine.scheduler.num_steps


def test_the_page_asks_for_the_key_and_the_feed_refuses_without(open_page: Callable[..., Page]) -> None:
    with serve_in_thread(num_kv_blocks=48, app_settings={"live": LiveSettings(), "api_key": "secret"}) as locked:
        page = open_page(locked.url)
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("miniVllm.state()") is None
        page.fill("#key", "wrong")
        page.click("#key-dialog button")
        until(page, "document.getElementById('key-error').textContent === 'That was not the key.'")
        page.fill("#key", "secret")
        page.click("#key-dialog button")
        until(page, "miniVllm.state()")
        ask(page, 0, "hello")
        until(page, "miniVllm.state().finished.length === 1")
        page.close()


def test_hidden_texts_are_not_shown(open_page: Callable[..., Page]) -> None:
    with serve_in_thread(num_kv_blocks=48, app_settings={"live": LiveSettings(hide_text=True)}) as hiding:
        page = open_page(hiding.url)
        until(page, "miniVllm.state()")
        pause(page)
        ask(page, 0, "xylophone")
        until(page, "miniVllm.state().waiting.length === 1")
        step(page)
        until(page, "document.querySelector('#table .text')")
        assert "xylophone" not in page.locator("#queues").text_content()
        assert page.locator("#table .text").first.text_content() == "(texts are switched off)"
        assert shown(page) == held(hiding.engine)
        page.close()


def test_the_pool_is_walked_with_the_arrow_keys(page: Page) -> None:
    page.focus("#pool-canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    until(page, "document.getElementById('block-detail').textContent.startsWith('Block 1:')")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("miniVllm.pool.selected") == 1 + page.evaluate("miniVllm.pool.columns")


def test_every_control_has_a_name_in_both_languages(page: Page) -> None:
    unnamed = """() => [...document.querySelectorAll('button, input, select, canvas, summary, [role=log]')]
        .filter((one) => !(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length))
        .map((one) => one.outerHTML)"""
    undefined = "() => document.body.innerText.includes('undefined')"
    for language in ("en", "zh"):
        assert drawn(page).evaluate(unnamed) == []
        assert not page.evaluate(undefined)
        assert page.evaluate("document.documentElement.lang") == language
        page.click("#language")


def test_both_languages_have_the_same_texts(page: Page) -> None:
    """Chinese falls back to English where a text is missing; only what is the same in both may be."""
    same = page.evaluate("""async () => {
        const {setLanguage, texts} = await import('/web/i18n.js');
        const same = (en, zh) => Object.keys(en).flatMap((name) => typeof en[name] === 'object'
            ? same(en[name], zh[name]) : String(en[name]) === String(zh[name]) ? [name] : []);
        setLanguage('en'); const en = texts(); setLanguage('zh');
        return same(en, texts());
    }""")
    assert same == ["sceneFork"], "n = 4"


def test_a_picture_of_the_view_can_be_saved(page: Page, tmp_path: Path) -> None:
    with page.expect_download() as download:
        page.click("#save-png")
    path = tmp_path / "view.png"
    download.value.save_as(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (820, 1180)])
def test_nothing_sticks_out_of_the_window(server: Server, open_page: Callable[..., Page], width: int, height: int) -> None:
    page = open_page(server.url, viewport={"width": width, "height": height})
    until(page, "miniVllm.state()")
    ask(page, 0, "hello")
    until(page, "miniVllm.state().finished.length === 1")
    assert drawn(page).evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_4096_blocks_and_64_sequences_are_drawn_smoothly(open_page: Callable[..., Page]) -> None:
    settings = {"live": LiveSettings()}
    with serve_in_thread(num_kv_blocks=4096, app_settings=settings) as large, contextlib.ExitStack() as stack:
        page = open_page(large.url)
        until(page, "miniVllm.state()")
        pause(page)
        large.client.timeout = 60
        body = {"model": "dummy", "max_tokens": 400, "stream": True, "ignore_eos": True}
        for i in range(64):
            stack.enter_context(large.connect("/v1/completions", {**body, "prompt": [i, 1, 2] * 300}))
        until(page, "miniVllm.state().waiting.length === 64")
        page.click("#pause")
        until(page, "miniVllm.state().running.length === 64")
        pause(page)  # the engine's work is not to be measured
        page.evaluate("document.getElementById('all-blocks').click()")
        costs = []
        for _ in range(11):
            page.evaluate("dispatchEvent(new Event('resize'))")
            drawn(page)
            costs.append(page.evaluate("miniVllm.lastFrameCost()"))
        assert sorted(costs)[5] < 100, f"ms a picture: {costs}"
        page.click("#pause")
        stack.close()
        large.wait_drained(30)
        wait_until(lambda: page.evaluate("miniVllm.state().running.length") == 0)
        assert shown(page) == held(large.engine)
        page.close()
