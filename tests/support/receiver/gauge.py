"""A receiver's answer that counts the requests in flight."""

from __future__ import annotations

import asyncio

from tests.support.receiver import Request
from tests.support.receiver.answers import say

ANSWER_SECONDS = 0.05


class Gauge:
    """Counts the requests that are in flight at a receiver, and answers each after a while."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.answer_seconds = ANSWER_SECONDS

    async def answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.answer_seconds)
            await say(200)(request, reader, writer)
        finally:
            self.now -= 1
