"""The page of schedules: its list, the actions of operators, and the link that is there if there are schedules."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outbox_relay import admin
from outbox_relay.postgres.migrations import migrate
from outbox_relay.ui.users import User
from tests.support import books as owned
from tests.support.ledger import Ledger
from tests.support.page import browsing, form_fields, visible
from tests.support.roles import new_role
from tests.support.schedules import register, schedule

books = owned.books

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{7*7}}"
VIEWER = User("bob", "viewer")
ACTIONS = ("run", "pause", "resume", "remove")


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


def test_a_run_that_the_schema_refuses_says_why(books: Ledger) -> None:
    migrate(books.database.dsn, max_payload_bytes=1024)
    register(books.database, schedule(payload={"a": "x" * 2000}))
    with browsing(books.database) as page:
        assert "payload must have at most 1024 bytes" in page.act("/actions/schedule-run?schedule=nightly")
    assert books.query("select from outbox.event") == []


def test_a_schedule_that_is_paused_meanwhile_is_not_paused_twice(books: Ledger) -> None:
    register(books.database, schedule())
    with browsing(books.database) as page:
        form = form_fields(page.get("/actions/schedule-pause?schedule=nightly"))
        books.do("update outbox.schedule set paused = true")
        answer = page.post("/actions/schedule-pause", form)
        assert "schedule nightly was paused already" in page.get(answer.headers["location"])
    assert books.query("select from outbox.audit") == []


@pytest.mark.parametrize("action", ACTIONS)
def test_only_operators_act_with_the_token_of_a_form_on_schedules_that_there_are(books: Ledger, action: str) -> None:
    register(books.database, schedule())
    path = f"/actions/schedule-{action}"
    fields = {"schedule": "nightly"}
    with browsing(books.database) as page:
        assert (page.post(path, fields)).status_code == 403, "no token"
        assert (page.post(path, fields, **{"sec-fetch-site": "cross-site"})).status_code == 403
        assert "did you mean nightly?" in visible(page.get(f"{path}?schedule=nightyl", 404))
        assert "there are: nightly" in visible(page.get(f"{path}?schedule=", 404))
        assert "means nothing here" in visible(page.get(f"{path}?schedule=nightly&sink=s", 400))
        own = {"sec-fetch-site": "same-origin"}
        assert (page.client.post(f"/api/v1{path}", json=fields, headers=own)).status_code == 403
    with browsing(books.database, user=VIEWER) as page:
        assert "/actions/schedule" not in page.get("/schedules")
        page.get(f"{path}?schedule=nightly", 403)
        assert (page.post(path, fields)).status_code == 403
    with browsing(books.database, read_only=True) as page:
        assert "/actions/schedule" not in page.get("/schedules")
        assert (page.post(path, fields)).status_code == 403
    assert books.query("select from outbox.audit") == []


def test_what_the_database_holds_never_becomes_markup(books: Ledger) -> None:
    register(books.database, schedule(MARKUP, cron=MARKUP, timezone=MARKUP, type=MARKUP, key=MARKUP, tenant=MARKUP))
    books.do("update outbox.schedule set error = %s, error_at = '2026-01-01Z'", MARKUP)
    with browsing(books.database) as page:
        html = page.get("/schedules")
        assert "<script>alert" not in html
        assert "<img" not in html
        assert "49" not in visible(html.partition("<main")[2])
        for action in ACTIONS:
            if action != "resume":
                asked = page.get(f"/actions/schedule-{action}", params={"schedule": MARKUP})
                assert "<script>alert" not in asked
        assert "<script>alert" not in page.get("/schedules", params={"after": "~" + MARKUP})
        assert "is paused" in visible(page.act(f"/actions/schedule-pause?schedule={MARKUP.replace('&', '%26')}"))


def test_a_thousand_schedules_come_in_bounded_pages(books: Ledger) -> None:
    register(books.database, *(schedule(f"s{n:03}") for n in range(1000)))
    books.do("update outbox.schedule set error = repeat('x', 2000), error_at = now()")
    seen: list[str] = []
    after = ""
    with browsing(books.database) as page:
        while after is not None:
            html = page.get("/schedules", params={"after": after})
            assert len(html) < 300_000
            found: Any = page.json("/schedules", params={"after": after})
            assert len(found["schedules"]) == 100
            seen += [each["name"] for each in found["schedules"]]
            assert ("More" in visible(html)) is (found["next"] is not None)
            after = found["next"]
        assert "There is no schedule after s999." in page.get("/schedules?after=s999")
    assert seen == [f"s{n:03}" for n in range(1000)]


def test_the_answer_of_the_api_is_what_the_document_says(books: Ledger) -> None:
    register(books.database, schedule("a", tenant="acme", key="k"), schedule("b"))
    books.do(
        "update outbox.schedule set next_at = '2999-01-01Z', error = 'no', error_at = now(), retry_at = now() "
        "where name = 'a'"
    )
    with browsing(books.database) as page:
        document = page.json("/openapi.json")
        schema = document["paths"]["/schedules"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        validator: Any = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        found = page.json("/schedules")
        validator.validate(found)
        assert [each["name"] for each in found["schedules"]] == ["a", "b"]
        assert "payload" not in found["schedules"][0]
        assert "means nothing here" in (page.json("/schedules?name=a", 400))["error"]
        wanted = document["paths"]["/actions/{action}"]["post"]
        assert {f"schedule-{action}" for action in ACTIONS} < set(wanted["parameters"][0]["schema"]["enum"])
        assert "schedule" in wanted["requestBody"]["content"]["application/json"]["schema"]["properties"]


def test_a_page_with_the_rights_of_a_reader_lists_and_does_nothing(books: Ledger) -> None:
    register(books.database, schedule())
    with new_role(books.database, "read") as role:
        migrate(books.database.dsn, grants={"read": [role]})
        with browsing(books.database, dsn=books.database.dsn_as(role)) as page:
            assert "nightly" in page.get("/schedules")
            said = page.act("/actions/schedule-pause?schedule=nightly")
            assert "--grant-operate" in said
    assert books.query("select paused from outbox.schedule") == [(False,)]
