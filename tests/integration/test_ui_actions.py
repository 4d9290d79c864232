"""Actions on the page: what each says first, what it does, who may do it, and its row of the audit."""

from __future__ import annotations

import threading
from html import escape
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay import admin
from outbox_relay.ui import jobs
from outbox_relay.ui.users import User
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import ADDRESS, Browser, browsing, form_fields, visible
from tests.support.wait import until

books = owned.books

ASKED = ("/actions/pause?sink=s", "/actions/resume?sink=s", "/actions/probe?sink=s", "/actions/seek?sink=s&to=now",
         "/actions/retry?state=dead", "/actions/discard?state=dead", "/actions/replay?sink=s&since=1d")  # fmt: skip


def newest_audit(books: Ledger) -> dict[str, Any]:
    """Return the newest action."""
    return (admin.audit(books.store, None, 1))[0]


def dead_letters(books: Ledger, *keys: str) -> list[str]:
    """Make dead letters, and return their uids."""
    events = books.emit(*keys)
    books.park("s", *(books.row(event, "dead", error="gone", status=410) for event in events))
    books.catch_up("s")
    return [books.uid(event) for event in events]


def states(books: Ledger) -> list[str]:
    return [state for (state,) in books.query("select state from outbox.delivery order by id")]


def test_a_sink_is_paused_and_resumed(books: Ledger) -> None:
    with browsing(books.database) as page:
        assert "Every relay stops delivering" in page.get("/actions/pause?sink=s")
        assert "sink s is paused" in page.act("/actions/pause?sink=s", reason="maintenance")
        audit = newest_audit(books)
        assert (audit["action"], audit["actor"], audit["reason"]) == ("pause", "anna@page", "maintenance")
        assert "maintenance" in visible(page.get("/sinks/s"))
        assert "was paused already" in page.act("/actions/pause?sink=s")
        assert "sink s is resumed" in page.act("/actions/resume?sink=s")
        assert books.query("select paused from outbox.sink") == [(False,)]


def test_a_probe_is_asked_for_while_the_circuit_is_open(books: Ledger) -> None:
    path = "/actions/probe?sink=s"
    with browsing(books.database) as page:
        assert "/actions/probe" not in page.get("/sinks/s")
        asked = page.get(path)
        assert "The circuit of sink s is closed: there is nothing to probe." in asked
        assert '<form class="confirm"' not in asked
        books.do("update outbox.sink set circuit = 'open', last_error = 'refused', last_error_at = now()")
        assert escape(path) in (page.get("/sinks/s")).partition('<div id="live"')[2]
        assert "send its next event within two seconds" in page.act(path, reason="it is back")
        audit = newest_audit(books)
        assert (audit["action"], audit["sink"], audit["reason"]) == ("sinks probe", "s", "it is back")
        form = form_fields(page.get(path))
        books.do("update outbox.sink set paused = true")
        assert "/actions/probe" not in page.get("/sinks/s")
        said = page.get((page.post("/actions/probe", form)).headers["location"])
        assert "sink s is paused: nothing is sent to it until it is resumed" in said
        page.get("/actions/probe?sink=t", 404)
    assert books.query("select probes from outbox.sink") == [(1,)]


def test_one_dead_letter_is_retried(books: Ledger) -> None:
    uid, _ = dead_letters(books, "k", "other")
    with browsing(books.database) as page:
        asked = page.get(f"/actions/retry?uid={uid}&sink=s&state=dead")
        assert "1 dead delivery matches" in asked
        assert states(books) == ["dead", "dead"], "only asked"
        assert "1 retried" in page.act(f"/actions/retry?uid={uid}&sink=s&state=dead")
        assert states(books) == ["waiting", "dead"]
        audit = newest_audit(books)
        assert (audit["action"], audit["count"], audit["actor"]) == ("dead retry", 1, "anna@page")


def test_all_that_match_a_filter_are_retried(books: Ledger) -> None:
    dead_letters(books, *"abcde")
    with browsing(books.database) as page:
        assert "5 dead deliveries match" in page.get("/actions/retry?status=410&state=dead")
        assert "5 retried" in page.act("/actions/retry?status=410&state=dead")
        assert states(books) == ["waiting"] * 5
        nothing = page.get("/actions/retry?status=500&state=dead")
        assert "0 dead deliveries match" in nothing
        assert '<form class="confirm"' not in nothing, "there is nothing to do"


def test_a_discard_needs_a_reason(books: Ledger) -> None:
    [uid] = dead_letters(books, "k")
    path = f"/actions/discard?uid={uid}&sink=s&state=dead"
    with browsing(books.database) as page:
        assert " required" in (page.get(path)).partition('name="reason"')[2].partition(">")[0]
        assert "needs a reason" in page.act(path)
        assert states(books) == ["dead"]
        assert "1 discarded" in page.act(path, reason="of no use")
        assert states(books) == []
        assert "of no use" in visible(page.get(f"/events/{uid}"))


def test_a_seek_says_what_comes_again(books: Ledger) -> None:
    books.emit("a", "b")
    books.catch_up("s")
    with browsing(books.database) as page:
        assert '<form class="confirm"' not in page.get("/actions/seek?sink=s")
        asked = page.get("/actions/seek?sink=s&to=beginning")
        assert "2 events will be delivered again" in visible(asked)
        assert "was moved to beginning" in page.act("/actions/seek?sink=s&to=beginning")
        assert (newest_audit(books))["action"] == "sinks seek"
        page.get("/actions/seek?sink=s&to=yesterday", 400)


