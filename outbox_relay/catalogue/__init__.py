"""Declaring the events of an application as classes: ``@event("order.created")``.

A declared class is a dataclass, a pydantic model or a msgspec Struct. ``outbox.emit(conn, OrderCreated(…))`` takes the
type, the key and the payload from it. docs/catalogue.md shows every use. Importing this module imports neither psycopg,
pydantic nor msgspec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox_relay.catalogue.declaration import event
from outbox_relay.emit_rows import InvalidEvent

if TYPE_CHECKING:
    from outbox_relay.outbox import aemit, aemit_many, emit, emit_many

__all__ = ["InvalidEvent", "aemit", "aemit_many", "emit", "emit_many", "event"]


def __getattr__(name: str) -> Any:
    """Return a function of ``outbox``, which imports psycopg, when it is first asked for."""
    if name in ("aemit", "aemit_many", "emit", "emit_many"):
        return getattr(import_module("outbox_relay.outbox"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
