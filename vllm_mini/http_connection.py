"""One TCP connection: uvicorn's protocol with limits on how long a client may say nothing or take nothing.

Knows no paths and no requests' meaning. A connection on which the server waits for the client (for a request, or for the
rest of one) is closed after READ_TIMEOUT seconds without a byte, one whose client takes nothing of what is written for it
after WRITE_TIMEOUT seconds.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_mini.http_edge import APIError, json_bytes

__all__ = ["Connection"]

READ_TIMEOUT = 60.0  # seconds, as long as an idle connection is kept
WRITE_TIMEOUT = 300.0  # seconds


class Connection(H11Protocol):
    """H11Protocol with the timeouts above, and with its one answer of its own, to what is no HTTP, in OpenAI's shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._read_timer)
        _cancel(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        content = json_bytes(APIError(400, "this is not a valid HTTP request").content)
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=content),
                      h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_reading(self) -> None:
        _cancel(self._read_timer)
        if self._awaits_client():
            self._read_timer = self.loop.call_later(READ_TIMEOUT, self._close_if_silent)

    def _awaits_client(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _close_if_silent(self) -> None:
        if self._awaits_client():
            self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