def test_a_replay_is_started_paused_resumed_and_cancelled(books: Ledger) -> None:
    [event] = books.emit("a")
    books.catch_up("s")
    with browsing(books.database) as page:
        asked = visible(page.get("/actions/replay?sink=s&since=1d"))
        assert "1 events that sink s has passed will be delivered to s again" in asked
        assert "replay 1 has started" in page.act("/actions/replay?sink=s&since=1d", reason="lost by the consumer")
        assert "lost by the consumer" in visible(page.get("/replays"))
        for action, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            assert f"replay 1 is {state}" in page.act(f"/actions/replay-{action}?id=1")
        assert "was cancelled already" in page.act("/actions/replay-cancel?id=1")
        assert f"uid={books.uid(event)}" in page.get(f"/events/{books.uid(event)}")
        path = f"/actions/replay?sink=s&uid={books.uid(event)}"
        assert "replay 2 has started" in page.act(path)
        assert "1 events" in visible(page.get("/replays")), "a replay of named events"
        assert "There is no event" in page.get(f"/actions/replay?sink=s&uid={uuid4()}")


# -- who may act ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"user": User("bob", "viewer")}, {"read_only": True}], ids=["viewer", "read-only"])
def test_viewers_and_read_only_pages_can_neither_ask_nor_act(books: Ledger, options: dict[str, Any]) -> None:
    dead_letters(books, "k")
    books.do("update outbox.sink set circuit = 'open'")
    with browsing(books.database) as operator:
        forms = {path: form_fields(operator.get(path)) for path in ASKED if "replay" not in path}
    with browsing(books.database, **options) as page:
        assert "/actions/" not in page.get("/exceptions")
        assert "/actions/" not in page.get("/sinks/s")
        for path in ASKED:
            page.get(path, 403)
        for path, fields in forms.items():
            answer = page.post(path.partition("?")[0], {**fields, "reason": "x"})
            assert answer.status_code == 403
    assert states(books) == ["dead"]
    assert admin.audit(books.store, None, 10) == []


def test_a_form_of_another_site_user_or_time_is_refused(books: Ledger) -> None:
    with browsing(books.database) as page:
        fields = form_fields(page.get("/actions/pause?sink=s"))
        wrong = ({**fields, "csrf": "0" * 64}, {"sink": "s"}, {**fields, "csrf": ""})
        for given in wrong:
            assert (page.post("/actions/pause", given)).status_code == 403
        assert (page.post("/actions/pause", fields, **{"sec-fetch-site": "cross-site"})).status_code == 403
        page.client.cookies.clear()
        assert (page.post("/actions/pause", fields)).status_code == 403, "the cookie is another one"
        page.client.cookies.set("outbox_relay_csrf", "chosen")
        assert (page.post("/actions/pause", fields)).status_code == 403, "a chosen one is no better"
    with browsing(books.database, user=User("carl", "operator")) as other:
        assert (other.post("/actions/pause", fields)).status_code == 403
    assert books.query("select paused from outbox.sink") == [(False,)]


def test_the_cookie_is_for_this_site_alone(books: Ledger) -> None:
    with browsing(books.database) as page:
        cookie = (page.client.get("/")).headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "set-cookie" not in (page.client.get("/")).headers
        page.client.base_url = ADDRESS.replace("http:", "https:")
        page.client.cookies.clear()
        assert "Secure" in (page.client.get("/")).headers["set-cookie"]


# -- actions that take long -------------------------------------------------------------------------------------------


class Work:
    """A job that ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self, report: jobs.Report) -> str:
        """Report some progress, and wait."""
        while not self.may_end.wait(0.01):
            report(7)
        return "all of it"


def started(page: Browser, work: jobs.Work) -> jobs.Job:
    job = jobs.Job("Retry everything", "anna", "/exceptions")
    page.site.jobs.start(job, work)
    return job


def test_jobs_are_shown_bounded_interrupted_and_one_that_fails_says_so(
    books: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_report: jobs.Report) -> str:
        raise ZeroDivisionError("SECRET")

    with browsing(books.database) as page:
        work = Work()
        made = [started(page, work) for _ in range(jobs.RUNNING_MOST)]
        until(lambda: made[0].done, seconds=20, what="the job reports")
        assert "running 7 so far" in visible(page.get(f"/jobs/{made[0].id}"))
        answer = page.post("/actions/pause", form_fields(page.get("/actions/pause?sink=s")))
        assert (answer.status_code, "running already" in answer.text) == (429, True)
        work.may_end.set()
        assert all(job.ended.wait(10) for job in made)
        assert "done all of it" in visible(page.get(f"/jobs/{made[0].id}"))
        failed = started(page, fail)
        assert failed.ended.wait(10)
        html = page.get(f"/jobs/{failed.id}")
        assert ("it failed" in html, "SECRET" in html) == (True, False)
        monkeypatch.setattr(jobs, "KEPT_MOST", 2)
        interrupted = started(page, Work())
        page.site.jobs.close()
        assert interrupted.ended.wait(20)
        assert (interrupted.state, "interrupted" in (interrupted.result or "")) == ("failed", True)
        page.get(f"/jobs/{made[0].id}", 404)
