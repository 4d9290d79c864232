"""The answer of ``/metrics``, kept for a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

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
MOST_RANGES: Final = 32
"""Maximum number of media ranges of a request that are looked at."""


class Exposition:
    """Renders snapshots, which ``take`` returns, at most once a second for each format. Used by one thread."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        self._kept: dict[str, tuple[float, bytes]] = {}

    def answer(self, accept: Iterable[str]) -> tuple[str, bytes]:
        """Return content type and body for an ``Accept`` header, at most ``KEPT_SECONDS`` old."""
        content_type = negotiate(accept)
        made_at, body = self._kept.get(content_type, (float("-inf"), b""))
        if time.monotonic() - made_at >= KEPT_SECONDS:
            made_at, body = time.monotonic(), render(self._take(), content_type)
            self._kept[content_type] = made_at, body
        return content_type, body


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
