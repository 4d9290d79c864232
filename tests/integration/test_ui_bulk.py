"""Actions on many deliveries from the page: one group of errors, and no more than the dry run has counted."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from outbox_relay import admin
from outbox_relay.ui.access import Tokens
from outbox_relay.ui.users import FileContent, read_tokens
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import Browser, browsing, form_fields, visible

books = owned.books

GROUPS = "/exceptions?view=groups"
LINK = re.compile(r'href="(/actions/(?:retry|discard)\?[^"]*)"')
TOKEN = "t" * 20
ERRORS: tuple[tuple[str | None, int | None], ...] = (
    ("timed out after 15 s", None),
    ("timed out after 20 s", None),
    ("timed out after a while", None),
    ("answered 503", 503),
    ("timed out after 7 s", 503),
    (None, None),
    ("", None),
)
"""Errors and statuses of dead letters. The first two are of one kind, those with a status of another, and the last two
of a third."""


def dead_letters(books: Ledger, *errors: tuple[str | None, int | None], type: str = "test.event") -> list[str]:  # noqa: A002 - emit's name
    """Make a dead letter for each error and status, and return their uids."""
    events = books.emit(*(f"k{n}" for n in range(len(errors))), type=type)
    rows = [books.row(event, "dead", error=e, status=s) for event, (e, s) in zip(events, errors, strict=True)]
    books.park("s", *rows)
    books.catch_up("s")
    return [books.uid(event) for event in events]


def uids_in(books: Ledger, state: str | None) -> list[str]:
    """Return the uids of the rows in a state, or of those that have gone."""
    if state is None:
        return [uid for (uid,) in books.query("select uid::text from outbox.discarded order by id")]
    return [uid for (uid,) in books.query("select uid::text from outbox.delivery where state = %s order by id", state)]


def group_links(page: Browser, action: str, path: str = GROUPS) -> dict[tuple[str, str | None, str | None], str]:
    """Return the paths of an action on groups, by type, status and kind of their errors."""
    links = [unescape(link) for link in LINK.findall((page.get(path)).partition('<div id="live"')[2])]
    found: dict[tuple[str, str | None, str | None], str] = {}
    for link in links:
        given = {name: values[0] for name, values in parse_qs(urlsplit(link).query, keep_blank_values=True).items()}
        if link.startswith(f"/actions/{action}?"):
            found[given["type"], given.get("status"), given.get("kind")] = link
    return found


KIND: dict[tuple[str | None, str | None], list[int]] = {
    (None, "timed out after N s"): [0, 1],
    (None, "timed out after a while"): [2],
    ("503", None): [3, 4],
    (None, ""): [5, 6],
}
"""The places of the dead letters of ``ERRORS`` in each group."""


@pytest.mark.parametrize(("action", "state"), [("retry", "waiting"), ("discard", None)])
@pytest.mark.parametrize("group", list(KIND)[::2], ids=["a kind", "a status"])
def test_an_action_on_a_group_changes_exactly_that_group(
    books: Ledger, action: str, state: str | None, group: tuple[str | None, str | None]
) -> None:
    uids = dead_letters(books, *ERRORS)
    dead_letters(books, *ERRORS, type="test.event.other")
    with browsing(books.database) as page:
        links = group_links(page, action)
        assert links.keys() == {(type_, *each) for each in KIND for type_ in ("test.event", "test.event.other")}
        link = links["test.event", *group]
        assert f"{len(KIND[group])} dead deliver" in page.get(link)
        said = page.act(link, reason="that group")
        assert f"{len(KIND[group])} {'retried' if action == 'retry' else 'discarded'}" in said
    assert uids_in(books, state) == [uids[place] for place in KIND[group]]


def test_programs_name_the_kind_of_an_error(books: Ledger, tokens: Tokens) -> None:
    dead_letters(books, *ERRORS)
    with browsing(books.database, tokens=tokens) as page:
        found = (page.json("/exceptions/summary"))["groups"]
        kinds = {(str(each["status"]) if each["status"] else None, each["error"]) for each in found}
        assert kinds == {(status, kind or None) for status, kind in KIND}
        asked = {"kind": "timed out after N s", "state": "dead"}
        planned = post(page, "discard", **asked, dry_run=True)
        assert planned["effects"][0] == "2 dead deliveries match."
        assert (post(page, "discard", **planned["fields"], reason="of no use"))["result"] == "2 discarded"
    [audit] = admin.audit(books.store, None, 10)
    assert audit["filter"]["kind"] == "timed out after N s"


# -- no more than was counted -----------------------------------------------------------------------------------------


@pytest.mark.fence("an action changes more than was counted before it was confirmed")
@pytest.mark.parametrize(("action", "state"), [("retry", "waiting"), ("discard", None)])
def test_what_dies_after_the_dry_run_is_left(books: Ledger, action: str, state: str | None) -> None:
    counted = dead_letters(books, ("down", None), ("down", None))
    with browsing(books.database) as page:
        form = form_fields(page.get(f"/actions/{action}?error=down&state=dead"))
        later = dead_letters(books, ("down", None))
        answer = page.post(f"/actions/{action}", {**form, "reason": "mended"})
        assert "2 retried" in (said := visible(page.get(answer.headers["location"]))) or "2 discarded" in said
    assert uids_in(books, state) == counted
    assert set(uids_in(books, "dead")) == set(later)


@pytest.mark.fence("an action changes more than was counted before it was confirmed")
def test_ages_count_from_the_dry_run(books: Ledger) -> None:
    """Goes red if ``until=1h`` means an hour before the action: the second one would be meant too."""
    first, second = dead_letters(books, ("down", None), ("down", None))
    books.do("update outbox.delivery set created_at = now() - interval '2 hours' where uid = %s::uuid", first)
    with browsing(books.database) as page:
        form = form_fields(page.get("/actions/retry?until=1h&state=dead"))
        move = "update outbox.delivery set created_at = %s::timestamptz - interval '1 hour' where uid = %s::uuid"
        books.do(move, form["as_of"], second)
        page.post("/actions/retry", form)
    assert uids_in(books, "waiting") == [first]


@pytest.mark.fence("an action changes more than was counted before it was confirmed")
def test_more_than_was_counted_is_refused(books: Ledger) -> None:
    """A row that enters the state without a trace of when is counted again."""
    first, second = books.emit("a", "b")
    books.park("s", books.row(first, "waiting", due_in=60.0), books.row(second, "held"))
    books.catch_up("s")
    with browsing(books.database) as page:
        form = form_fields(page.get("/actions/discard?sink=s&state=waiting"))
        assert form["counted"] == "1"
        books.do("update outbox.delivery set state = 'waiting'")
        answer = page.post("/actions/discard", {**form, "reason": "of no use"})
        assert answer.status_code == 400
        assert "2 waiting deliveries match now, and 1 were counted before: nothing was changed" in visible(answer.text)
    assert len(uids_in(books, "waiting")) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"as_of": "yesterday"}, "as_of should be a time"),
        ({"as_of": "9000-01-01T00:00:00Z"}, "as_of lies in the future"),
        ({"counted": "x"}, "counted should be a number"),
        ({"kind": "x" * 1025}, "kind has more than 1024 characters"),
    ],
)
def test_a_bound_that_is_none_is_refused(books: Ledger, fields: dict[str, str], said: str) -> None:
    dead_letters(books, ("down", None))
    with browsing(books.database) as page:
        form = form_fields(page.get("/actions/retry?state=dead"))
        answer = page.post("/actions/retry", {**form, **fields})
        assert answer.status_code == 400
        assert said in visible(answer.text)
    assert uids_in(books, "waiting") == []


# -- helpers of programs ----------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Any) -> Tokens:
    """Return a token of an operator."""
    path = tmp_path / "tokens"
    path.write_text(f"operator:{TOKEN}\n", encoding="utf-8")
    return Tokens(FileContent(path, read_tokens))


def post(page: Browser, action: str, **body: Any) -> Any:
    """Return the answer to an action of a program."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = page.client.post(f"/api/v1/actions/{action}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()
