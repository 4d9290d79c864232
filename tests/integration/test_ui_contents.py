"""The figures of the pages: the last hour, the days of the log and what keeps them, a sink's map, settings, exports."""

from __future__ import annotations

import json
import re

import pytest

from outbox_relay.postgres.migrations import migrate
from outbox_relay.ui import log_views
from outbox_relay.ui.openapi import document
from tests.support import books as owned
from tests.support.days import fill_days
from tests.support.ledger import Ledger
from tests.support.page import browsing, visible
from tests.support.roles import new_role
from tests.support.schema_answers import answer_schema, validate

books = owned.books

HOUR = """
insert into outbox.history (sink, at, delivered, failed, end_to_end_p50, end_to_end_p99, claim_p99, tick_p99,
                            settle_p99, busy_ms)
select s, date_trunc('minute', now()) - n * interval '1 minute', 1000 + n, 2, 0.007, 0.040 + n * 0.01, 0.003, 0.002,
       0.006, 1234
  from unnest('{s,""}'::text[]) s, unnest('{1,2,90}'::integer[]) n"""


def section(html: str, name: str) -> str:
    """Return the text of one section of a page."""
    return visible(html.partition(f'aria-labelledby="{name}">')[2].partition("</section>")[0])


def test_a_sink_has_a_map_of_its_shards_and_the_settings_in_force(books: Ledger) -> None:
    books.emit("k")
    books.catch_up("s")
    books.do("update outbox.relay set config = %s::jsonb", '{"sinks.s.max_rate": 7, "sinks.t.max_rate": 8}')
    books.do("update outbox.sink set in_flight_limit = 3")
    books.do("update outbox.shard set owner = null, released_at = now() where shard = 5")
    books.do("update outbox.shard set crashes = 2 where shard = 6")
    with browsing(books.database) as page:
        html = page.get("/sinks/s")
        assert section(html, "shards").startswith("Shards 0 here 1 here")
        assert html.count('title="shard ') == 64
        assert 'class="critical" title="shard 5: no owner, 0 ids behind"' in html
        assert '2 crashes"' in html.partition('title="shard 6: here, leased for ')[2].partition(">")[0]
        assert "at most 3 per relay, for now" in visible(html)
        assert "max_rate 7" in section(html, "settings")
        assert "8" not in section(html, "settings").partition("max_rate")[2]


def test_the_days_of_the_log_have_sizes_and_what_keeps_them(books: Ledger) -> None:
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 36, 35)
    keeper = {"kind": "sink", "name": "s", "paused": True, "shards": 64, "since": "2026-11-01T00:00:00+00:00"}
    books.do("insert into outbox.day (day, kept_by) values ((now() at time zone 'UTC')::date - 36, %s::jsonb)",
             json.dumps([keeper]))  # fmt: skip
    with browsing(books.database) as page:
        days = section(page.get("/database"), "days")
        [(day,)] = books.query("select day::text from outbox.day")
        assert re.search(
            rf"{day} [\d,]+ [\d.]+ KiB \u2013 kept by sink s \(paused\) with 64 shards since 2026-11-01", days
        )


def test_the_database_page_has_long_transactions_dead_rows_and_the_four_signals(
    books: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_views, "TRANSACTION_SECONDS", 0.0)
    books.do(HOUR)
    with books.database.connect() as other:
        other.execute("create temporary table kept (n integer)")
        with browsing(books.database) as page:
            html = page.get("/database")
        pid = other.info.backend_pid
    assert f"pid {pid}, role postgres, idle in transaction" in section(html, "transactions")
    signals = section(html, "signals")
    for text in ("Claims, p99, at most 3 ms", "Ticks, p99, at most 2 ms", "Settlements, p99, at most 6 ms",
                 "Database busy, ms a minute, at most 1,234"):  # fmt: skip
        assert text in signals
    assert "Dead rows" in section(html, "tables")


def test_one_delivery_or_all_that_match_are_exported(books: Ledger) -> None:
    first, second, third = books.emit("a", "b", "c", payload=b'{"n": 1}')
    rows = [books.row(first, "dead", error="no"), books.row(second, "dead", error="other"), books.row(third, "held")]
    books.park("s", *rows)
    exported = answer_schema(document(""), "/exceptions/export", media="application/jsonl")
    with browsing(books.database, show_payloads=True, read_only=True) as page:
        for event, state in ((first, "dead"), (third, "held")):
            html = page.get(f"/events/{books.uid(event)}")
            path = f"/exceptions/export?uid={books.uid(event)}&amp;sink=s&amp;state={state}"
            assert f'href="{path}"' in html
            line = json.loads(page.get(path.replace("&amp;", "&")))
            validate(exported, line)
            assert (line["uid"], line["payload"]) == (books.uid(event), '{"n": 1}')
        lines = (page.get("/api/v1/exceptions/export?error=o")).splitlines()
        assert {json.loads(line)["uid"] for line in lines} == {books.uid(first), books.uid(second)}
        page.get("/exceptions/export?sink=t", 404)
    with new_role(books.database, "read") as role:
        migrate(books.database.dsn, grants={"read": [role]})
        with browsing(books.database, show_payloads=True, dsn=books.database.dsn_as(role)) as page:
            for path in ("/exceptions/export", "/api/v1/exceptions/export"):
                assert "--grant-payloads" in page.get(path, 403), "said before the answer begins"
    with browsing(books.database) as page:
        refused = page.get("/api/v1/exceptions/export", 403)
        assert json.loads(refused)["error"].startswith("payloads are for operators")
        assert "/exceptions/export" not in page.get(f"/events/{books.uid(first)}")


def test_the_exceptions_of_a_key_are_filtered_grouped_exported_and_retried_by_its_hash(books: Ledger) -> None:
    key = "customer@example.com"
    mine, held, other = books.emit(key, key, "other")
    rows = [books.row(mine, "dead", error="no"), books.row(held, "held"), books.row(other, "dead", error="no")]
    books.park("s", *rows)
    books.catch_up("s")
    with browsing(books.database, show_payloads=True) as page:
        query = page.key_path(key).partition("?")[2].removesuffix("&state=all")
        for path in ("/exceptions?", "/exceptions?view=groups&"):
            html = page.get(f"{path}{query}")
            assert f"Only of the key {key}" in visible(html)
            addresses = html.split('href="')[1:] + html.split('action="')[1:] + html.split('hx-get="')[1:]
            assert not any("customer" in each.partition('"')[0] for each in addresses)
            assert f'type="hidden" name="{query.replace("=", chr(34) + " value=" + chr(34))}"' in html
        assert books.uid(other) not in page.get(f"/exceptions?{query}")
        for state, event in (("dead", mine), ("held", held)):
            assert [each["uid"] for each in (page.json(f"/exceptions?{query}&state={state}"))["deliveries"]] == [
                books.uid(event)
            ]
        assert [each["count"] for each in (page.json(f"/exceptions/summary?{query}"))["groups"]] == [1]
        assert json.loads(page.get(f"/exceptions/export?{query}"))["uid"] == books.uid(mine)
        asked = page.get(f"/actions/replay?sink=s&{query}")
        assert "customer" not in asked.partition('class="filters"')[2].partition("</form>")[0], "it leads to a URL"
        assert "1 retried" in page.act(f"/actions/retry?{query}&state=dead")
        page.get(f"/exceptions?key_hash={'0' * 32}", 404)
        page.get(f"/actions/retry?key_hash={'0' * 32}", 404)
        page.get(f"/actions/pause?sink=s&{query}", 400)
    assert books.query("select state from outbox.delivery order by id") == [("waiting",), ("held",), ("dead",)]
