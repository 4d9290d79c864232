"""A browser, and the page that it looks at, served by uvicorn as `outbox-relay ui` does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from playwright.async_api import Browser, async_playwright

from outbox_relay.ui.access import Anyone
from outbox_relay.ui.app import build_app
from outbox_relay.ui.guard import host_names
from outbox_relay.ui.server import configuration
from outbox_relay.ui.site import PageOptions, Site
from outbox_relay.ui.users import User
from tests.support import books as owned
from tests.support.database import Database
from tests.support.wait import auntil

CHROMIUM = "/usr/bin/chromium"
"""Debian's package `chromium`."""
books = owned.books


@pytest.fixture
async def browser() -> AsyncGenerator[Browser]:
    """A browser without a window."""
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        await opened.close()


@asynccontextmanager
async def served(database: Database, user: User, **options: Any) -> AsyncGenerator[str]:
    """Serve the page of `database` to `user`, and yield its address."""
    site = Site(lambda: database.dsn, pooler=False, options=PageOptions(**options))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(configuration(build_app(site, Anyone(user), hosts=host_names("127.0.0.1"))))
    serving = asyncio.create_task(server.serve(sockets=[listening]))

    async def started() -> bool:
        return server.started

    try:
        await auntil(started, seconds=20, what="the page is served")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listening.close()
