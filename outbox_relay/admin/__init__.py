"""The commands status, why, pause, resume and emit, and the text of their answers."""

from __future__ import annotations

from outbox_relay.admin.asking import opened
from outbox_relay.admin.status import status, too_old
from outbox_relay.admin.switches import emit, pause, resume
from outbox_relay.admin.text import status_text, why_text
from outbox_relay.admin.why import why

__all__ = ["emit", "opened", "pause", "resume", "status", "status_text", "too_old", "why", "why_text"]
