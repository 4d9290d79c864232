"""The commands status, why, pause, resume and emit, and their results as text."""

from __future__ import annotations

from outbox_relay.admin.actions import emit, pause, resume
from outbox_relay.admin.connection import connect
from outbox_relay.admin.render import status_text, why_text
from outbox_relay.admin.status import status, too_old
from outbox_relay.admin.why import why

__all__ = ["connect", "emit", "pause", "resume", "status", "status_text", "too_old", "why", "why_text"]
