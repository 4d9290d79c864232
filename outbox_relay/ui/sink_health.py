"""The state of a sink: it delivers, or a reason why not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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


RECENT_MINUTES = 2
"""Minutes of the history, the present one included, that tell whether a sink delivers. Each relay adds one a minute."""
CLIENT = "client: "
"""Prefix of errors that a sink's client found without an event. Relays clear them, also while there is no event."""


def judge_sink(
    sink: Mapping[str, Any], figures: Mapping[str, Any], figures_age: float | None, delivered: int
) -> SinkHealth:
    """Return the state of a sink of ``status_sinks``.

    ``figures`` are its stored figures, measured at most ``figures_age`` seconds ago, and ``delivered`` is the number of
    deliveries in the last ``RECENT_MINUTES`` of its history.
    """
    if sink["paused"]:
        return SinkHealth("off", "paused", sink["paused_reason"] or "paused by a person")
    if sink["unowned"]:
        return SinkHealth("critical", "not served", f"no relay owns {sink['unowned']} of its 64 shards")
    if sink["circuit"] != "closed":
        return SinkHealth("critical", "destination down", sink["last_error"] or "no reason is known")
    error = None if _is_over(sink, figures, figures_age) else sink["last_error"]
    oldest_seconds = figures["oldest_seconds"] or 0.0
    is_behind = oldest_seconds > OLDEST_SECONDS
    if error and not delivered:
        level = "critical" if is_behind else "warning"
        return SinkHealth(level, "not delivering", f"nothing is delivered: {error}")
    if is_behind:
        waits = f"; it gets {limits}" if (limits := limits_text(sink)) else ""
        last = f"; last error: {error}" if error else ""
        return SinkHealth(
            "warning", "behind", f"its oldest event has waited for {duration(oldest_seconds)}{last}{waits}"
        )
    if error:
        return SinkHealth("warning", "with errors", f"{error}; delivered in the last minutes: {delivered:,}")
    return SinkHealth("ok", "flowing", "")


def _is_over(sink: Mapping[str, Any], figures: Mapping[str, Any], figures_age: float | None) -> bool:
    """Return True if everything was delivered after the last error. A relay notices that only if it delivers itself."""
    error, seconds = sink["last_error"], sink["error_seconds"]
    if error is None:
        return True
    measured_later = figures_age is not None and seconds is not None and seconds > figures_age
    return measured_later and figures["backlog"] == 0 and not error.startswith(CLIENT)
