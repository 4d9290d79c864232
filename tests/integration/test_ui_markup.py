"""Markup in every text that the database can hold stays text on every page, also in columns that come later."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from outbox_relay.ui import log_views
from outbox_relay.ui.users import User
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import Browser, browsing, form_fields
from tests.support.schedules import register, schedule
from tests.support.sink_actions import call

books = owned.books

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{7*191}}"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"
SHORT = "<img src=x onerror=a()>"
"""Markup for names that a session may have."""
TEXTS = """
select table_name, column_name, data_type from information_schema.columns
 where table_schema = 'outbox' and is_updatable = 'YES' and is_generated = 'NEVER'
   and (data_type = 'text' or udt_name = '_text')
   and table_name in (select relname from pg_class where relnamespace = 'outbox'::regnamespace and not relispartition)
 order by 1, 2"""
STRUCTURE = {
    ("meta", "key"), ("meta", "value"), ("shard", "sink"), ("sink", "name"),
    ("sink_route", "sink"), ("progress", "sink"), ("history", "sink"), ("replay", "sink"),
    ("replay", "target"), ("sink_route", "patterns"), ("sink", "patterns"), ("attempt", "sink"),
    ("discarded", "sink"),
}  # fmt: skip
"""Columns by which a page finds what it shows. Their values are names, which the schema checks."""
CARRIED = {
    ("event", "type"), ("event", "key"), ("event", "tenant"), ("delivery", "type"),
    ("delivery", "key"), ("delivery", "content_type"), ("delivery", "last_error"), ("sink", "last_error"),
    ("sink", "paused_reason"), ("attempt", "error"), ("attempt", "relay"), ("relay", "name"), ("relay", "version"),
    ("audit", "reason"), ("audit", "actor"), ("audit", "action"), ("schedule", "name"), ("schedule", "error"),
    ("schedule", "tenant"), ("replay", "key"), ("replay", "tenant"), ("replay", "type_pattern"), ("replay", "reason"),
    ("replay", "actor"), ("discarded", "reason"), ("day", "left_because"),
}  # fmt: skip
"""Columns that a page shows, which an application, a destination, a relay or a person fills."""
JSON = (
    ("update outbox.delivery set last_attempt = %s::jsonb, last_attempt_at = now()",
     {"code": MARKUP, "answer": MARKUP}),
    ("update outbox.event set headers = %s::jsonb", {MARKUP: MARKUP}),
    ("update outbox.delivery set headers = %s::jsonb", {MARKUP: MARKUP}),
    ("update outbox.attempt set detail = %s::jsonb", {MARKUP: MARKUP}),
    ("update outbox.relay set config = %s::jsonb", {"sinks.s.url": MARKUP, f"sinks.s.{MARKUP}": [MARKUP]}),
    ("update outbox.audit set filter = %s::jsonb", {MARKUP: MARKUP}),
    ("update outbox.day set kept_by = %s::jsonb", [{"kind": MARKUP, "name": MARKUP, "since": MARKUP}]),
)  # fmt: skip


def everything(books: Ledger) -> list[str]:
    """Fill the database with a row of whatever a page shows, and return the uids of its events."""
    events = books.emit(*"abcd", None, payload=MARKUP.encode())
    dead, waiting, held, gone, passed = events
    rows = [books.row(dead, "dead", error="no", status=500), books.row(waiting, "waiting", due_in=60.0)]
    books.park("s", *rows, books.row(held, "held"), books.row(gone, "dead", error="no"))
    books.catch_up("s")
    call(books.database, "select outbox.set_paused('s', true, 'anna', 'x')")
    books.do(
        "insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, error) "
        "select now(), uid, 's', id, 1, 'here', 'failed', 500, 'no' from outbox.delivery"
    )
    books.do("insert into outbox.day (day, left_because, left_at) values ('2020-01-01', 'x', now())")
    books.do("update outbox.sink set circuit = 'open', last_error = 'x', last_error_at = now()")
    register(books.database, schedule(key="x", tenant="x", error="x"))
    books.do("update outbox.schedule set error = 'x', error_at = now()")
    with browsing(books.database) as page:
        page.act(f"/actions/discard?uid={books.uid(gone)}&state=dead", reason="x")
        page.act("/actions/replay?sink=s&since=1d&type=test.*", reason="x")
    assert passed
    return [books.uid(event) for event in events]


def poison(books: Ledger) -> set[tuple[str, str]]:
    """Write markup into every text column that accepts it, and return those that did."""
    written: set[tuple[str, str]] = set()
    with books.database.connect(autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")  # what a trigger refuses, an older version wrote
        for table, column, kind in connection.execute(TEXTS).fetchall():
            if (table, column) in STRUCTURE:
                continue
            value: Any = [MARKUP] if kind == "ARRAY" else MARKUP
            change = sql.SQL("update outbox.{} set {} = %s").format(*map(sql.Identifier, (table, column)))
            try:
                count = connection.execute(change, (value,)).rowcount
            except Exception:  # a check, a foreign form or a unique index  # noqa: S112
                continue
            written |= {(table, column)} if count else set()
        for text, value in JSON:
            assert connection.execute(text.encode(), (json.dumps(value),)).rowcount, text
    return written


def shown(page: Browser, uids: list[str]) -> dict[str, str]:
    """Return every page by its path."""
    paths = ["/", "/sinks/s", "/replays", "/schedules", "/relays", "/database", "/audit", page.key_path(MARKUP)]
    paths += [f"/exceptions?state={state}" for state in ("dead", "waiting", "held")]
    paths += ["/exceptions?view=groups", "/actions/discard?state=dead", "/actions/replay?sink=s&since=1d"]
    paths += ["/actions/replay-cancel?id=1", "/actions/resume?sink=s", *(f"/events/{uid}" for uid in uids)]
    page.json("/doctor")
    return {path: page.get(path) for path in paths}


def test_markup_in_every_text_of_the_schema_stays_text(books: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_views, "TRANSACTION_SECONDS", 0.0)
    uids = everything(books)
    written = poison(books)
    findings: list[dict[str, Any]] = []
    user = User(MARKUP, "operator")
    with books.database.connect() as other:
        other.execute(f"set application_name = '{SHORT}'".encode())
        other.execute("create temporary table kept (n integer)")
        with browsing(books.database, show_payloads=True, user=user) as page:
            found = shown(page, uids)
            findings = page.json("/doctor")["findings"] or []
            job = form_fields(found["/actions/resume?sink=s"])
            page.post("/actions/resume", job)
            api = {path: (page.client.get(f"/api/v1{path}")).headers["content-type"] for path in found}
    for path, html in found.items():
        assert "<script>alert" not in html, path
        assert "<img" not in html, path
        assert ESCAPED in html.partition("<main")[2], f"{path} shows no markup, so nothing was tried on it"
        assert "1337" not in html, f"{path}: a template was made of a value"
    assert any(MARKUP in each["evidence"] for each in findings)
    assert set(api.values()) == {"application/json"}
    assert written >= CARRIED, f"not written, so not tried: {CARRIED - written}"
