"""The command ``doctor``: what is wrong with sinks, relays, log and server, and what to do about it."""

from __future__ import annotations

from outbox_relay.admin.doctor.examination import doctor
from outbox_relay.admin.doctor.finding import Finding

__all__ = ["Finding", "doctor"]
