"""Take pictures of every page, with sinks in trouble: light and dark, wide and narrow.

usage: python -m tests.browser.pictures DIRECTORY [--docs]

Fills a database of its own, serves the page, and writes a PNG for each page, color scheme and width. With `--docs`,
only those that the documentation shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from playwright.sync_api import Browser

from outbox_relay.postgres.migrations import migrate
from outbox_relay.service.figures import Entry, Value, dump
from outbox_relay.ui.users import User
from tests.support.browser import chromium
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger
from tests.support.page import served
from tests.support.postgres import PostgresServer
from tests.support.replays import start
from tests.support.schedules import register, schedule

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 780}
SHOWN = {"overview-light-wide", "exceptions-light-wide", "event-light-wide", "sink-dark-wide"}
"""The pictures that the documentation shows."""
HISTORY = """
insert into outbox.history (sink, at, delivered, failed, dead, backlog, oldest_seconds, end_to_end_p50, end_to_end_p99,
                            claim_p99, tick_p99, settle_p99, busy_ms)
select s.name, m, case when s.name = 'crm' and m > now() - interval '9 minutes' then 0
                       else (2400 + 900 * sin(extract(epoch from m) / 900) + 300 * random())::bigint end,
       case when s.name = 'crm' and m > now() - interval '9 minutes' then 40 else (3 * random())::bigint end, 0,
       (60 * random())::bigint, random(), 0.004 + 0.003 * random(), 0.012 + 0.01 * random(), 0.003 + 0.004 * random(),
       0.002 + 0.001 * random(), 0.004 + 0.002 * random(), 900 + 300 * random()
  from (values ('events'), ('crm'), ('invoices'), ('')) s (name),
       generate_series(date_trunc('minute', now()) - interval '2 hours', now(), interval '1 minute') m"""
ATTEMPTS = """
insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, milliseconds, error)
select now() - (6 - n) * interval '40 seconds', d.uid, d.sink, d.id, n, 'relay-' || 1 + n %% 2, 'failed', 500, 31.5 + n,
       'answered 500 Internal Server Error'
  from outbox.delivery d, generate_series(1, 5) n where d.state = 'dead'"""


SETTINGS = {"sinks.crm.type": "webhook", "sinks.crm.url": "https://crm.example.com/events"}
ALIVE = "update outbox.relay set seen_at = now() + interval '1 hour', config = %s::jsonb"
FIGURES = "update outbox.figures set at = now(), figures = %s::jsonb"


def _figures() -> Iterator[Entry]:
    """Yield the figures that a relay would have measured."""
    now = time.time()
    counts = {"events": (12, 0.02, 0, 0, 0), "crm": (1_841, 541.0, 212, 0, 0), "invoices": (5, 240.0, 0, 5, 9)}
    for sink, (backlog, oldest, *states) in counts.items():
        measured = (
            Value("outbox_backlog_events", (sink,), backlog),
            Value("outbox_oldest_undelivered_seconds", (sink,), oldest),
        )
        yield Entry("backlog", sink, now, False, measured)
        rows = zip(("waiting", "held", "dead"), states, strict=True)
        found = (Value("outbox_exceptions", (sink, state), count) for state, count in rows)
        yield Entry("exceptions", sink, now, False, tuple(found))
    yield Entry("log", None, now, False, (Value("outbox_log_bytes", (), 8.4e9),))


def fill(database: Database) -> str:
    """Fill a new database with sinks in trouble, and return the uid of a dead letter."""
    with ledger(database) as books:
        routes = {"events": "order.*", "crm": "order.*", "invoices": "invoice.*"}
        books.register(*((sink, [types], "beginning") for sink, types in routes.items()))
        books.live("relay-1", "events", "crm", "invoices", version="0.1.0")
        for sink in ("events", "crm", "invoices"):
            books.own(sink, lease_seconds=3600.0)
        uid = _dead_letters(books)
        register(
            database,
            schedule("nightly-report", cron="30 3 * * *", timezone="Europe/Berlin"),
            schedule("dunning", cron="0 9 * * 1-5", missed="all", type="invoice.dunning"),
            schedule("stocktaking", cron="0 0 1 1 *"),
        )
        for sink in ("events", "invoices"):
            books.catch_up(sink)
        for statement in (HISTORY, ATTEMPTS):
            books.do(statement)
        books.do("update outbox.schedule set paused = true where name = 'stocktaking'")
        books.do(
            "update outbox.schedule set after_at = '2020-01-01Z', next_at = now() - interval '25 minutes', "
            "error_at = now(), error = 'type invoice.dunning is not in the catalogue' where name = 'dunning'"
        )
        books.do(ALIVE, json.dumps(SETTINGS))
        start(database, "events", since="2000-01-01T00:00:00Z", type="order.*")
        books.do("update outbox.replay set counted = 5400, reason = 'lost by the consumer'")
        books.do(FIGURES, json.dumps(dump(_figures())))
        books.do(
            "update outbox.sink set circuit = 'open', circuit_since = now() - interval '9 minutes', "
            "last_error = 'connection refused: crm.example.com:443', last_error_at = now() where name = 'crm'"
        )
        books.do("select outbox.set_paused('events', true, 'anna@bastion-1', 'topic is being moved')")
        books.do("select outbox.set_paused('events', false, 'anna@bastion-1', 'topic was moved')")
    return uid


def _dead_letters(books: Ledger) -> str:
    keys = [f"customer-{n % 5}" for n in range(14)]
    events = books.emit(*keys, type="invoice.created")
    rows = [
        books.row(event, "dead", attempts=5, error="answered 500 Internal Server Error", status=500)
        if n < 9
        else books.row(event, "held")
        for n, event in enumerate(events)
    ]
    books.park("invoices", *rows)
    return books.uid(events[0])


def pages(uid: str, key: str) -> dict[str, str]:
    """Return the path of every page by its name. ``key`` is that of a key."""
    return {
        "overview": "/", "sink": "/sinks/crm", "exceptions": "/exceptions", "groups": "/exceptions?view=groups",
        "event": f"/events/{uid}", "replays": "/replays", "schedules": "/schedules", "relays": "/relays",
        "database": "/database", "audit": "/audit", "key": key, "retry": "/actions/retry?state=dead&sink=invoices",
        "discard": f"/actions/discard?state=dead&sink=invoices&uid={uid}",
        "seek": "/actions/seek?sink=crm&to=beginning", "replay": "/actions/replay?sink=events&since=1d",
        "refused": "/exceptions?since=yesterday", "absent": "/sinks/cmr",
    }  # fmt: skip


def take(browser: Browser, address: str, uid: str, directory: Path, *, docs: bool) -> None:
    """Take the pictures."""
    for scheme in ("light", "dark"):
        for width, size in (("wide", WIDE), ("narrow", NARROW)):
            context = browser.new_context(viewport=cast(Any, size), color_scheme=scheme, timezone_id="UTC")
            page = context.new_page()
            page.goto(address)
            page.get_by_text("Examined").wait_for(timeout=60_000)  # the findings come with a refresh
            page.goto(f"{address}/events/{uid}")
            key = str(page.get_by_role("link", name="customer-0").get_attribute("href"))
            for name, path in pages(uid, key).items():
                if docs and f"{name}-{scheme}-{width}" not in SHOWN:
                    continue
                page.goto(address + path)
                page.screenshot(path=directory / f"{name}-{scheme}-{width}.png", full_page=not docs)
            context.close()


def run(directory: Path, *, docs: bool) -> None:
    """Fill, serve and take the pictures."""
    with PostgresServer() as server:
        server.create_database("pictures")
        database = Database(server, "pictures")
        migrate(database.dsn)
        uid = fill(database)
        with served(database, User("anna", "operator")) as address, chromium() as browser:
            take(browser, address, uid, directory, docs=docs)


def main() -> int:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(description="Take pictures of every page.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    run(arguments.directory, docs=arguments.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
