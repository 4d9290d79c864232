"""Transactional outbox relay for PostgreSQL.

Applications use :mod:`outbox_relay.outbox`, :mod:`outbox_relay.inbox`, ``contrib``, and in handlers of a sink with
``type = "python"`` the names below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_relay.delivery import Dead, Delivery, Retry

__all__ = ["Dead", "Delivery", "Retry", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a name of ``outbox_relay.delivery``, which is imported when it is first used."""
    if name in ("Dead", "Delivery", "Retry"):
        return getattr(import_module("outbox_relay.delivery"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
