"""Answers of the page: links, states of sinks and relays, ages, and what a role may not see."""

from __future__ import annotations

import json
import re
import time
from html import unescape

import pytest

from outbox_relay.postgres.migrations import migrate
from outbox_relay.service.figures import Entry, Value, dump
from outbox_relay.ui.findings import CachedFindings
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import Browser, browsing, visible
from tests.support.roles import new_role

books = owned.books

ISO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")


def said(html: str) -> str:
    """Return the text of a page without the spaces that tags before a comma or a period leave."""
    return re.sub(r" ([,.])", r"\1", visible(html))


def section(html: str, name: str) -> str:
    """Return the text of one section of a page."""
    return visible(html.partition(f'aria-labelledby="{name}">')[2].partition("</section>")[0])


def figures(books: Ledger, backlog: int, oldest: float, age: float = 1.0) -> None:
    """Store figures of the sink ``s`` as a relay measured them ``age`` seconds ago."""
    values = (
        Value("outbox_backlog_events", ("s",), backlog),
        Value("outbox_oldest_undelivered_seconds", ("s",), oldest),
    )
    entries = [Entry("backlog", "s", time.time() - age, False, values)]
    books.do("update outbox.figures set at = now(), figures = %s::jsonb", json.dumps(dump(entries)))


def state_of(page: Browser) -> dict[str, str]:
    """Return level, word and reason of the state of the sink ``s``."""
    [sink] = (page.json("/sinks"))["sinks"]
    assert sink["state"] == {**(page.json("/sinks/s"))["state"]}, "the pages agree"
    return sink["state"]


# -- what does not flow -----------------------------------------------------------------------------------------------

ERROR = "update outbox.sink set last_error = %s, last_error_at = now() - %s * interval '1 second'"
MINUTE = "insert into outbox.history (sink, at, delivered) values ('s', date_trunc('minute', now()), %s)"


def test_a_sink_that_delivers_nothing_is_not_said_to_flow(books: Ledger) -> None:
    books.do(ERROR, "answered 500", 3)
    figures(books, 12, 20.0)
    with browsing(books.database) as page:
        state = state_of(page)
        assert (state["level"], state["word"]) == ("warning", "not delivering")
        assert state["reason"] == "nothing is delivered: answered 500"
        figures(books, 12, 400.0)
        assert (state_of(page))["level"] == "critical", "events are late"
        books.do(MINUTE, 7)
        state = state_of(page)
        assert (state["word"], "last error: answered 500" in state["reason"]) == ("behind", True)
        figures(books, 12, 20.0)
        state = state_of(page)
        assert state["word"] == "with errors"
        assert state["reason"] == "answered 500; delivered in the last minutes: 7"


def test_an_error_is_over_once_nothing_is_left_to_deliver(books: Ledger) -> None:
    books.do(ERROR, "answered 410 Gone", 60)
    with browsing(books.database) as page:
        figures(books, 1, 61.0)
        assert (state_of(page))["word"] == "not delivering"
        figures(books, 0, 0.0)
        assert state_of(page) == {"level": "ok", "word": "flowing", "reason": ""}
        books.do(ERROR, "answered 410 Gone", 0)
        figures(books, 0, 0.0, age=5.0)
        assert (state_of(page))["word"] == "not delivering", "the backlog was measured before the error"
        books.do(ERROR, "client: no broker answers", 60)
        figures(books, 0, 0.0)
        assert "no broker answers" in (state_of(page))["reason"], "a client looks without an event too"


