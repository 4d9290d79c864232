"""Run as ``python -m outbox_relay.retention``: the process that writes an archive."""

from __future__ import annotations

from outbox_relay.retention.worker import main

main()
