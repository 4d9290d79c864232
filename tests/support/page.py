"""The page of a test: its application, and a browser without JavaScript that looks at it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any

import uvicorn
from httpx2 import Response
from starlette.testclient import TestClient

from outbox_relay.ui.access import Access, Anyone
from outbox_relay.ui.app import build_app
from outbox_relay.ui.guard import host_names
from outbox_relay.ui.server import configuration
from outbox_relay.ui.site import PageOptions, Site
from outbox_relay.ui.users import User
from tests.support.database import Database
from tests.support.wait import until

ADDRESS = "http://127.0.0.1:8090"
FORM = re.compile(r'<form class="confirm".*?</form>', re.DOTALL)
FIELD = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')


@dataclass
class Browser:
    """A client of the page, which sends what a browser sends."""

    client: TestClient
    site: Site

    def get(self, path: str, status: int = 200, **options: Any) -> str:
        """Return the page at `path`."""
        found = self.client.get(path, **options)
        assert found.status_code == status, f"{path}: {found.status_code}: {found.text[-2000:]}"
        return found.text

    def json(self, path: str, status: int = 200, **options: Any) -> Any:
        """Return the answer of the API at `path`."""
        found = self.client.get(f"/api/v1{path}", **options)
        assert found.status_code == status, f"{path}: {found.status_code}: {found.text}"
        return found.json()

    def key_path(self, key: str) -> str:
        """Return the path of the deliveries of `key`."""
        return f"/exceptions?key_hash={self.site.keys.hash(key)}&state=all"

    def post(self, path: str, fields: dict[str, str], **headers: str) -> Response:
        """Send a form as a browser does for one of our own pages."""
        sent = {"sec-fetch-site": "same-origin", "origin": ADDRESS, **headers}
        return self.client.post(path, data=fields, headers=sent)

    def act(self, path: str, **fields: str) -> str:
        """Look at what an action would do, do it, and return the page that tells its result."""
        asked = self.get(path)
        answer = self.post(path.partition("?")[0], {**form_fields(asked), **fields})
        assert answer.status_code == 303, answer.text[-2000:]
        return self.get(answer.headers["location"])


def form_fields(html: str) -> dict[str, str]:
    """Return the hidden fields of the form that confirms an action."""
    [form] = FORM.findall(html)
    return {name: unescape(value) for name, value in FIELD.findall(form)}


def visible(html: str) -> str:
    """Return the text of a page, without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


@contextmanager
def browsing(
    database: Database,
    *,
    user: User = User("anna", "operator"),  # noqa: B008 - frozen
    access: Access | None = None,
    tokens: Access | None = None,
    read_only: bool = False,
    show_payloads: bool = False,
    label: str = "",
    dsn: str | None = None,
    client: tuple[str, int] = ("127.0.0.1", 50_000),
) -> Generator[Browser]:
    """Look at the page of `database` as `user`, or as `access` finds out."""
    site = Site(lambda: dsn or database.dsn, pooler=False, options=PageOptions(read_only, show_payloads, label))
    app = build_app(site, access or Anyone(user), tokens=tokens, hosts=host_names("127.0.0.1"))
    with TestClient(
        app, ADDRESS, raise_server_exceptions=False, follow_redirects=False, client=client
    ) as opened:  # whose lifespan closes the site
        yield Browser(opened, site)


@contextmanager
def served(database: Database, user: User | Access, **options: Any) -> Generator[str]:
    """Serve the page of `database` to `user`, or to those whom an access finds out, and yield its address."""
    site = Site(lambda: database.dsn, pooler=False, options=PageOptions(**options))
    listening = socket.create_server(("127.0.0.1", 0))
    access = Anyone(user) if isinstance(user, User) else user
    server = uvicorn.Server(configuration(build_app(site, access, hosts=host_names("127.0.0.1"))))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    serving.start()
    try:
        until(lambda: server.started, seconds=20, what="the page is served")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        serving.join(20)
        listening.close()
