"""The page inside another application: under a prefix, with its users, and without its lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient
from starlette.types import ASGIApp

from outbox_relay.ui import User, create_app
from outbox_relay.ui.guard import Guard
from tests.docs.pages import blocks
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import form_fields

books = owned.books

ADDRESS = "https://shop.example"
STAFF = {"x-staff": "yes"}


@contextmanager
def client(app: ASGIApp, page: ASGIApp) -> Generator[TestClient]:
    """Ask an application, and close the page that it has mounted, which no lifespan does."""
    try:
        yield TestClient(app, ADDRESS, follow_redirects=False)
    finally:
        assert isinstance(page, Guard)
        asyncio.run(page.aclose())


def test_the_page_is_true(books: Ledger) -> None:
    [block] = [each for each in blocks("docs/page.md") if each.language == "python"]
    found: dict[str, Any] = {}
    text = block.text.replace("postgresql:///shop", books.database.dsn)
    exec(compile(text, "docs/page.md", "exec"), found)  # noqa: S102 - of the page
    with client(found["app"], found["page"]) as staff:
        assert (staff.get("/outbox/")).status_code == 401
        answer = staff.get("/outbox/", headers=STAFF)
        assert answer.status_code == 200
        assert 'href="/outbox/sinks/s"' in answer.text
        assert 'hx-get="/outbox/"' in answer.text
        for path in ("/outbox/exceptions", "/outbox/static/page.css", "/outbox/api/v1/sinks", "/outbox/sinks/s"):
            assert (staff.get(path, headers=STAFF)).status_code == 200, path
        document = (staff.get("/outbox/api/v1/openapi.json", headers=STAFF)).json()
        assert document["servers"] == [{"url": "/outbox/api/v1"}]
        assert (staff.get("/outbox/nowhere", headers=STAFF)).status_code == 404


def test_actions_work_under_a_prefix(books: Ledger) -> None:
    page = create_app(books.database.dsn, lambda _request: User("anna", "operator"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await page({**scope, "root_path": "/outbox"}, receive, send)

    with client(app, page) as staff:
        asked = staff.get("/outbox/actions/pause?sink=s")
        assert "Path=/outbox" in asked.headers["set-cookie"]
        headers = {"origin": ADDRESS}
        answer = staff.post("/outbox/actions/pause", data=form_fields(asked.text), headers=headers)
        assert answer.status_code == 303, answer.text
        assert "sink s is paused" in (staff.get(answer.headers["location"])).text
        assert books.query("select paused from outbox.sink") == [(True,)]
        search = staff.post("/outbox/search", data={"q": "s"}, headers=headers)
        assert search.headers["location"] == "/outbox/sinks/s"
