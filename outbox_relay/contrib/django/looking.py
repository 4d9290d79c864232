"""Bounded reads for the admin: the newest events, the deliveries in a state, and the payload of one event.

No statement counts the log or a table of deliveries, or reads more than a fixed number of their rows.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from django.core.paginator import Paginator
from django.db import connections, transaction

import outbox_relay.postgres
from outbox_relay.contrib.django.models import APART

NEWEST_IDS: Final = 10_000
"""Number of ids, from the newest back, among which the list of events searches."""
LOOKS: Final = 10_000
"""Number of rows of a sink at which the list of deliveries looks."""
MOST_LISTED: Final = 1000
"""Maximum number of rows of a list, on all of its pages."""
SHOWN_BYTES: Final = 64 << 10
"""Maximum number of bytes of a payload that are shown."""
SECONDS: Final = 10
"""Time limit of a statement."""
MAX_ID: Final = (1 << 63) - 1
_NEWEST: Final = "select e.id from outbox.event e order by e.id desc limit 1"
_SINKS: Final = "select k.name from outbox.sink k where k.name < '~' collate \"C\" order by k.name"
_PAYLOAD: Final = """
select substring(e.payload for %s), octet_length(e.payload), e.headers::text
  from outbox.event e where e.id = %s
"""
_MAY_READ: Final = """
select has_column_privilege('outbox.event', 'payload', 'select')
       and has_column_privilege('outbox.event', 'headers', 'select')
"""
_LIMITS: Final = """
select set_config(name, value, true)
  from (values ('statement_timeout', %s), ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'),
               ('enable_sort', 'off'), ('jit', 'off'), ('random_page_cost', '1')) s (name, value)
"""
"""Settings of a transaction whose statements walk indexes, as those of the page do."""
_SET_TIMEOUT: Final = "select set_config('statement_timeout', %s, true)"


if TYPE_CHECKING:
    AnyPaginator: TypeAlias = Paginator[Any]
else:
    AnyPaginator = Paginator


class ShortPaginator(AnyPaginator):
    """A paginator of at most ``MOST_LISTED`` rows, which are counted as such."""

    def __init__(self, object_list: Any, *args: Any, **options: Any) -> None:
        super().__init__(object_list[:MOST_LISTED], *args, **options)


class Content(NamedTuple):
    """The payload of an event as text, or the reason why it is not shown, and its headers as JSON."""

    payload: str
    headers: str = ""


@contextmanager
def limited(alias: str) -> Generator[Any]:
    """Open a cursor whose statements walk indexes and take ``SECONDS`` at most. All of it is rolled back at the end."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(_LIMITS, [f"{SECONDS}s"])
        yield cursor
        transaction.set_rollback(True, using=alias)  # an outer block gets its settings back


@contextmanager
def timed(alias: str) -> Generator[None]:
    """Limit each statement of Django's own queries to ``SECONDS``. An error leaves an outer block usable."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute("select current_setting('statement_timeout')")
        before = cursor.fetchone()
        cursor.execute(_SET_TIMEOUT, [f"{SECONDS}s"])
        yield
        cursor.execute(_SET_TIMEOUT, before)


def newest_id(alias: str) -> int:
    """Return the id of the newest event, or 0."""
    with limited(alias) as cursor:
        cursor.execute(_NEWEST)
        found = cursor.fetchone()
    return found[0] if found else 0


def sink_names(alias: str) -> list[str]:
    """Return the names of the sinks."""
    with limited(alias) as cursor:
        cursor.execute(_SINKS)
        return [name for (name,) in cursor.fetchall()]


def places(alias: str, state: str, sink: str | None) -> list[str]:
    """Return the places of up to ``MOST_LISTED`` deliveries in ``state``, newest event first, as the page does."""
    wanted = {"states": [state], **({} if sink is None else {"sink": sink})}
    before = {"before_id": MAX_ID, "before_sink": "", "looks": LOOKS, "most": MOST_LISTED}
    with limited(alias) as cursor:
        cursor.execute(_search(), {"filter": json.dumps(wanted), **before})
        columns = [column[0] for column in cursor.description]
        number, name = columns.index("id"), columns.index("sink")
        return [f"{row[number]}{APART}{row[name]}" for row in cursor.fetchall() if row[number] is not None]


def content_of(alias: str, event_id: int) -> Content:
    """Return payload and headers of an event, or a sentence if the role may not read them."""
    with limited(alias) as cursor:
        cursor.execute(_MAY_READ)
        if cursor.fetchone() != (True,):
            return Content("The database role may not read payloads: outbox-relay migrate --grant-payloads ROLE.")
        cursor.execute(_PAYLOAD, [SHOWN_BYTES, event_id])
        found = cursor.fetchone()
    if found is None or found[0] is None:
        return Content("The event has no payload.")
    shown, size, headers = bytes(found[0]), found[1], found[2] or ""
    try:
        text = shown.decode(errors="strict" if size <= SHOWN_BYTES else "ignore")
    except UnicodeDecodeError:
        return Content(f"{size:,} bytes that are not UTF-8.", headers)
    return Content(text if size <= SHOWN_BYTES else f"{text}\n… of {size:,} bytes", headers)


@cache
def _search() -> str:
    return (Path(outbox_relay.postgres.__file__).parent / "sql" / "search_deliveries.sql").read_text(encoding="utf-8")
