"""The relay's only access to the database: one method per statement file in ``sql/``, grouped by table."""

from __future__ import annotations

from outbox_relay.postgres.delivery_statements import DeliveryStatements
from outbox_relay.postgres.figure_statements import FigureStatements
from outbox_relay.postgres.log_statements import LogStatements
from outbox_relay.postgres.queue_statements import QueueStatements
from outbox_relay.postgres.replay_statements import ReplayStatements
from outbox_relay.postgres.retention_statements import RetentionStatements
from outbox_relay.postgres.schedule_statements import ScheduleStatements
from outbox_relay.postgres.shard_statements import ShardStatements
from outbox_relay.postgres.sink_statements import SinkStatements


class Store(
    LogStatements,
    SinkStatements,
    ShardStatements,
    DeliveryStatements,
    QueueStatements,
    ReplayStatements,
    RetentionStatements,
    FigureStatements,
    ScheduleStatements,
):
    """All statements of the relay on one pool of connections. See ``Database`` for the errors of every call."""
