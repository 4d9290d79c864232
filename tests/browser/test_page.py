"""The page in a browser: what a person does on it, without JavaScript too, and how it looks."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from axe_playwright_python.sync_playwright import Axe  # pyright: ignore[reportMissingTypeStubs]
from playwright.sync_api import Browser, Page, expect

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Verdict
from outbox_relay.ui.users import User
from tests.support import books as owned
from tests.support import browser as chromium
from tests.support.database import Database
from tests.support.deliveries import delivered, emit, has
from tests.support.ledger import Ledger
from tests.support.memory_sink import MemorySink
from tests.support.page import served
from tests.support.relay_harness import running, spec
from tests.support.schedules import register, schedule

pytestmark = pytest.mark.thorough

books, browser = owned.books, chromium.browser
OPERATOR = User("anna", "operator")
PATHS = ("/", "/sinks/s", "/exceptions", "/exceptions?view=groups", "/replays", "/schedules", "/relays", "/database",
         "/audit")  # fmt: skip
NARROW, WIDE = {"width": 360, "height": 780}, {"width": 1280, "height": 900}
LEFT_OUT = ("minor", "moderate")
"""Impacts of findings of axe that fail no test."""


class Scripted:
    """A destination that refuses everything until it is mended."""

    def __init__(self) -> None:
        self.mended = False

    def __call__(self, _event: StoredEvent, _attempt: int) -> Verdict:
        """Return the verdict of an event."""
        return DELIVERED if self.mended else Refused("answered 422 Unprocessable", 422)


def confirm(page: Page, button: str, reason: str = "") -> None:
    """Follow the link of an action, read what it will do, and do it."""
    page.get_by_role("link", name=button, exact=True).first.click()
    page.get_by_label("Reason").fill(reason)
    page.locator("form.confirm button").click()


def test_dead_letters_are_found_understood_retried_and_arrive(database: Database, browser: Browser) -> None:
    destination = Scripted()
    sink = MemorySink(destination)
    [first, *others] = emit(database, ["first", "second", "third"])
    with running(database.dsn, (spec("s"), sink)) as harness, served(database, OPERATOR) as address:
        harness.owns_all()
        has(database, "select 1 where (select count(*) from outbox.delivery where state = 'dead') = 3")
        page = browser.new_page()
        page.goto(f"{address}/exceptions")
        expect(page.locator("tbody tr")).to_have_count(3)
        page.locator("tbody tr").last.get_by_role("link").first.click()
        expect(page.get_by_text("answered 422 Unprocessable").first).to_be_visible()
        destination.mended = True
        confirm(page, "Retry", "the destination is mended")
        expect(page.get_by_text("1 retried")).to_be_visible()
        delivered(sink, [first])
        page.goto(f"{address}/exceptions?status=422")
        page.get_by_role("link", name="Retry all that match").click()
        expect(page.get_by_text("2 dead deliveries match.")).to_be_visible()
        page.locator("form.confirm button").click()
        expect(page.get_by_text("2 retried")).to_be_visible()
        delivered(sink, others)
        harness.settled()
        page.goto(f"{address}/audit")
        expect(page.get_by_text("anna@page")).to_have_count(2)


def test_everything_can_be_read_and_done_without_javascript(books: Ledger, browser: Browser) -> None:
    [event] = books.emit("k")
    books.park("s", books.row(event, "dead", error="gone"))
    with served(books.database, OPERATOR) as address:
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        for path in PATHS:
            page.goto(address + path)
            expect(page.locator("main")).to_be_visible()
        page.goto(f"{address}/events/{books.uid(event)}")
        expect(page.locator("time").first).to_contain_text("UTC")
        confirm(page, "Retry")
        expect(page.get_by_text("1 retried")).to_be_visible()


def test_figures_are_refreshed_and_times_are_shown_in_the_zone_of_the_reader(books: Ledger, browser: Browser) -> None:
    with served(books.database, OPERATOR) as address:
        context = browser.new_context(timezone_id="Asia/Tokyo", locale="en-GB")
        page = context.new_page()
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/exceptions")
        expect(page.get_by_text("No dead letter matches.")).to_be_visible()
        [event] = books.emit("k")
        books.park("s", books.row(event, "dead", error="gone"))
        expect(page.get_by_text("gone")).to_be_visible()
        time = page.locator("time").first
        shown, exact = time.inner_text(), time.get_attribute("title")
        at = datetime.fromisoformat(exact or "")
        assert at.utcoffset() == timedelta(0), "the exact time is shown on hover, in UTC"
        assert shown == f"{at.astimezone(ZoneInfo('Asia/Tokyo')):%Y-%m-%d %H:%M:%S} +09:00"
        assert errors == []


FOCUSED = "(document.activeElement.innerText || document.activeElement.name || '').trim()"
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"


def tab_to(page: Page, text: str) -> None:
    """Press the Tab key until the element with a text or name has the focus, which must be seen."""
    page.wait_for_load_state()  # its styles are there
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == text:
            assert page.evaluate(OUTLINE) == "solid", f"the focus on {text} is not seen"
            return
    raise AssertionError(f"no key leads to {text}")


def test_a_dead_letter_is_retried_by_keyboard_alone(books: Ledger, browser: Browser) -> None:
    [event] = books.emit("k")
    books.park("s", books.row(event, "dead", error="gone"))
    with served(books.database, OPERATOR) as address:
        page = browser.new_page()
        page.goto(address)
        tab_to(page, "Skip to content")
        tab_to(page, "Exceptions")
        page.keyboard.press("Enter")
        expect(page).to_have_title(re.compile("Exceptions"))
        tab_to(page, "Skip to content")
        page.keyboard.press("Enter")
        tab_to(page, "sink")
        assert page.evaluate("document.activeElement.closest('main') !== null"), "the navigation is skipped"
        tab_to(page, books.uid(event))
        page.keyboard.press("Enter")
        expect(page).to_have_title(re.compile("Event"))
        tab_to(page, "Retry")
        page.keyboard.press("Enter")
        expect(page).to_have_title(re.compile("Retry dead deliveries"))
        tab_to(page, "reason")
        page.keyboard.type("by keyboard")
        tab_to(page, "Retry 1")
        page.keyboard.press("Enter")
        expect(page.get_by_text("1 retried")).to_be_visible()
        tab_to(page, "q")
        page.keyboard.type("s")
        page.keyboard.press("Enter")
        expect(page).to_have_title(re.compile("Sink s"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fit_a_narrow_screen(books: Ledger, browser: Browser, scheme: Any) -> None:
    [event, _] = books.emit("customer-with-a-long-name@example.com", "k")
    books.park("s", books.row(event, "dead", error="a long error " * 20, status=503))
    books.do("select outbox.set_paused('s', true, 'anna', 'maintenance')")
    register(books.database, schedule("nightly-report-of-all-warehouses"), schedule("paused"), schedule("failing"))
    books.do("update outbox.schedule set paused = true where name = 'paused'")
    books.do("update outbox.schedule set after_at = '2020-01-01Z', next_at = now() - interval '1 hour', "
             "error = 'payload is too large', error_at = now() where name = 'failing'")  # fmt: skip
    axe: Any = Axe()
    with served(books.database, OPERATOR) as address:
        for size in (NARROW, WIDE):
            context = browser.new_context(viewport=cast(Any, size), color_scheme=scheme)
            page = context.new_page()
            for path in (*PATHS, f"/events/{books.uid(event)}", "/actions/discard?state=dead", "/nowhere"):
                page.goto(address + path)
                found = axe.run(page)
                serious = [
                    (each["id"], [node["html"] for node in each["nodes"]])
                    for each in found.response["violations"]
                    if each["impact"] not in LEFT_OUT
                ]
                assert serious == [], path
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{path} overflows"
            context.close()
