"""Debian's Chromium, without a window."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright, expect

from tests.support.installed import absent

ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
"""The sandbox does not work for root, and shared memory is small in containers."""
EXPECT_SECONDS = 30.0
"""Time limit of an expectation, on a busy machine."""


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    """Start a browser, and end it."""
    executable = shutil.which("chromium") or absent("Chromium", "chromium")
    expect.set_options(timeout=EXPECT_SECONDS * 1000)
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield opened
        finally:
            await opened.close()


@pytest.fixture
async def browser() -> AsyncGenerator[Browser]:
    """Yield a browser without a window."""
    async with chromium() as opened:
        yield opened
