"""The pages: what each shows, what it hides, and that nothing an event carries becomes markup."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from html import escape
from pathlib import Path
from uuid import uuid4

import pytest

from outbox_relay.admin import deliveries
from outbox_relay.ui import delivery_views
from outbox_relay.ui.site import CONNECTIONS
from outbox_relay.ui.users import User
from tests.support import books as owned
from tests.support.database import Database
from tests.support.ledger import Ledger
from tests.support.page import browsing, visible

books = owned.books

STATIC = Path(delivery_views.__file__).parent / "static"
PAGES = ("/", "/sinks/s", "/sinks/s?period=48h", "/exceptions", "/exceptions?view=groups", "/replays", "/schedules",
         "/relays", "/database", "/audit")  # fmt: skip
VIEWER = User("bob", "viewer")


def dead_letter(books: Ledger, key: str | None = "k", **values: object) -> str:
    """Make a dead letter, and return its uid."""
    [event] = books.emit(key)
    books.park("s", books.row(event, "dead", attempts=3, **{"error": "gone", "status": 410, **values}))
    books.catch_up("s")
    return books.uid(event)


def test_every_page_answers_whole_and_as_a_live_part(books: Ledger) -> None:
    uid = dead_letter(books)
    with browsing(books.database) as page:
        for path in (*PAGES, f"/events/{uid}", page.key_path("k")):
            whole = page.get(path)
            assert whole.startswith("<!doctype html>")
            part = page.get(path, headers={"hx-request": "true"})
            assert "<html" not in part
            assert part.strip(), path
        assert page.json("/doctor")["error"] is None
        assert "Being examined" not in page.get("/")


def test_the_overview_says_whether_each_sink_flows_and_why_not(books: Ledger) -> None:
    with browsing(books.database) as page:
        assert "flowing" in visible(page.get("/"))
        books.do("update outbox.sink set circuit = 'open', last_error = 'connection refused', last_error_at = now()")
        assert "destination down connection refused" in visible(page.get("/"))
        books.do("update outbox.shard set owner = null, released_at = now() where shard < 3")
        assert "not served no relay owns 3 of its 64 shards" in visible(page.get("/"))
        books.do("update outbox.sink set paused = true, paused_reason = 'maintenance'")
        assert "paused maintenance" in visible(page.get("/"))
        assert "here" in visible(page.get("/relays"))


def test_a_dead_letter_is_found_and_explained(books: Ledger) -> None:
    uid = dead_letter(books)
    with browsing(books.database) as page:
        assert uid in page.get("/exceptions")
        for query in ("sink=s", "type=test.*", "error=GONE", "status=410", "since=1h", f"uid={uid}", "state=dead"):
            assert uid in page.get(f"/exceptions?{query}"), query
        for query in ("type=other", "error=other", "status=500", "until=1h", f"uid={uuid4()}", "state=held"):
            assert uid not in page.get(f"/exceptions?{query}"), query
        groups = page.get("/exceptions?view=groups")
        group = "/exceptions?sink=s&type=test.event&state=dead&status=410"
        assert f'href="{escape(group)}"' in groups, "a group leads to its deliveries, which can be retried together"
        assert uid in page.get(group)
        event = visible(page.get(f"/events/{uid}"))
        assert "dead" in event
        assert "last error: gone (status 410)" in event


def test_a_sink_shows_its_last_errors_whatever_its_state(books: Ledger) -> None:
    events = books.emit(*"abcd")
    rows = (("dead", "first"), ("dead", "second"), ("waiting", "third"), ("waiting", None))
    books.park("s", *(books.row(e, state, error=error) for e, (state, error) in zip(events, rows, strict=True)))
    books.do("update outbox.delivery set last_attempt_at = now() - id * interval '1 minute' where last_error <> ''")
    books.do("update outbox.sink set last_error = 'refused', last_error_at = now() - interval '1 day', paused = true")
    with browsing(books.database) as page:
        found = (page.json("/sinks/s"))["last_errors"]
        assert [each["error"] for each in found] == ["first", "second", "third", "refused"]
        assert [each["uid"] for each in found] == [*(books.uid(event) for event in events[:3]), None]
        books.do("update outbox.sink set last_error_mended_at = now()")
        html = page.get("/sinks/s")
        section = visible(html.partition('id="last-errors"')[2].partition("</section>")[0])
        places = [section.index(error) for error in ("first", "second", "third", "refused")]
        assert places == sorted(places)


REFUSED = (
    ("/sinks/t", 404, "there is no sink 't'"),
    ("/events/nonsense", 400, "should be a UUID"),
    ("/events/00000000-0000-7000-8000-000000000000", 404, "is known"),
    ("/exceptions?state=alive", 400, "state should be one of dead"),
    ("/exceptions?status=x", 400, "status should be a number"),
    ("/exceptions?since=2h&since=3h", 400, "since is given twice"),
    ("/exceptions?sink=t", 404, "there is no sink"),
    ("/exceptions?key=k", 400, "key means nothing here"),
    ("/actions/retry", 400, "name what to retry, such as state: dead"),
    ("/actions/seek?sink=s&until=1h", 400, "until means nothing here"),
    ("/exceptions?error=%00", 400, "characters that the database cannot store"),
    (f"/exceptions?type={'x' * 1025}", 400, "more than 1024 characters"),
    ("/exceptions?before=x-s", 400, "before should be a number"),
    (f"/exceptions?key_hash={'0' * 32}", 404, "search box"),
    ("/jobs/nonsense", 404, "does not know such an action"),
    ("/actions/explode", 404, "there is no such action"),
    ("/nowhere", 404, "there is no such page"),
    ("/sinks/s?period=1y", 400, "period should be one of"),
    ("/audit?since=x", 400, "since should be a time"),
)


def test_bad_input_is_a_sentence(books: Ledger) -> None:
    with browsing(books.database) as page:
        for path, status, said in REFUSED:
            assert said in visible(page.get(path, status)), path


def test_a_search_leads_to_the_event_the_sink_or_the_key(books: Ledger) -> None:
    uid = dead_letter(books, "customer@example.com")
    with browsing(books.database) as page:
        for text, place in ((uid, f"/events/{uid}"), ("s", "/sinks/s"), (f" {uid.upper()} ", f"/events/{uid}")):
            answer = page.post("/search", {"q": text})
            assert (answer.status_code, answer.headers["location"]) == (303, place)
        answer = page.post("/search", {"q": "customer@example.com"})
        assert answer.headers["location"] == page.key_path("customer@example.com")
        assert uid in page.get(answer.headers["location"])
        assert (page.post("/search", {"q": " "})).status_code == 400


def test_a_key_stands_in_no_address(books: Ledger) -> None:
    key = "customer@example.com"
    dead_letter(books, key)
    with browsing(books.database) as page:
        for path in ("/exceptions", "/exceptions?view=groups", page.key_path(key)):
            html = page.get(path)
            addresses = html.split('href="')[1:] + html.split('action="')[1:] + html.split('hx-get="')[1:]
            assert not any(key in each.partition('"')[0] for each in addresses)
        path = page.key_path(key)
        assert sha256(key.encode()).hexdigest()[:32] not in path, "a guess of the key can be checked"
    with browsing(books.database) as another:
        assert "enter the key in the search box" in visible(another.get(path, 404))


def test_a_search_in_steps_shows_every_row_once(books: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    books.register(("t", ["*"], "beginning"))
    books.own("t")
    events = books.emit(*"abcde")
    for sink in ("s", "t"):
        books.park(sink, *(books.row(event, "waiting", due_in=60.0) for event in events))
        books.do("update outbox.delivery set state = 'dead' where id = %s and sink = %s", events[0], sink)
    for looks in (2, 3, 4):
        monkeypatch.setattr(deliveries, "LOOKS", looks)
        monkeypatch.setattr(deliveries, "FEWEST_LOOKS", looks)
        for state, expected in (("waiting", 8), ("dead", 2), ("held", 0)):
            seen: list[tuple[str, str]] = []
            place: deliveries.Place | None = None
            for _ in range(20):
                found = deliveries.search_deliveries(books.store, {"states": [state]}, 2, place)
                seen += [(row["uid"], row["sink"]) for row in found.deliveries]
                if (place := found.after) is None:
                    break
            assert len(seen) == len(set(seen)) == expected, (looks, state)


def test_a_list_goes_on_with_older_deliveries(books: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_views, "PAGE_ROWS", 2)
    uids = [dead_letter(books, str(n)) for n in range(3)]
    with browsing(books.database) as page:
        newest = page.get("/exceptions?state=dead")
        assert [uid in newest for uid in uids] == [False, True, True]
        older = newest.partition("before=")[2].partition('"')[0]
        oldest = page.get(f"/exceptions?state=dead&before={older}")
        assert [uid in oldest for uid in uids] == [True, False, False]
        assert "Older" not in oldest


# -- hostile contents -------------------------------------------------------------------------------------------------


def test_payloads_and_answers_are_for_operators_who_may_see_them(books: Ledger) -> None:
    [event] = books.emit("k", payload=b'{"secret": "SECRET-P"}', headers='{"h": "SECRET-H"}')
    books.park("s", books.row(event, "dead", error="no"))
    uid = books.uid(event)
    books.do(
        "insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, detail) "
        """select now(), uid, 's', id, 1, 'here', 'failed', '{"answer": "SECRET-A"}' from outbox.delivery"""
    )
    paths = (*PAGES, f"/events/{uid}", f"/api/v1/events/{uid}", "/api/v1/exceptions")
    for options in ({}, {"show_payloads": True, "user": VIEWER}):
        with browsing(books.database, **options) as page:  # type: ignore[arg-type]
            for path in paths:
                assert "SECRET" not in page.get(path), path
            page.get("/exceptions/export", 403)
    with browsing(books.database, show_payloads=True) as page:
        html = page.get(f"/events/{uid}")
        assert "SECRET-P" in html
        assert "SECRET-H" in html
        assert json.loads(page.get("/exceptions/export"))["payload"] == '{"secret": "SECRET-P"}'


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_without_a_database_a_page_says_so_and_comes_back(books: Ledger) -> None:
    dsn = ["host=/nowhere"]
    with browsing(books.database) as page:
        page.site.dsn = lambda: dsn[0]
        assert "database" in visible(page.get("/", 503))
        assert (page.json("/sinks", 503))["error"]
        dsn[0] = books.database.dsn
        page.get("/")


def test_a_role_without_the_right_is_told_which_grant_it_needs(database: Database, books: Ledger) -> None:
    books.do("create role looker login")
    try:
        with browsing(database, dsn=database.dsn_as("looker")) as page:
            assert "--grant-read" in visible(page.get("/", 403))
    finally:
        books.do("drop role looker")


def test_requests_at_once_share_the_connections(books: Ledger) -> None:
    sessions = """select count(*) from pg_stat_activity
                   where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""
    [(before,)] = books.query(sessions)
    with browsing(books.database) as page, ThreadPoolExecutor(16) as threads:
        list(threads.map(page.get, PAGES * 3))
        [(count,)] = books.query(sessions)
        assert count - before <= CONNECTIONS + 1, "every store has one more for looks at the log"


def test_the_vendored_script_is_the_one_that_is_recorded() -> None:
    digest = sha256((STATIC / "htmx.min.js").read_bytes()).hexdigest()
    assert digest in (STATIC / "README.md").read_text(encoding="utf-8")


def test_scripts_and_styles_come_from_files_alone(books: Ledger) -> None:
    uid = dead_letter(books)
    with browsing(books.database) as page:
        for path in (*PAGES, f"/events/{uid}", "/actions/pause?sink=s"):
            html = page.get(path)
            assert "<style" not in html, path
            assert " style=" not in html, path
            assert " onclick=" not in html, path
            assert html.count("<script") == html.count('<script src="'), path
        page.get("/static/README.md", 404)
        for name, kind in (("page.css", "text/css"), ("page.js", "javascript"), ("htmx.min.js", "javascript")):
            assert kind in (page.client.get(f"/static/{name}")).headers["content-type"]
