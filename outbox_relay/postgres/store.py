"""The relay's only access to the database: one method per statement file in ``sql/``, grouped by table."""

from __future__ import annotations

from outbox_relay.postgres.log import LogStatements
from outbox_relay.postgres.replays import ReplayStatements
from outbox_relay.postgres.retention import RetentionStatements
from outbox_relay.postgres.rows import RowStatements
from outbox_relay.postgres.schedules import ScheduleStatements
from outbox_relay.postgres.shards import ShardStatements
from outbox_relay.postgres.sinks import SinkStatements


class Store(
    LogStatements,
    SinkStatements,
    ShardStatements,
    RowStatements,
    ReplayStatements,
    RetentionStatements,
    ScheduleStatements,
):
    """All statements of the relay on one pool of connections. See ``Database`` for the errors of every call."""
