"""Debian's Chromium, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.support.installed import absent

ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
"""The sandbox does not work for root, and shared memory is small in containers."""
EXPECT_SECONDS = 30.0
"""Time limit of an expectation, on a busy machine."""


@contextmanager
def chromium() -> Generator[Browser]:
    """Start a browser, and end it."""
    executable = shutil.which("chromium") or absent("Chromium", "chromium")
    expect.set_options(timeout=EXPECT_SECONDS * 1000)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture
def browser() -> Generator[Browser]:
    """Yield a browser without a window."""
    with chromium() as opened:
        yield opened
