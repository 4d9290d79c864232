"""The answer of ``/metrics``: rendered in a thread of its own, shared by concurrent requests, kept for a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from outbox_relay.service.metrics.collector import SnapshotCollector
from outbox_relay.service.metrics.snapshot import Snapshot

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The content types of the two formats."""
KEPT_SECONDS: Final = 1.0
"""Time for which an answer is given again."""
MOST_RANGES: Final = 32
"""Maximum number of media ranges of a request that are looked at."""


class Page(NamedTuple):
    """A rendered answer. ``made_at`` is a ``time.monotonic()`` value."""

    content_type: str
    body: bytes
    made_at: float


class Exposition:
    """Renders snapshots. ``take`` is called in the event loop, at most once a second for each format."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._pages: dict[str, Page] = {}
        self._rendering: dict[str, asyncio.Task[Page]] = {}

    async def page(self, content_type: str) -> Page:
        """Return a page that is at most ``KEPT_SECONDS`` old. Raises any error of the rendering."""
        kept = self._pages.get(content_type)
        if kept is not None and time.monotonic() - kept.made_at < KEPT_SECONDS:
            return kept
        rendering = self._rendering.get(content_type)
        if rendering is None:
            rendering = asyncio.create_task(self._render(content_type))
            self._rendering[content_type] = rendering
            rendering.add_done_callback(lambda ended: self._ended(content_type, ended))
        return await asyncio.shield(rendering)

    def _ended(self, content_type: str, rendering: asyncio.Task[Page]) -> None:
        """Forget a rendering. Its error, if nothing awaits it any more, is not logged."""
        self._rendering.pop(content_type, None)
        if not rendering.cancelled():
            rendering.exception()

    async def _render(self, content_type: str) -> Page:
        made_at, snapshot = time.monotonic(), self._take()
        body = await asyncio.get_running_loop().run_in_executor(self._thread, render, snapshot, content_type)
        page = self._pages[content_type] = Page(content_type, body, made_at)
        return page

    def close(self) -> None:
        """End the thread once it has finished what it renders."""
        for rendering in list(self._rendering.values()):
            rendering.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def render(snapshot: Snapshot, content_type: str) -> bytes:
    """Return a snapshot in one of the two formats."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    if content_type == OPENMETRICS:
        return cast("bytes", cast("Any", openmetrics).generate_latest(registry))
    return generate_latest(registry)


def negotiate(accept: Iterable[str]) -> str:
    """Return the content type for the lines of an ``Accept`` header: OpenMetrics only if it is asked for."""
    wanted = text = 0.0
    for item in ",".join(accept).split(",", MOST_RANGES)[:MOST_RANGES]:
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = _weight(parameters)
        if media == "application/openmetrics-text" and _is_readable(parameters):
            wanted = max(wanted, weight)
        elif media in ("text/plain", "text/*", "*/*"):
            text = max(text, weight)
    return OPENMETRICS if wanted > 0.0 and wanted >= text else TEXT


def _is_readable(parameters: list[str]) -> bool:
    """Return True unless another version is asked for."""
    versions = [value.strip('"') for value in map(_value_of("version"), parameters) if value is not None]
    return not versions or versions[0] in ("1.0.0", "0.0.1")


def _weight(parameters: list[str]) -> float:
    """Return the weight of a media range, 0 if it is not a number from 0 to 1."""
    for value in map(_value_of("q"), parameters):
        if value is not None:
            try:
                weight = float(value[:8])
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0


def _value_of(name: str) -> Callable[[str], str | None]:
    def value(parameter: str) -> str | None:
        found, _, text = parameter.partition("=")
        return text.strip() if found.strip() == name else None

    return value