def test_a_relay_that_has_missed_heartbeats_is_marked(books: Ledger) -> None:
    with browsing(books.database) as page:
        assert "not seen" not in visible(page.get("/relays"))
        books.do("update outbox.session set lease_until = now() + interval '5 seconds'")
        books.do("update outbox.relay set seen_at = now() - interval '11 seconds'")
        for path in ("/", "/relays"):
            html = visible(page.get(path))
            assert re.search(r"1\d\.\d s ago not seen it hangs, has ended, or cannot reach the database", html), path
        books.do("update outbox.session set lease_until = now() + interval '40 seconds'")
        assert "not seen" not in visible(page.get("/relays")), "with such a lease, a heartbeat comes every 20 s"
        books.do("delete from outbox.session; update outbox.shard set owner = null")
        assert "not seen" not in visible(page.get("/relays")), "its lease is not known"
        books.do("update outbox.relay set seen_at = now() - interval '26 seconds'")
        [relay] = (page.json("/relays"))["relays"]
        assert (relay["stale"], relay["shards"]) == (True, {"s": 0})


# -- where one is -----------------------------------------------------------------------------------------------------


def test_every_page_names_its_database_and_its_environment(books: Ledger) -> None:
    port = books.database.server.port
    place = f":{port}/{books.database.name}"
    with browsing(books.database, label="staging") as page:
        paths = {"/": 200, "/exceptions": 200, "/relays": 200, "/database": 200, "/audit": 200, "/sinks/s": 200,
                 "/replays": 200, "/actions/pause?sink=s": 200, "/nowhere": 404, "/sinks/t": 404}  # fmt: skip
        for path, status in paths.items():
            html = page.get(path, status)
            assert re.search(rf"staging \S*{re.escape(place)} ", visible(html.partition("<header>")[2])), path
            assert f"{place}</title>" in html, "tabs differ"
    secret = f"postgresql://postgres:hunter2@127.0.0.1:{port}/{books.database.name}"
    with browsing(books.database, dsn=secret) as page:
        html = page.get("/nowhere", 404)
        assert f"127.0.0.1{place}" in visible(html)
        assert "hunter2" not in html
    with browsing(books.database, dsn="host=/nowhere dbname=shop") as page:
        assert "/nowhere:5432/shop" in visible(page.get("/", 503))


# -- exceptions -------------------------------------------------------------------------------------------------------


def park_one_of_each(books: Ledger) -> dict[str, str]:
    """Make a delivery in each state; return their uids."""
    dead, first, held = books.emit("a", "b", "b")
    books.park("s", books.row(dead, "dead", error="no"), books.row(first, due_in=3600.0), books.row(held, "held"))
    books.catch_up("s")
    uids = {state: books.uid(event) for state, event in (("dead", dead), ("waiting", first), ("held", held))}
    return {**uids, "scheduled": books.schedule("c", "2100-01-01T00:00:00Z")}


@pytest.mark.parametrize("action", ["Retry", "Discard"])
def test_an_action_on_all_that_match_does_what_the_list_shows(books: Ledger, action: str) -> None:
    uids = park_one_of_each(books)
    with browsing(books.database) as page:
        html = page.get("/exceptions?sink=&type=&state=dead")
        assert [uid for uid in uids.values() if uid in html] == [uids["dead"]]
        [link] = re.findall(rf'href="([^"]*)">{action} all that match', html)
        assert "1 dead delivery matches" in visible(page.get(unescape(link)))
        assert "1 retried" in (done := page.act(unescape(link), reason="why not")) or "1 discarded" in done
    states = dict(books.query("select uid::text, state from outbox.delivery"))
    assert states.get(uids["dead"]) == ("waiting" if action == "Retry" else None)
    assert (states[uids["waiting"]], states[uids["held"]]) == ("waiting", "held")


def test_a_list_shows_all_states_and_leads_to_the_actions_of_each(books: Ledger) -> None:
    uids = park_one_of_each(books)
    with browsing(books.database) as page:
        for path in ("/exceptions?state=all", "/exceptions?state=all&type=test.*&sink=s"):
            html = page.get(path)
            assert [uid for uid in uids.values() if uid in html] == list(uids.values()), path
            assert '<option value="all" selected>all states</option>' in html
            assert "all that match</a>" not in html, "no action is on several states"
            assert "choose one state: dead, waiting, held, scheduled" in said(html)
        groups = (page.json("/exceptions/summary?state=all"))["groups"]
        assert {group["state"] for group in groups} == set(uids)
        found = (page.json("/exceptions?state=all"))["deliveries"]
        assert {each["uid"] for each in found} == set(uids.values())
        for action in ("retry", "discard"):
            assert "state should be one of dead" in visible(page.get(f"/actions/{action}?state=all", 400))


