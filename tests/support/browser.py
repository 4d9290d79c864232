"""Debian's Chromium, without a window."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from playwright.async_api import Browser, async_playwright

CHROMIUM = "/usr/bin/chromium"
"""Debian's package `chromium`."""


@pytest.fixture
async def browser() -> AsyncGenerator[Browser]:
    """A browser without a window."""
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        await opened.close()
