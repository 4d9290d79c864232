"""The content of the overview and of the page of a sink, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from outbox_relay.admin.actions import unknown_sink
from outbox_relay.admin.alive import ALIVE_SECONDS
from outbox_relay.admin.sinks import sinks as list_sinks
from outbox_relay.admin.text import iso_time
from outbox_relay.domain.errors import ConfigurationError, DatabaseUnusable, NotFound
from outbox_relay.postgres.store import Store
from outbox_relay.ui import view_events
from outbox_relay.ui.figures import StoredFigures, read_figures
from outbox_relay.ui.sink_health import RECENT_MINUTES, judge_sink
from outbox_relay.ui.site import Site

MINUTES: Final = 60
"""Length of the short history, in minutes."""
RANGES: Final[Mapping[str, tuple[float, int]]] = {"2h": (60.0, 120), "48h": (900.0, 192)}
"""The ranges of a sink's history: seconds of a step, and the number of steps."""
LAST_ERRORS: Final = 10
"""Number of errors of a sink that are shown."""
ERROR_LOOKS: Final = 200
"""Number of dead and of waiting deliveries that are looked at for them."""
SINK_FIELDS: Final = (
    "paused", "paused_reason", "circuit", "circuit_seconds", "in_flight_limit", "last_error", "error_seconds",
    "unowned", "rate_per_second", "max_in_flight_total", "spread_seconds",
)  # fmt: skip
STEP_FIELDS: Final = (
    "age", "delivered", "failed", "dead", "backlog", "oldest", "p50", "p99", "claim_p99", "tick_p99", "settle_p99",
    "busy_ms",
)  # fmt: skip


def sinks(store: Store) -> dict[str, Any]:
    """Return every sink with its state, its figures and its last hour."""
    figures = read_figures(store)
    hours = {row.sink: row for row in store.named("history_hour", {})}
    found = [
        {**_sink(row, figures, hour := _hour(hours.get(row.name))), "hour": hour}
        for row in store.named("status_sinks", {})
    ]
    return {"sinks": found, "figures_age_seconds": figures.age}


def sink(site: Site, name: str, period: str) -> dict[str, Any]:
    """Return one sink with its 64 shards, its errors by kind, its history, and its settings where they may be read.

    ``period`` is one of ``RANGES``. Raises ``ConfigurationError`` for another, and ``NotFound``, which names the
    nearest sink.
    """
    if period not in RANGES:
        raise ConfigurationError(f"period should be one of {', '.join(RANGES)}")
    store = site.store()
    row = next((row for row in store.named("status_sinks", {}) if row.name == name), None)
    if row is None:
        raise NotFound(unknown_sink(store, name))
    figures = read_figures(store)
    hours = {row.sink: row for row in store.named("history_hour", {})}
    listed: dict[str, Any] = {each["name"]: each for each in (list_sinks(store))["sinks"]}.get(name, {})
    groups = view_events.summary(site, {"sink": name, "states": ["dead"]})
    return {
        **_sink(row, figures, _hour(hours.get(name))),
        "figures_age_seconds": figures.age,
        "start": listed.get("start"),
        "since": listed.get("since"),
        "relays": listed.get("relays"),
        "shards": [shard._asdict() for shard in store.named("shards_of_sink", {"sink": name})],
        "last_errors": _last_errors(store, name),
        "errors": groups["groups"],
        "errors_exact": groups["exact"],
        "history": history(store, name, period),
        "settings": _settings(store, name),
    }


def history(store: Store, name: str, period: str) -> dict[str, Any]:
    """Return the steps of a sink's history, oldest first. ``age`` counts the steps back from now."""
    step, steps = RANGES[period]
    rows = store.named("history_of_sink", {"sink": name, "step": step, "steps": steps})
    found = [{field: getattr(row, field) for field in STEP_FIELDS} for row in rows]
    return {"step_seconds": step, "steps": steps, "minutes": found}


def _last_errors(store: Store, name: str) -> list[dict[str, Any]]:
    """Return the newest errors of a sink, whether or not they are the reason of its state, newest first."""
    limits = {"most": LAST_ERRORS, "looks": ERROR_LOOKS}
    rows = [row._asdict() for row in store.by_index("errors_of_sink", {"sink": name, **limits}, "read")]
    return [{**row, "at": iso_time(row["at"]), "uid": row["uid"] and str(row["uid"])} for row in rows]


def _sink(row: Any, stored: StoredFigures, hour: Mapping[str, Any]) -> dict[str, Any]:
    known = {field: getattr(row, field) for field in SINK_FIELDS}
    figures = stored.of_sink(row.name)
    state = judge_sink(known, figures, stored.age, sum(hour["minutes"][-RECENT_MINUTES:]))
    return {
        "name": row.name,
        "patterns": row.patterns,
        "state": {"level": state.level, "word": state.word, "reason": state.reason},
        **known,
        **figures,
    }


def _hour(row: Any) -> dict[str, Any]:
    """Return the last hour of a sink, with the deliveries of each of its minutes, oldest first."""
    if row is None:
        return {"delivered": 0, "failed": 0, "dead": 0, "p50": None, "p99": None, "minutes": [0] * MINUTES}
    by_age = dict(zip(row.ages, row.deliveries, strict=True))
    minutes = [by_age.get(age, 0) for age in range(MINUTES - 1, -1, -1)]
    return {"delivered": row.delivered, "failed": row.failed, "dead": row.dead,
            "p50": row.p50, "p99": row.p99, "minutes": minutes}  # fmt: skip


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
    if not isinstance(config, dict):
        return {}
    found = cast("dict[str, Any]", config)
    return {key.removeprefix(prefix): found[key] for key in sorted(found) if key.startswith(prefix)}
