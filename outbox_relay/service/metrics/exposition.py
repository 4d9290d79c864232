"""The answer of ``/metrics``, kept for a second.

That of a process with few sinks is rendered in the event loop: under load, waiting for a thread takes much longer than
rendering. That of many sinks is rendered in a thread of its own, once for all concurrent requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from outbox_relay.service.metrics.collector import SnapshotCollector
from outbox_relay.service.metrics.snapshot import Snapshot

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The content types of the two formats."""
KEPT_SECONDS: Final = 1.0
"""Time for which an answer is given again."""
SINKS_AT_ONCE: Final = 10
"""Maximum number of sinks that are rendered in the event loop, in about a millisecond each."""
MOST_RANGES: Final = 32
"""Maximum number of media ranges of a request that are looked at."""


Content: TypeAlias = tuple[str, bytes]
"""The content type and the body of an answer."""


class Exposition:
    """Renders snapshots. ``take`` is called in the event loop, at most once a second for each format."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._kept: dict[str, tuple[float, Content]] = {}
        self._rendering: dict[str, asyncio.Task[Content]] = {}

    def answer(self, accept: Iterable[str]) -> Content | Awaitable[Content]:
        """Return the answer to an ``Accept`` header, at once or later, at most ``KEPT_SECONDS`` old.

        Raises any error of the rendering.
        """
        content_type = negotiate(accept)
        made_at, kept = self._kept.get(content_type, (float("-inf"), None))
        if kept is not None and time.monotonic() - made_at < KEPT_SECONDS:
            return kept
        rendering = self._rendering.get(content_type)
        if rendering is None:
            made_at, snapshot = time.monotonic(), self._take()
            if len(snapshot.sinks) <= SINKS_AT_ONCE:
                return self._keep(content_type, made_at, render(snapshot, content_type))
            rendering = self._start(content_type, made_at, snapshot)
        return asyncio.shield(rendering)

    def _start(self, content_type: str, made_at: float, snapshot: Snapshot) -> asyncio.Task[Content]:
        rendering = asyncio.get_running_loop().create_task(self._render(content_type, made_at, snapshot))
        self._rendering[content_type] = rendering
        rendering.add_done_callback(lambda ended: self._ended(content_type, ended))
        return rendering

    def _ended(self, content_type: str, rendering: asyncio.Task[Content]) -> None:
        """Forget a rendering. Its error, if nothing awaits it any more, is not logged."""
        self._rendering.pop(content_type, None)
        if not rendering.cancelled():
            rendering.exception()

    async def _render(self, content_type: str, made_at: float, snapshot: Snapshot) -> Content:
        body = await asyncio.get_running_loop().run_in_executor(self._thread, render, snapshot, content_type)
        return self._keep(content_type, made_at, body)

    def _keep(self, content_type: str, made_at: float, body: bytes) -> Content:
        content = content_type, body
        self._kept[content_type] = made_at, content
        return content

    def close(self) -> None:
        """End the thread once it has finished what it renders."""
        for rendering in list(self._rendering.values()):
            rendering.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def render(snapshot: Snapshot, content_type: str) -> bytes:
    """Return a snapshot in one of the two formats.

    No name of ours needs escaping. For OpenMetrics, the library would otherwise examine each character of the names of
    all samples, which takes a third of the time.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    if content_type == OPENMETRICS:
        return cast("bytes", cast("Any", openmetrics).generate_latest(registry, ALLOWUTF8))
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
