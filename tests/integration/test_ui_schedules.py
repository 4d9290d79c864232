"""The page of schedules: its list, the actions of operators, and the link that is there if there are schedules."""

from __future__ import annotations

from typing import Any

from outbox_relay import admin
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import browsing, visible
from tests.support.schedules import register, schedule

books = owned.books


def audit(books: Ledger) -> tuple[object, ...]:
    """Return the newest action: what, by whom, why, and of which schedule."""
    newest = (admin.audit(books.store, None, 1))[0]
    return newest["action"], newest["actor"], newest["reason"], newest["filter"]["schedule"]


def test_schedules_are_listed_with_times_and_errors(books: Ledger) -> None:
    register(books.database, schedule("a", cron="30 3 * * *", timezone="Europe/Berlin"), *map(schedule, "bcd"))
    books.do(
        "update outbox.schedule "
        "set after_at = '2020-01-01Z', next_at = '2999-01-01 02:30Z', last_at = '2026-11-24 02:30Z'"
    )
    books.do("update outbox.schedule set paused = true where name = 'b'")
    books.do(
        "update outbox.schedule set next_at = now() - interval '10 minutes', retry_at = now(), "
        "error = 'payload must have at most 9 bytes', error_at = '2026-11-25 04:05:06Z' where name = 'c'"
    )
    books.do("update outbox.schedule set next_at = now() - interval '2 hours' where name = 'd'")
    with browsing(books.database) as page:
        shown = visible(page.get("/schedules"))
        assert (
            "a active 30 3 * * * Europe/Berlin report.due one 2026-11-24 02:30:00 UTC 2999-01-01 02:30:00 UTC" in shown
        )
        assert "b paused * * * * * UTC report.due one 2026-11-24 02:30:00 UTC \u2013 Run now Resume Remove" in shown
        assert "c refused late by 10" in shown
        assert "payload must have at most 9 bytes ( 2026-11-25 04:05:06 UTC )" in shown
        assert "d late by 2" in shown
        books.do("update outbox.schedule set retry_at = null where name = 'c'")
        assert "c failing late by 10" in visible(page.get("/schedules"))


def test_a_schedule_is_run_paused_resumed_and_removed(books: Ledger) -> None:
    register(books.database, schedule(type="report.due"))
    name = "?schedule=nightly"
    with browsing(books.database) as page:
        asked = visible(page.get(f"/actions/schedule-run{name}"))
        assert "An event of type report.due is emitted now" in asked
        assert books.query("select from outbox.event") == [], "only asked"
        said = visible(page.act(f"/actions/schedule-run{name}", reason="again"))
        [(uid,)] = books.query("select uid::text from outbox.event")
        assert f"event {uid} is emitted" in said
        assert audit(books) == ("schedule run", "anna@page", "again", "nightly")
        for change, state in (("pause", "paused"), ("resume", "active")):
            assert f"schedule nightly is {state}" in page.act(f"/actions/schedule-{change}{name}", reason="why")
            assert audit(books) == (f"schedule {change}", "anna@page", "why", "nightly")
            again = page.get(f"/actions/schedule-{change}{name}")
            assert f"It is {state} already." in again
            assert '<form class="confirm"' not in again
        books.do("insert into outbox.relay (id, name, version, sinks, schedules) "
                 "values (gen_random_uuid(), 'web-1', '1', '{}', '{\"nightly\": 1}')")  # fmt: skip
        asked = page.get(f"/actions/schedule-remove{name}")
        assert "register it again when they start or reload: web-1." in visible(asked)
        assert 'class="danger"' in asked
        assert "schedule nightly is removed" in page.act(f"/actions/schedule-remove{name}", reason="gone")
        assert audit(books) == ("schedule remove", "anna@page", "gone", "nightly")
        assert "There is no schedule" in page.get("/schedules")
    assert books.query("select from outbox.schedule") == []


def test_a_thousand_schedules_come_in_bounded_pages(books: Ledger) -> None:
    register(books.database, *(schedule(f"s{n:03}") for n in range(1000)))
    books.do("update outbox.schedule set error = repeat('x', 2000), error_at = now()")
    seen: list[str] = []
    after = ""
    with browsing(books.database) as page:
        while after is not None:
            html = page.get("/schedules", params={"after": after})
            assert len(html) < 300_000
            found: Any = page.json("/schedules", params={"after": after} if after else {})
            assert len(found["schedules"]) == 100
            seen += [each["name"] for each in found["schedules"]]
            assert ("More" in visible(html)) is (found["next"] is not None)
            after = found["next"]
        assert "There is no schedule after s999." in page.get("/schedules?after=s999")
    assert seen == [f"s{n:03}" for n in range(1000)]
