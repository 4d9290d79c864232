"""The views of sinks: state, figures and history. All figures cost one row, however long the log is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, cast

from starlette.requests import Request

from outbox_relay.admin.actions import unknown_sink
from outbox_relay.admin.sinks import sinks as list_sinks
from outbox_relay.admin.text import duration, limits_text
from outbox_relay.admin.thresholds import ALIVE_SECONDS, OLDEST_SECONDS
from outbox_relay.admin.values import plain
from outbox_relay.domain.errors import ConfigurationError, DatabaseUnusable, NotFound
from outbox_relay.postgres.store import Store
from outbox_relay.service.figures import STATES, load
from outbox_relay.ui.delivery_views import summarize
from outbox_relay.ui.render import site_of

MINUTES: Final = 60
"""Length of the short history, in minutes."""
RANGES: Final[Mapping[str, tuple[float, int]]] = {"2h": (60.0, 120), "48h": (900.0, 192)}
"""The ranges of a sink's history: seconds of a step, and the number of steps."""
RECENT_MINUTES: Final = 2
"""Minutes of the history, the present one included, that tell whether a sink delivers. Each relay adds one a minute."""
CLIENT: Final = "client: "
"""Prefix of errors that a sink's client found without an event. Relays clear them, also while there is no event."""
LAST_ERRORS, ERROR_LOOKS = 10, 200
"""Number of errors of a sink that are shown, and of dead and of waiting deliveries that are looked at for them."""
SINK_FIELDS: Final = (
    "name", "patterns", "paused", "paused_reason", "circuit", "circuit_seconds", "in_flight_limit", "last_error",
    "error_seconds", "unowned", "rate_per_second", "max_in_flight_total", "spread_seconds",
)  # fmt: skip


class StoredFigures(NamedTuple):
    """Values by the name and the labels of their metric, and the age in seconds of the oldest; None without any."""

    values: dict[tuple[str, tuple[str, ...]], float]
    age: float | None

    def whole(self, name: str, *labels: str) -> int | None:
        """Return a value that is a number of things, or None."""
        value = self.values.get((name, labels))
        return None if value is None else int(value)

    def of_sink(self, sink: str) -> dict[str, Any]:
        """Return the backlog of ``sink``, its oldest event and its rows by state; each may be None."""
        return {
            "backlog": self.whole("outbox_backlog_events", sink),
            "oldest_seconds": self.values.get(("outbox_oldest_undelivered_seconds", (sink,))),
            "position_lag_seconds": self.values.get(("outbox_position_lag_seconds", (sink,))),
            **{state: self.whole("outbox_exceptions", sink, state) for state in STATES},
        }


def read_figures(store: Store) -> StoredFigures:
    """Return the figures that a relay has measured for all and that are not too old. Without a relay there are none."""
    stored, now = store.stored_figures()
    entries = load(stored, now)
    values = {(v.name, v.labels): v.value for entry in entries if not entry.failed for v in entry.values}
    return StoredFigures(values, max((round(now - entry.at, 1) for entry in entries), default=None))


class SinkHealth(NamedTuple):
    """The state of a sink: how bad it is, a word, and the reason."""

    level: Literal["ok", "warning", "critical", "off"]
    word: str
    reason: str = ""


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
        return SinkHealth("critical" if is_behind else "warning", "not delivering", f"nothing is delivered: {error}")
    if is_behind:
        facts = [f"its oldest event has waited for {duration(oldest_seconds)}"]
        facts += [f"last error: {error}"] if error else []
        facts += [f"it gets {limits}"] if (limits := limits_text(sink)) else []
        return SinkHealth("warning", "behind", "; ".join(facts))
    if error:
        return SinkHealth("warning", "with errors", f"{error}; delivered in the last minutes: {delivered:,}")
    return SinkHealth("ok", "flowing")


def _is_over(sink: Mapping[str, Any], figures: Mapping[str, Any], figures_age: float | None) -> bool:
    """Return True if everything was delivered after the last error. A relay notices that only if it delivers itself."""
    error, seconds = sink["last_error"], sink["error_seconds"]
    if error is None:
        return True
    measured_later = figures_age is not None and seconds is not None and seconds > figures_age
    return measured_later and figures["backlog"] == 0 and not error.startswith(CLIENT)


