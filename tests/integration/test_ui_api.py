"""The API: its answers are what its OpenAPI document says, and it acts under the rights of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outbox_relay.ui import openapi
from outbox_relay.ui.access import Anyone, Tokens
from outbox_relay.ui.app import ROUTES
from outbox_relay.ui.endpoints import PREFIX
from outbox_relay.ui.users import FileContent, User, read_tokens
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import Browser, browsing, form_fields
from tests.support.schedules import register, schedule
from tests.support.schema_answers import answer_schema, validate

books = owned.books

OPERATOR, VIEWER = "o" * 20, "v" * 20


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    path = tmp_path / "tokens"
    path.write_text(f"operator:{OPERATOR}\nviewer:{VIEWER}\n", encoding="utf-8")
    return Tokens(FileContent(path, read_tokens))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def filled(books: Ledger) -> str:
    """Fill the log with a dead letter, a waiting and a running delivery, a replay, history, figures and an action.

    The rate of the sink is reached.
    """
    dead, waiting, passed = books.emit("k", "other", None)
    books.park("s", books.row(dead, "dead", error="gone", status=410), books.row(waiting, "waiting", due_in=60.0))
    books.catch_up("s")
    books.do("select outbox.set_paused('s', true, 'anna', 'maintenance')")
    books.do("select outbox.set_paused('s', false, 'anna', 'over')")
    books.do(
        "insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, milliseconds, error) "
        "select now(), uid, 's', id, 1, 'here', 'failed', 410, 12.5, 'gone' from outbox.delivery where state = 'dead'"
    )
    books.do(
        "insert into outbox.history (sink, at, delivered, end_to_end_p50, end_to_end_p99, claim_p99) "
        "select s, date_trunc('minute', now()), 5, 0.01, 0.02, 0.003 from unnest('{s,\"\"}'::text[]) s"
    )
    register(books.database, schedule())
    books.do("update outbox.sink set rate_per_second = 5")
    assert passed
    return books.uid(dead)


def check(page: Browser, document: dict[str, Any], path: str, **parts: str) -> Any:
    """Return the answer at a path of the document, after comparing it with its schema."""
    answer = page.json(path.format(**parts))
    validate(answer_schema(document, path), answer)
    return answer


def test_every_answer_is_what_the_document_says(books: Ledger) -> None:
    uid = filled(books)
    with browsing(books.database) as page:
        fields = form_fields(page.get("/actions/replay?sink=s&since=1d"))
        assert (page.post("/actions/replay", fields)).status_code == 303
        [job] = page.site.jobs._jobs.values()  # pyright: ignore[reportPrivateUsage]
        document = page.json("/openapi.json")
        parts = {"name": "s", "uid": uid, "id": "1"}
        paths = [path for path, methods in document["paths"].items() if "get" in methods]
        paths.remove("/exceptions/export")  # whose answer is no JSON, as test_ui_contents.py shows
        for path in paths:
            answer = check(page, document, path, **({**parts, "id": job.id} if path.startswith("/jobs") else parts))
            empty = [name for name, value in answer.items() if value in ([], {}) and name not in ("unread", "locks")]
            assert set(empty) <= {"running", "transactions"}, f"{path}: nothing to compare in {empty}"
        assert len(paths) == 13


def test_the_document_has_every_path_and_method() -> None:
    paths = openapi.document(PREFIX)["paths"]
    found = {path: sorted(method.upper() for method in methods) for path, methods in paths.items()}
    routes = {
        route.path.removeprefix(PREFIX): sorted((route.methods or set()) - {"HEAD"})
        for route in ROUTES
        if route.path.startswith(PREFIX)
    }
    assert found == {path: methods for path, methods in routes.items() if path != "/openapi.json"}


def test_the_document_is_one_of_openapi(books: Ledger) -> None:
    with browsing(books.database) as page:
        document = page.json("/openapi.json")
    assert document["openapi"] == "3.1.0"
    assert document["servers"] == [{"url": "/api/v1"}]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            names = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert names == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            for answer in operation["responses"].values():
                for content in answer["content"].values():
                    Draft202012Validator.check_schema({**content["schema"], "components": document["components"]})


def test_errors_are_json_as_the_document_says(books: Ledger, tokens: Tokens) -> None:
    with browsing(books.database, tokens=tokens, access=Anyone(User("bob", "viewer"))) as page:
        for path, status in (("/sinks/t", 404), ("/exceptions?state=x", 400), ("/nowhere", 404), ("/events/x", 400),
                             ("/replays/0", 400), ("/replays/9", 404)):  # fmt: skip
            assert list(page.json(path, status)) == ["error"]
        answer = page.client.get("/api/v1/sinks", headers=bearer("x" * 20))
        assert (answer.status_code, list(answer.json())) == (401, ["error"])


def test_an_action_is_planned_and_done_with_a_token(books: Ledger, tokens: Tokens) -> None:
    uid = filled(books)
    with browsing(books.database, tokens=tokens, access=Anyone(User("bob", "viewer"))) as page:
        document = page.json("/openapi.json")
        schema = answer_schema(document, "/actions/{action}", "post")
        body: dict[str, Any] = {"uid": uid, "sink": "s", "dry_run": True}
        for dry_run, found in ((True, "effects"), (False, "result")):
            answer = page.client.post(
                "/api/v1/actions/retry", json={**body, "dry_run": dry_run}, headers=bearer(OPERATOR)
            )
            assert answer.status_code == 200, answer.text
            validate(schema, answer.json())
            assert found in answer.json()
        assert answer.json()["result"] == "1 retried"
        refused = page.client.post("/api/v1/actions/retry", json=body, headers=bearer(VIEWER))
        assert refused.status_code == 403
    [(actor,)] = books.query("select actor from outbox.audit order by id desc limit 1")
    assert actor == "token-1@page"


BODIES = (
    b"", b"[]", b"{", b'{"sink": ["s"]}', b'{"dry_run": 1}', b'{"sink": true}', b"\xff", b'{"sink": "t", "sink": "s"}',
    b'{"sink": null}', b'{"sink": ""}', b'{"sink": "s", "reason": ""}', b'{"\\ud800": "x"}', b"[" * 60_000,
    b'{"sink": "s", "erorr": "x"}',
)  # fmt: skip


def test_a_body_that_is_no_object_of_known_texts_is_refused(books: Ledger, tokens: Tokens) -> None:
    with browsing(books.database, tokens=tokens) as page:
        for body in BODIES:
            answer = page.client.post("/api/v1/actions/pause", content=body, headers=bearer(OPERATOR))
            assert (answer.status_code, list(answer.json())) == (400, ["error"]), body[:40]


def test_an_empty_filter_of_a_program_selects_nothing(books: Ledger, tokens: Tokens) -> None:
    """Goes red when it selects everything: a program may have computed it."""
    filled(books)
    with browsing(books.database, tokens=tokens) as page:
        for name in ("sink", "type", "tenant", "error", "status", "since", "uid", "state"):
            body = {"sink": "s", "reason": "x", "kind": "", name: ""}
            answer = page.client.post("/api/v1/actions/discard", json=body, headers=bearer(OPERATOR))
            assert (answer.status_code, name in answer.json()["error"]) == (400, True), answer.text
            assert page.client.get(f"/api/v1/exceptions?{name}=", headers=bearer(OPERATOR)).status_code == 400
    assert books.query("select count(*) from outbox.delivery where state = 'dead'") == [(1,)]


def test_a_value_that_an_action_refuses_is_an_error(books: Ledger, tokens: Tokens) -> None:
    filled(books)
    with browsing(books.database, tokens=tokens) as page:
        for action, body, status, said in (
            ("discard", {"sink": "s", "state": "dead"}, 400, "needs a reason"),
            ("retry", {"sink": "s", "rate": "0"}, 400, "rate"),
            ("seek", {"sink": "s"}, 400, "to "),
            ("seek", {"sink": "none", "to": "now"}, 404, "no sink"),
        ):
            answer = page.client.post(f"/api/v1/actions/{action}", json=body, headers=bearer(OPERATOR))
            assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text


def test_without_a_token_an_action_needs_that_of_a_form(books: Ledger) -> None:
    with browsing(books.database) as page:
        own = {"sec-fetch-site": "same-origin"}
        answer = page.client.post("/api/v1/actions/pause", json={"sink": "s"}, headers=own)
        assert answer.status_code == 403
        csrf = form_fields(page.get("/actions/pause?sink=s"))["csrf"]
        answer = page.client.post("/api/v1/actions/pause", json={"sink": "s"}, headers={**own, "x-csrf-token": csrf})
        assert answer.json()["result"] == "sink s is paused"
