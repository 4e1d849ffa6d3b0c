"""The live page over a saved trace: no engine, no model. Serves what was recorded, and cannot change it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

from fastapi import FastAPI, Request, Response

from vllm_mini.http_edge import APIError, error_response, event
from vllm_mini.live_server import FeedResponse, add_page, check_site
from vllm_mini.trace import Record, read_trace

__all__ = ["build_replay_app"]


def build_replay_app(path: Path, *, is_local: bool = True) -> FastAPI:
    """An application whose feed is the trace, from its beginning to its end. ConfigError for a file that is none."""
    num_records = sum(1 for _ in read_trace(path))
    app = FastAPI(title="mini-vLLM replay", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(APIError, error_response)
    add_page(app)

    @app.get("/live/feed")
    async def feed(request: Request) -> Response:
        check_site(request, is_local=is_local)
        return FeedResponse(_as_async(_events(path, num_records)))

    return app


def _events(path: Path, num_records: int) -> Iterator[Record]:
    yield {"type": "hello", "mode": "replay", "model": path.name, "may_set_pace": False, "has_sandbox": False,
           "num_records": num_records}
    yield from read_trace(path)
    yield {"type": "end", "complete": True}


async def _as_async(records: Iterator[Record]) -> AsyncGenerator[bytes, None]:
    for record in records:
        yield event(record)
