"""A running server's pool, queues and numbers in the terminal, drawn from the feed that the live page reads too."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_mini.config import ConfigError
from vllm_mini.trace import LiveState, Record

__all__ = ["Screen", "feed", "run_top"]

COLORS = ("dodger_blue2", "orange1", "green3", "orchid", "sky_blue1", "red3", "yellow3", "medium_purple")
MAX_CELLS = 2048  # blocks that are drawn
MAX_ROWS = 12  # sequences of a queue that are listed
NUM_STEPS = 50  # that rates are taken over
FRAMES_PER_SECOND = 8


class _Step(NamedTuple):
    seconds: float
    num_tokens: int  # new ones: those drawn, not those of prompts


class Screen:
    """What is drawn, after any number of records."""

    def __init__(self) -> None:
        self.state: LiveState | None = None
        self._steps: deque[_Step] = deque(maxlen=NUM_STEPS)

    def take(self, record: Record) -> None:
        if record["type"] == "snapshot" and self.state is None:
            self.state = LiveState(record)
        elif self.state is not None:
            self.state.apply(record)
        if record["type"] == "step":
            drawn = sum(start + count == known for _, _, start, count, known in record["scheduled"])
            self._steps.append(_Step(record["seconds"], drawn))

    def draw(self, width: int) -> Group:
        if self.state is None:
            return Group(Text("connecting ..."))
        return Group(self._numbers(self.state), Text(), self._pool(self.state, width), Text(), self._queues(self.state))

    def _numbers(self, state: LiveState) -> Text:
        seconds = sum(step.seconds for step in self._steps)
        rate = sum(step.num_tokens for step in self._steps) / seconds if seconds else 0.0
        num_cached = sum(block_id in state.cached for block_id in state.free)
        queries, hits = state.totals["num_prefix_queries"], state.totals["num_prefix_hits"]
        num_blocks, num_free = len(state.ref_counts), len(state.free) - num_cached
        return Text(
            f"{state.config['model']}  step {state.step}  {rate:.1f} tokens/s  blocks: {num_blocks - len(state.free)} used, "
            f"{num_cached} cached, {num_free} free of {num_blocks}  prefix hits: "
            f"{100 * hits / queries if queries else 0:.0f}%  preemptions: {state.totals['num_preemptions']}", style="bold")

    def _pool(self, state: LiveState, width: int) -> Text:
        """A cell a block: full is used, half shared, light cached; free ones behind the last of these are left out."""
        owner = {block_id: seq_id for seq_id, table in state.tables.items() for block_id in table}
        last = max([0, *owner, *state.cached])
        text = Text()
        for block_id in range(min(last + 1, len(state.ref_counts), MAX_CELLS)):
            ref_count = state.ref_counts[block_id]
            cell = "▓" if ref_count > 1 else "█" if ref_count else "░" if block_id in state.cached else "·"
            text.append(cell, style=_color(owner[block_id]) if ref_count else "grey50")
            if (block_id + 1) % max(8, width - 2) == 0:
                text.append("\n")
        return text

    def _queues(self, state: LiveState) -> Table:
        table = Table("queue", "seq", "prompt", "answer", "computed", "cached", "blocks", expand=True)
        for queue in ("running", "swapped", "waiting"):
            seq_ids = state.totals[queue]
            for seq_id in seq_ids[:MAX_ROWS]:
                seq = state.seqs[seq_id]
                num_outputs = seq["num_tokens"] - seq["num_prompt_tokens"]
                table.add_row(queue, Text(str(seq_id), style=_color(seq_id)), *map(str, (
                    seq["num_prompt_tokens"], num_outputs, seq["num_computed_tokens"], seq["num_cached_tokens"],
                    len(state.tables.get(seq_id, ())))))
            if len(seq_ids) > MAX_ROWS:
                table.add_row(queue, f"and {len(seq_ids) - MAX_ROWS} more", *[""] * 5)
        return table


def _color(seq_id: int) -> str:
    return COLORS[seq_id % len(COLORS)]


def feed(url: str, api_key: str | None = None) -> Iterator[Record]:
    """The records of a server's feed as they come. ConfigError for a server that gives none."""
    base = url if "://" in url else f"http://{url}"
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is not the address of a server")
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1').rstrip('/')}/live/feed")
    if api_key is not None:
        request.add_header("authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
    except urllib.error.HTTPError as error:
        reasons = {401: "it needs the right --api-key", 403: "it does not answer to this name", 404: "its live view is off"}
        raise ConfigError(f"{url} gives no feed: {reasons.get(error.code, f'HTTP status {error.code}')}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"there is no server at {url}: {getattr(error, 'reason', error)}") from error


def run_top(url: str, api_key: str | None = None, *, once: bool = False) -> None:
    """Draw until the server ends or Ctrl-C comes; with `once`, one picture of what is there now."""
    console, screen = Console(), Screen()
    if once:
        for record in feed(url, api_key):
            screen.take(record)
            if screen.state is not None:
                break
        console.print(screen.draw(console.width))
        return
    with Live(console=console, refresh_per_second=FRAMES_PER_SECOND, screen=console.is_terminal,
              get_renderable=lambda: screen.draw(console.width)):
        for record in feed(url, api_key):
            screen.take(record)
