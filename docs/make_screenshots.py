"""Make the README's pictures of the live page, from a real run in a real browser.

    python docs/make_screenshots.py [FOLDER]

Needs Chromium and playwright, and SmolLM2 (fetched on first use). Each picture is taken when the page shows what it is
about, whatever the machine's speed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHARED = """miniVllm.state().running.length === 4
    && miniVllm.state().running.every((id) => miniVllm.state().seqs.get(id).numTokenTimes > 8)"""
PREEMPTED = """miniVllm.source().kind === 'sandbox' && miniVllm.state()?.swapped.length
    && miniVllm.state().refusal?.[1] === 'blocks'"""
CHUNKED = """miniVllm.source().history.steps.filter(({scheduled}) => scheduled.some(([, kind]) => kind === 'prefill')
    && scheduled.filter(([, kind]) => kind === 'decode').length === 3).length > 2"""
DEADLINE = 60  # seconds


@contextlib.contextmanager
def serve(*options: str) -> Iterator[str]:
    """A server process; its address."""
    command = [sys.executable, "-m", "vllm_mini", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(match[1] for line in process.stderr if (match := re.search(r"watch it at (\S+)", line)))
        finally:
            process.terminate()
            process.stderr.read()


def open_page(browser: Browser, url: str, scheme: str) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme, locale="en-US",  # type: ignore[arg-type]
                            device_scale_factor=1.5)
    page.goto(url)
    wait(page, "miniVllm.state()")
    return page


def wait(page: Page, condition: str) -> None:
    end = time.monotonic() + DEADLINE
    while not page.evaluate(f"Boolean({condition})"):
        if time.monotonic() > end:
            raise TimeoutError(condition)
        page.wait_for_timeout(20)


def take(page: Page, path: Path, *, point_at: str = "h1") -> None:
    page.click("#pause")
    wait(page, "miniVllm.source().isPaused && miniVllm.isDrawn()")
    page.locator(point_at).first.hover()
    page.wait_for_timeout(600)  # cards come to rest
    page.screenshot(path=path)
    page.close()
    print(path)


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with serve("--num-kv-blocks", "64") as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = open_page(browser, url, "light")
        page.select_option("#speed", "8")
        page.click('[data-scene="sceneShared"]')
        wait(page, SHARED)
        take(page, folder / "live-sharing.png", point_at="#table .shared")
        page = open_page(browser, url, "dark")
        page.click('[data-scene="sceneTight"]')
        wait(page, PREEMPTED)
        take(page, folder / "live-preemption.png")
        page = open_page(browser, url, "light")
        page.click("#engine-sandbox")
        wait(page, "miniVllm.source().kind === 'sandbox' && miniVllm.state()")
        page.click('[data-scene="sceneLong"]')
        wait(page, CHUNKED)
        page.wait_for_timeout(1500)
        take(page, folder / "live-chunked-prefill.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
