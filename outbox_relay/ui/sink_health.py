"""The state of a sink: it delivers, or a reason why not. Pure."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from outbox_relay.admin.doctor.sinks import OLDEST_SECONDS
from outbox_relay.admin.render import limits_text
from outbox_relay.admin.text import duration

Level = Literal["ok", "warning", "critical", "off"]


class SinkHealth(NamedTuple):
    """The state of a sink: how bad it is, a word, and the reason."""

    level: Level
    word: str
    reason: str


def judge_sink(sink: dict[str, Any], oldest_seconds: float | None) -> SinkHealth:
    """Return the state of a sink of ``status_sinks``, whose oldest event has waited for ``oldest_seconds``."""
    if sink["paused"]:
        return SinkHealth("off", "paused", sink["paused_reason"] or "paused by a person")
    if sink["unowned"]:
        return SinkHealth("critical", "not served", f"no relay owns {sink['unowned']} of its 64 shards")
    if sink["circuit"] != "closed":
        return SinkHealth("critical", "destination down", sink["last_error"] or "no reason is known")
    if oldest_seconds is not None and oldest_seconds > OLDEST_SECONDS:
        waits = f"; it gets {limits}" if (limits := limits_text(sink)) else ""
        return SinkHealth("warning", "behind", f"its oldest event has waited for {duration(oldest_seconds)}{waits}")
    if sink["last_error"]:
        return SinkHealth("warning", "flowing, with errors", sink["last_error"])
    return SinkHealth("ok", "flowing", "")
