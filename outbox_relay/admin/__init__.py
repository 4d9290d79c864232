"""The commands of operators, and their results as text."""

from __future__ import annotations

from outbox_relay.admin.actions import emit, pause, resume, unknown_sink
from outbox_relay.admin.attempts import attempts, running
from outbox_relay.admin.audit import audit
from outbox_relay.admin.connection import connect
from outbox_relay.admin.deliveries import (
    STATES,
    Filter,
    Matched,
    count_deliveries,
    export,
    list_deliveries,
    show_deliveries,
    summarize,
)
from outbox_relay.admin.delivery_actions import (
    Report,
    Result,
    discard_deliveries,
    missing,
    positions_behind,
    retry_deliveries,
    unknown_events,
)
from outbox_relay.admin.delivery_text import audit_text, deliveries_text, show_text, summary_text
from outbox_relay.admin.erase import Erased, erase
from outbox_relay.admin.render import not_answered_lines, status_text
from outbox_relay.admin.render_attempts import attempts_text, running_text
from outbox_relay.admin.render_retention import outcome_text, preview_text, retention_text
from outbox_relay.admin.render_why import why_key_text, why_text
from outbox_relay.admin.retention import preview_retention, retention_status, run_retention
from outbox_relay.admin.status import status, too_old
from outbox_relay.admin.why import why, why_key

__all__ = [
    "STATES",
    "Erased",
    "Filter",
    "Matched",
    "Report",
    "Result",
    "attempts",
    "attempts_text",
    "audit",
    "audit_text",
    "connect",
    "count_deliveries",
    "deliveries_text",
    "discard_deliveries",
    "emit",
    "erase",
    "export",
    "list_deliveries",
    "missing",
    "not_answered_lines",
    "outcome_text",
    "pause",
    "positions_behind",
    "preview_retention",
    "preview_text",
    "resume",
    "retention_status",
    "retention_text",
    "retry_deliveries",
    "run_retention",
    "running",
    "running_text",
    "show_deliveries",
    "show_text",
    "status",
    "status_text",
    "summarize",
    "summary_text",
    "too_old",
    "unknown_events",
    "unknown_sink",
    "why",
    "why_key",
    "why_key_text",
    "why_text",
]
