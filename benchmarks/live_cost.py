"""What the live view costs: the same load with nobody looking, with a reader of the feed, and with the page in a browser.

    python benchmarks/live_cost.py --rounds 5 --page

The three take turns against one server. Prints medians of the time for the load and of the server's own CPU time; the
browser's own drawing, which takes cores from the model where there are few, shows only in the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

NUM_REQUESTS, NUM_TOKENS = 16, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true", help="also with the page open in Chromium")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "vllm-mini"), "serve", "--port", str(port), "--uvicorn-log-level", "error"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    try:
        _wait_for(url)
        watchers: dict[str, Any] = {"nobody": contextlib.nullcontext, "a feed reader": lambda: _feed_reader(url)}
        if args.page:
            watchers["the page"] = lambda: _page(url)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in watchers}
        for turn in range(args.rounds + 1):  # the first warms up
            for name, watch in watchers.items():
                with watch(), ThreadPoolExecutor(1) as thread:  # playwright keeps an event loop on this one
                    load = _load(url, psutil.Process(process.pid), turn)
                    times[name].append(thread.submit(asyncio.run, load).result())
    finally:
        process.terminate()
        process.wait(30)
    wall_alone, cpu_alone = (statistics.median(column) for column in zip(*times["nobody"][1:]))
    for name, rows in times.items():
        wall, cpu = zip(*rows[1:])
        print(f"{name:>14}: {statistics.median(wall):.2f} s ({min(wall):.2f}-{max(wall):.2f}), server CPU "
              f"{statistics.median(cpu):.2f} s; against nobody {statistics.median(wall) / wall_alone - 1:+.1%} time, "
              f"{statistics.median(cpu) / cpu_alone - 1:+.1%} CPU")


def _wait_for(url: str) -> None:
    for _ in range(240):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise SystemExit("the server did not start")


async def _load(url: str, server: psutil.Process, turn: int) -> tuple[float, float]:
    """Seconds, and the server's CPU seconds, for the same requests; each turn its own prompts, so nothing is cached."""
    cpu, started = server.cpu_times(), time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        async def ask(index: int) -> None:
            body = {"model": "SmolLM2-135M-Instruct", "prompt": f"{turn} {time.time_ns()} {index} is", "temperature": 0,
                    "max_tokens": NUM_TOKENS, "ignore_eos": True}
            (await client.post("/v1/completions", json=body)).raise_for_status()
        await asyncio.gather(*map(ask, range(NUM_REQUESTS)))
    after = server.cpu_times()
    return time.perf_counter() - started, after.user + after.system - cpu.user - cpu.system


@contextlib.contextmanager
def _feed_reader(url: str) -> Iterator[None]:
    reader = subprocess.Popen(["curl", "-sN", f"{url}/live/feed"], stdout=subprocess.DEVNULL)
    time.sleep(1)
    try:
        yield
    finally:
        reader.terminate()
        reader.wait()


@contextlib.contextmanager
def _page(url: str) -> Iterator[None]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        browser.new_page(viewport={"width": 1280, "height": 800}).goto(url)
        time.sleep(2)
        try:
            yield
        finally:
            browser.close()


if __name__ == "__main__":
    main()