def sinks(request: Request, _fields: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return every sink with its state, its figures and its last hour."""
    store = site_of(request).store()
    figures, hours = read_figures(store), _hours(store)
    rows = store.named("status_sinks", {})
    listed = [_sink(row, figures, hour := _hour(hours.get(row.name))) | {"hour": hour} for row in rows]
    return {"sinks": listed, "figures_age_seconds": figures.age}


def sink(request: Request, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return one sink with its 64 shards, its errors by kind, its history, and its settings where they may be read.

    Raises ``NotFound``, which names the nearest sink.
    """
    site, name = site_of(request), request.path_params["name"]
    store = site.store()
    row = next((row for row in store.named("status_sinks", {}) if row.name == name), None)
    if row is None:
        raise NotFound(unknown_sink(store, name))
    figures = read_figures(store)
    listed: dict[str, Any] = {each["name"]: each for each in list_sinks(store)["sinks"]}.get(name, {})
    groups = summarize(site, {"sink": name, "states": ["dead"]})
    errors = store.by_index("errors_of_sink", {"sink": name, "most": LAST_ERRORS, "looks": ERROR_LOOKS}, "read")
    return {
        **_sink(row, figures, _hour(_hours(store).get(name))),
        "figures_age_seconds": figures.age,
        **{field: listed.get(field) for field in ("start", "since", "relays")},
        "shards": [plain(shard) for shard in store.named("shards_of_sink", {"sink": name})],
        "last_errors": [plain(error) for error in errors],
        "errors": groups["groups"],
        "errors_exact": groups["exact"],
        "history": history(store, name, fields.get("period", "2h")),
        "settings": _settings(store, name),
    }


def history(store: Store, name: str, period: str) -> dict[str, Any]:
    """Return the steps of a sink's history, oldest first. ``age`` counts the steps back from now.

    Raises ``ConfigurationError`` if ``period`` is none of ``RANGES``.
    """
    if period not in RANGES:
        raise ConfigurationError(f"period should be one of {', '.join(RANGES)}")
    step, steps = RANGES[period]
    rows = store.named("history_of_sink", {"sink": name, "step": step, "steps": steps})
    return {"step_seconds": step, "steps": steps, "minutes": [plain(row) for row in rows]}


def _sink(row: Any, stored: StoredFigures, hour: Mapping[str, Any]) -> dict[str, Any]:
    known = {field: getattr(row, field) for field in SINK_FIELDS}
    figures = stored.of_sink(row.name)
    state = judge_sink(known, figures, stored.age, sum(hour["minutes"][-RECENT_MINUTES:]))
    return {**known, "state": state._asdict(), **figures}


def _hours(store: Store) -> dict[str, Any]:
    return {row.sink: row for row in store.named("history_hour", {})}


def _hour(row: Any) -> dict[str, Any]:
    """Return the last hour of a sink, with the deliveries of each of its minutes, oldest first."""
    if row is None:
        return {"delivered": 0, "failed": 0, "dead": 0, "p50": None, "p99": None, "minutes": [0] * MINUTES}
    by_age = dict(zip(row.ages, row.deliveries, strict=True))
    minutes = [by_age.get(age, 0) for age in range(MINUTES - 1, -1, -1)]
    return {**plain(row, "delivered", "failed", "dead", "p50", "p99"), "minutes": minutes}


def _settings(store: Store, name: str) -> list[dict[str, Any]] | None:
    """Return the settings with which each live relay serves a sink; None if the role may not read them."""
    try:
        rows = store.action("relay_configs", {"seconds": ALIVE_SECONDS}, 5.0)
    except DatabaseUnusable:
        return None
    prefix = f"sinks.{name}."
    return [{"relay": row.name, "version": row.version, "settings": _of_sink(row.config, prefix)} for row in rows]


def _of_sink(config: object, prefix: str) -> dict[str, Any]:
    """Return the settings of one sink. A relay's role may have recorded anything."""
    recorded = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
    return {key.removeprefix(prefix): recorded[key] for key in sorted(recorded) if key.startswith(prefix)}