def test_an_empty_list_says_what_is_in_other_states(books: Ledger) -> None:
    uids = park_one_of_each(books)
    books.do("delete from outbox.delivery where state = 'dead'")
    with browsing(books.database) as page:
        for path in ("/exceptions", "/exceptions?view=groups"):
            html = page.get(path)
            assert "No dead letter matches. In other states: 1 waiting, 1 held, 1 scheduled." in said(html)
            [link] = re.findall(r'href="([^"]*)">1 held', html)
            assert uids["held"] in page.get(unescape(link))
        assert "No dead letter matches. Events" in visible(page.get("/exceptions?type=other.*"))
        assert "In other states" not in page.get("/exceptions?before=0-s"), "that page is not the first"


# -- figures, charts and times ----------------------------------------------------------------------------------------


def test_times_have_one_form_with_a_zone_in_tables_and_texts(books: Ledger) -> None:
    uids = park_one_of_each(books)
    books.do("update outbox.sink set last_error = 'x', last_error_at = now()")
    keeper = {"kind": "sink", "name": "s", "paused": True, "shards": 64, "since": "2026-11-01T00:00:00+00:00"}
    books.do("insert into outbox.day (day, kept_by) values ('2026-10-30', %s::jsonb)", json.dumps([keeper]))
    with browsing(books.database) as page:
        link = f"/actions/discard?uid={uids['dead']}&sink=s&state=dead"
        assert "1 discarded" in page.act(link, reason="it is gone")
        event = visible(page.get(f"/events/{uids['dead']}"))
        assert re.search(rf"discarded at {TIME.pattern} by anna@page: it is gone", event)
        paths = ("/", "/sinks/s", "/exceptions?state=all", "/database", "/audit", f"/events/{uids['dead']}",
                 page.key_path("b"), "/actions/replay?sink=s&since=1h")  # fmt: skip
        for path in paths:
            text = visible(page.get(path))
            assert not ISO_TIME.search(text), path
            assert not re.search(r"\d\d:\d\d:\d\d(?! UTC)", text), f"{path}: a time without a zone"


# -- findings, and what a role cannot see -----------------------------------------------------------------------------


def test_old_findings_are_examined_again_before_they_are_shown(books: Ledger) -> None:
    with browsing(books.database) as page:
        ahead = [0.0]
        page.site.findings = CachedFindings(lambda: time.monotonic() + ahead[0])
        html = visible(page.get("/"))
        assert re.search(r"Findings examined [\d.]+ s ago", html), "even at the first look"
        books.do("select outbox.set_paused('s', true, 'anna', 'maintenance')")
        ahead[0] = 2820.0
        assert "sink s is paused" in section(page.get("/"), "findings")


def test_what_a_role_cannot_see_is_said_to_be_unknown(books: Ledger) -> None:
    with new_role(books.database, "page") as role:
        migrate(books.database.dsn, grants={"read": [role]})
        with books.database.connect() as other:
            other.execute("create temporary table kept (n integer)")
            with browsing(books.database, dsn=books.database.dsn_as(role)) as page:
                for path in ("/", "/database", "/relays", "/sinks/s", "/audit"):
                    assert "permission denied" not in page.get(path), path
                transactions = section(page.get("/database"), "transactions")
                assert "unknown: not visible to this role" in transactions
                assert "None" not in transactions
                page.json("/doctor")
                overview = section(page.get("/"), "findings")
                assert "permission denied" not in overview
                assert "not examined: foreign privileges: not visible to this role" in overview
    with browsing(books.database) as page:
        assert "None is older than five seconds" in section(page.get("/database"), "transactions")


# -- keys -------------------------------------------------------------------------------------------------------------
