"""The command line."""

from __future__ import annotations

from outbox_relay.cli.entry import main

__all__ = ["main"]
