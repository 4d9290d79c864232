"""Free TCP ports, as the product chooses them for what it starts itself."""

from outbox_relay.workbench.embedded.ports import LOOPBACK, answers, free_port

__all__ = ["LOOPBACK", "answers", "free_port"]
