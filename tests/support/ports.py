"""Free TCP ports, as the product chooses them for what it starts itself."""

from outbox_relay.workbench.embedded.ports import LOOPBACK, free_port, is_listening

__all__ = ["LOOPBACK", "free_port", "is_listening"]
