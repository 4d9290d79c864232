"""The page: sinks, exceptions, events, keys, replays, relays and the log in a browser, and what mends them.

``create_app`` returns it as an ASGI application. It needs the extra ``ui``.
"""

from __future__ import annotations

from outbox_relay.ui.app import create_app
from outbox_relay.ui.users import User

__all__ = ["User", "create_app"]
