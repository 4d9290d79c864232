"""The command ``doctor``: what is wrong with sinks, relays, log and server, and what to do about it."""

from __future__ import annotations

from outbox_relay.admin.doctor.examination import doctor
from outbox_relay.admin.doctor.finding import Finding
from outbox_relay.admin.doctor.render import findings_text

__all__ = ["Finding", "doctor", "findings_text"]
