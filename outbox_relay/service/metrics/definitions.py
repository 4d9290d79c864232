"""Every metric of a relay process: its name, type, unit, labels and meaning.

Names and labels are a contract with users. ``docs/observability.md`` has the same table, which a test compares.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Type = Literal["counter", "gauge", "histogram", "info"]


class Definition(NamedTuple):
    """One metric. ``group`` is the group of figures that it is read from, or None if this process counts it."""

    name: str
    type: Type
    unit: str
    labels: tuple[str, ...]
    help: str
    group: str | None = None

    @property
    def family(self) -> str:
        """The name of the metric family, without the suffix of a counter or of an info metric."""
        return self.name.removesuffix("_total").removesuffix("_info")


STATES: Final = ("waiting", "held", "scheduled", "dead")
"""The states of rows of ``outbox.delivery``, as ``status`` shows them."""
TABLES: Final = frozenset(
    {
        *("attempt", "audit", "day", "delivery", "discarded", "erasure", "event", "figures", "history", "inbox"),
        *("meta", "progress", "relay", "replay", "replay_progress", "retention", "scheduled", "shard", "sink"),
        *("sink_route", "uid"),
    }
)
"""The tables whose dead rows are exported. Partitions count under their parent."""
GROUPS: Final = frozenset(
    {
        *("sinks", "backlog", "exceptions", "transactions", "locks", "tables", "log", "default_partition", "retention"),
        "schedules",
    }
)
"""The groups of figures of the database."""
PER_SINK: Final = frozenset({"backlog", "exceptions"})
"""The groups that are measured for one sink at a time."""

_SINK = ("sink",)

DELIVERED: Final = Definition(
    "outbox_delivered_total", "counter", "", _SINK, "Events that the destination acknowledged, repeated ones too."
)
ATTEMPTS: Final = Definition(
    "outbox_attempts_total", "counter", "", ("sink", "outcome"), "Deliveries of an event that were tried, by outcome."
)
ATTEMPT_SECONDS: Final = Definition(
    *("outbox_attempt_seconds", "histogram", "seconds", ("sink", "outcome")),
    "Duration of the call of an attempt, by outcome. A batch has one duration for all of its events.",
)
END_TO_END: Final = Definition(
    *("outbox_end_to_end_seconds", "histogram", "seconds", _SINK),
    "Time from the emit of an event, or from its scheduled time, to its acknowledgement.",
)
DEAD: Final = Definition(
    "outbox_dead_total", "counter", "", ("sink", "reason"), "Events that became dead in the database, by reason."
)
CIRCUIT_STATE: Final = Definition(
    "outbox_circuit_state", "gauge", "", _SINK, "Circuit in this process: 0 closed, 1 half-open, 2 open."
)
IN_FLIGHT: Final = Definition("outbox_in_flight", "gauge", "", _SINK, "Calls that the destination has not answered.")
IN_FLIGHT_LIMIT: Final = Definition(
    "outbox_in_flight_limit", "gauge", "", _SINK, "Present limit of concurrent calls, reduced after throttling."
)
LIMIT_WAITING: Final = Definition(
    *("outbox_limit_waiting", "gauge", "", _SINK),
    "Calls in this process that wait for rate_per_second or max_in_flight_total of all relays.",
)
CALLS_HANGING: Final = Definition(
    *("outbox_calls_hanging", "gauge", "", _SINK),
    "Calls of handlers or plug-ins in this process that have outlasted their time limit and cannot be ended.",
)
SHARDS_OWNED: Final = Definition("outbox_shards_owned", "gauge", "", _SINK, "Shards that this process owns.")
LEASE_LOST: Final = Definition(
    *("outbox_lease_lost_total", "counter", "", _SINK),
    "Leases of shards and of rows that ended before this process renewed or settled them.",
)
SESSION_RESTARTS: Final = Definition(
    *("outbox_session_restarts_total", "counter", "", ("sink", "reason")),
    "Sessions that started again from the stored positions, by reason.",
)
TICK_SECONDS: Final = Definition("outbox_tick_seconds", "histogram", "seconds", (), "Duration of a tick.")
READ_SECONDS: Final = Definition(
    "outbox_read_seconds", "histogram", "seconds", _SINK, "Duration of a statement that reads the log."
)
CLAIM_SECONDS: Final = Definition(
    "outbox_claim_seconds", "histogram", "seconds", _SINK, "Duration of a statement that claims rows."
)
SETTLE_SECONDS: Final = Definition(
    "outbox_settle_seconds", "histogram", "seconds", _SINK, "Duration of a settlement of events or of rows."
)
SCHEDULES_FIRED: Final = Definition(
    *("outbox_schedules_fired_total", "counter", "", ("outcome",)),
    "Times of schedules that this process fired, by outcome: emitted, passed_over, refused or failed.",
)
RELOAD_SUCCESSFUL: Final = Definition(
    *("outbox_config_last_reload_successful", "gauge", "", ()),
    "1 if the last reload of the settings was carried out or none was requested, else 0.",
)
BUILD_INFO: Final = Definition("outbox_build_info", "info", "", ("version",), "Version of the relay; always 1.")
FIGURES_AGE: Final = Definition(
    *("outbox_figures_age_seconds", "gauge", "seconds", ("group",)),
    "Age of the figures of the database that this process exports, by group; of several sinks the greatest.",
)
FIGURES_FAILED: Final = Definition(
    *("outbox_figures_failed", "gauge", "", ("group",)),
    "1 if figures of the group are unknown, after an error, for lack of a right or of time; else 0.",
)

FIGURES: Final = (
    Definition(
        *("outbox_backlog_events", "gauge", "events", _SINK),
        "Committed events whose delivery is not settled, without dead and scheduled ones; estimated if there are many.",
        "backlog",
    ),
    Definition(
        *("outbox_oldest_undelivered_seconds", "gauge", "seconds", _SINK),
        "Age of the oldest event of the backlog; 0 without a backlog.",
        "backlog",
    ),
    Definition(
        *("outbox_position_lag_seconds", "gauge", "seconds", _SINK),
        "Age of the first event of the log that the slowest position has not passed; 0 if there is none.",
        "sinks",
    ),
    Definition(
        *("outbox_exceptions", "gauge", "", ("sink", "state")),
        "Rows of outbox.delivery by state, at most 100,000 of each.",
        "exceptions",
    ),
    Definition(
        *("outbox_oldest_exception_seconds", "gauge", "seconds", ("sink", "state")),
        "Age of the oldest event among the rows of a state; 0 without rows.",
        "exceptions",
    ),
    Definition("outbox_paused", "gauge", "", _SINK, "1 if the sink is paused, else 0.", "sinks"),
    Definition("outbox_shards_unowned", "gauge", "", _SINK, "Shards that no relay owns.", "sinks"),
    Definition(
        *("outbox_oldest_transaction_seconds", "gauge", "seconds", ()),
        "Age of the oldest transaction that keeps VACUUM from removing rows, prepared ones too.",
        "transactions",
    ),
    Definition("outbox_lock_waits", "gauge", "", (), "Sessions that wait for a lock on the relay's tables.", "locks"),
    Definition("outbox_dead_tuples", "gauge", "", ("table",), "Dead rows of a table, as statistics say.", "tables"),
    Definition(
        *("outbox_default_partition_rows", "gauge", "", ()),
        "Events in the DEFAULT partition, counted up to 10,000.",
        "default_partition",
    ),
    Definition("outbox_log_bytes", "gauge", "bytes", (), "Size of the log with its indexes.", "log"),
    Definition(
        *("outbox_retention_blocked", "gauge", "", ()),
        "Days that are past keep_days and still hold events.",
        "retention",
    ),
    Definition(
        *("outbox_schedule_late_seconds", "gauge", "seconds", ()),
        "Time by which the schedule that is latest is late, or has waited for its first time; 0 if none is.",
        "schedules",
    ),
    Definition(
        "outbox_schedules_failing", "gauge", "", (), "Schedules whose event was refused or not fired.", "schedules"
    ),
)
"""The figures of the database."""

DEFINITIONS: Final = (
    *(DELIVERED, ATTEMPTS, ATTEMPT_SECONDS, END_TO_END, DEAD, CIRCUIT_STATE, IN_FLIGHT, IN_FLIGHT_LIMIT, LIMIT_WAITING),
    *(
        CALLS_HANGING,
        SHARDS_OWNED,
        LEASE_LOST,
        SESSION_RESTARTS,
        TICK_SECONDS,
        READ_SECONDS,
        CLAIM_SECONDS,
        SETTLE_SECONDS,
    ),
    SCHEDULES_FIRED,
    *FIGURES,
    *(FIGURES_AGE, FIGURES_FAILED, RELOAD_SUCCESSFUL, BUILD_INFO),
)
"""Every metric, in the order of the documentation."""
