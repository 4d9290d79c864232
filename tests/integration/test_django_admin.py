"""Django's admin: bounded lists, payloads for those who may see them, and actions with their rows of the audit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.utils import quote as admin_quote
from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from outbox_relay.postgres.migrations import migrate
from tests.support import django_site
from tests.support.database import Database, new_database, query
from tests.support.ledger import Ledger, ledger
from tests.support.postgres import PostgresServer
from tests.support.roles import new_role

django_site.set_up()
EVENTS, DELIVERIES = "/admin/outbox_relay/loggedevent/", "/admin/outbox_relay/eventdelivery/"
VIEWS = ("view_loggedevent", "view_eventdelivery")


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer, template: str) -> Generator[str]:
    """Yield the name of a database with the schema and with all tables of a project of Django."""
    postgres.create_database("django", template=template)
    django_site.place(DEFAULT_DB_ALIAS, Database(postgres, "django"))
    call_command("migrate", verbosity=0, skip_checks=True)
    connections.close_all()
    yield "django"
    postgres.drop_database("django")


@pytest.fixture
def site(postgres: PostgresServer, tables: str) -> Generator[Database]:
    """Yield a project of Django on a database of its own."""
    with new_database(postgres, tables) as database:
        django_site.place(DEFAULT_DB_ALIAS, database)
        yield database
        connections.close_all()


def users() -> Any:
    """Return the users of the project."""
    return apps.get_model("auth", "User").objects


def browser(*permissions: str) -> Client:
    """Return a client of a member of the staff with these permissions."""
    users().filter(username="anna").delete()
    user = users().create_user("anna", is_staff=True)
    user.user_permissions.set(apps.get_model("auth", "Permission").objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def page(client: Client, path: str, status: int = 200) -> str:
    """Return a page."""
    answer = client.get(path)
    assert answer.status_code == status, answer.content
    return answer.content.decode()


def dead_letters(database: Database, *keys: str) -> list[str]:
    """Make dead letters of sink `s`, and return their places in Django."""

    async def make() -> list[int]:
        async with ledger(database) as books:
            await prepare(books)
            events = books.emit(*keys)
            await books.park("s", *(books.row(event, "dead", error="gone", status=410) for event in events))
            await books.catch_up("s")
            return events

    return [f"{event}@s" for event in asyncio.run(make())]


async def prepare(books: Ledger) -> None:
    """Register sink `s` and own its shards."""
    await books.register(("s", ["*"], "beginning"))
    await books.live("here", "s")
    await books.own("s")


def act(client: Client, action: str, places: list[str], reason: str = "", path: str = DELIVERIES) -> str:
    """Run an action on deliveries, and return the page with its message."""
    given = {"action": action, "_selected_action": places, "reason": reason, "index": "0"}
    return client.post(path, given, follow=True).content.decode()


def states(database: Database) -> list[str]:
    return [state for (state,) in query(database, "select state from outbox.delivery order by id")]


def audited(database: Database) -> list[tuple[Any, ...]]:
    return query(database, "select action, sink, count, actor, reason from outbox.audit order by id desc limit 1")


# -- rights -------------------------------------------------------------------------------------------------------


def test_pages_need_the_permission_to_view(site: Database) -> None:
    dead_letters(site, "k")
    client = browser()
    page(client, EVENTS, 403)
    page(client, DELIVERIES, 403)


def test_rows_are_read_only(site: Database) -> None:
    [place] = dead_letters(site, "k")
    client = browser(*VIEWS)
    [(event,)] = query(site, "select id from outbox.event")
    for path in (f"{EVENTS}{event}/change/", f"{DELIVERIES}{place}/change/"):
        assert 'type="submit"' not in page(client, path).partition("<main")[2]
        assert client.post(path, {"type": "x"}).status_code == 403
    for path in (EVENTS, DELIVERIES):
        page(client, f"{path}add/", 403)
    page(client, f"{EVENTS}{event}/delete/", 403)
    page(client, f"{DELIVERIES}{place}/delete/", 403)


def test_actions_need_their_own_permission(site: Database) -> None:
    places = dead_letters(site, "k")
    client = browser(*VIEWS, "retry_eventdelivery")
    shown = page(client, DELIVERIES)
    assert 'value="retry"' in shown
    assert 'value="discard"' not in shown
    act(client, "discard", places, "because")
    assert states(site) == ["dead"]


def test_payloads_need_a_permission_and_a_right(site: Database) -> None:
    query(site, "select outbox.emit('t', '{\"card\": 4711}', headers => '{\"x\": \"h4711\"}')")
    [(event,)] = query(site, "select id from outbox.event")
    path = f"{EVENTS}{event}/change/"
    client = browser(*VIEWS)
    assert "4711" not in page(client, path).replace(str(event), "")
    client = browser(*VIEWS, "view_payload")
    shown = page(client, path)
    assert "card" in shown
    assert "h4711" in shown
    with new_role(site, "reader") as user:
        migrate(site.dsn, grants={"read": [user]})
        with site.connect() as owner:
            owner.execute(f"grant all on all tables in schema public to {user}".encode())
        django_site.place(DEFAULT_DB_ALIAS, site, user=user)
        shown = page(client, path)
        assert "may not read payloads: outbox-relay migrate --grant-payloads ROLE" in shown
        assert "card" not in shown
        page(client, EVENTS)
        page(client, DELIVERIES)
        connections.close_all()
        with site.connect() as owner:
            owner.execute(f"drop owned by {user}".encode())


@contextmanager
def a_role(site: Database, **grants: list[str]) -> Generator[str]:
    """Let the site connect as a new role, which may use the tables of Django."""
    with new_role(site, "site") as user:
        migrate(site.dsn, grants={kind: [user] for kind in grants})
        with site.connect() as owner:
            owner.execute(f"grant all on all tables in schema public to {user}".encode())
        django_site.place(DEFAULT_DB_ALIAS, site, user=user)
        yield user
        connections.close_all()
        with site.connect() as owner:
            owner.execute(f"drop owned by {user}".encode())


@pytest.mark.parametrize("in_transactions", [False, True])
def test_a_role_that_may_not_read_the_schema_gets_a_page_with_the_fix(site: Database, in_transactions: bool) -> None:
    [place] = dead_letters(site, "k")
    [(event,)] = query(site, "select id from outbox.event")
    client = browser(*VIEWS, "retry_eventdelivery")
    with a_role(site):
        connections[DEFAULT_DB_ALIAS].settings_dict["ATOMIC_REQUESTS"] = in_transactions
        try:
            row = f"{EVENTS}{event}/"
            for path in (EVENTS, f"{row}change/", f"{row}history/", f"{row}delete/", DELIVERIES):
                assert "outbox-relay migrate --grant-read ROLE." in page(client, path, 403)
            answer = client.post(DELIVERIES, {"action": "retry", "_selected_action": [place], "index": "0"})
            assert answer.status_code == 403
        finally:
            connections[DEFAULT_DB_ALIAS].settings_dict["ATOMIC_REQUESTS"] = False


def test_a_missing_schema_is_a_page_with_the_fix(site: Database) -> None:
    client = browser(*VIEWS)
    with site.connect() as owner:
        owner.execute("drop schema outbox, outbox_internal cascade")
    for path in (EVENTS, DELIVERIES):
        assert "manage.py outbox migrate" in page(client, path, 503)


# -- lists --------------------------------------------------------------------------------------------------------


def test_the_newest_events_are_listed_and_an_old_one_is_found(site: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.contrib.django.looking.NEWEST_IDS", 3)
    query(site, "select outbox.emit('type.' || n, '{}') from generate_series(1, 5) n")
    client = browser(*VIEWS)
    shown = page(client, EVENTS)
    assert re.findall(r"type\.\d", shown) == ["type.5", "type.4", "type.3"]
    [(uid,)] = query(site, "select uid::text from outbox.event where type = 'type.1'")
    assert "type.1" in page(client, f"{EVENTS}?q={uid}")
    assert "type." not in page(client, f"{EVENTS}?q=no-uid")


@pytest.mark.parametrize("path", [EVENTS, DELIVERIES])
def test_a_query_that_takes_long_is_cancelled(site: Database, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Django's own queries for a list wait for a lock."""
    monkeypatch.setattr("outbox_relay.contrib.django.looking.SECONDS", 0.2)
    dead_letters(site, "a")
    client = browser(*VIEWS)

    def newest_id(_alias: str) -> int:
        return 10

    def places(_alias: str, _state: str, _sink: str | None) -> list[str]:
        return ["1@s"]

    for replaced in (newest_id, places):  # which have a limit of their own
        monkeypatch.setattr(f"outbox_relay.contrib.django.looking.{replaced.__name__}", replaced)
    page(client, path)
    with site.connect() as owner:
        owner.execute("lock table outbox.event, outbox.delivery")
        assert "seconds and was cancelled" in page(client, path, 503)
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute("show statement_timeout")
        assert cursor.fetchone() == ("0",)


def test_lists_are_bounded_and_count_no_table(site: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.contrib.django.looking.MOST_LISTED", 4)
    dead_letters(site, *"abcdef")
    client = browser(*VIEWS, "retry_eventdelivery")
    for path in (EVENTS, DELIVERIES):
        with CaptureQueriesContext(connections[DEFAULT_DB_ALIAS]) as captured:
            shown = page(client, path)
        assert re.search(r"\b4 (events|deliveries)", shown), shown
        statements = [each["sql"] for each in captured if '"outbox"' in each["sql"]]
        assert statements
        for statement in statements:
            assert "payload" not in statement
            assert "LIMIT" in statement, statement


def test_deliveries_are_listed_by_state_and_sink(site: Database) -> None:
    dead_letters(site, "a", "b")
    client = browser(*VIEWS)
    shown = page(client, DELIVERIES)
    assert shown.count("gone") == 2
    assert "<title" in shown
    assert "gone" not in page(client, f"{DELIVERIES}?state=waiting")
    assert page(client, f"{DELIVERIES}?sink=s").count("gone") == 2
    assert "gone" not in page(client, f"{DELIVERIES}?sink=other")
    assert "gone" not in page(client, f"{DELIVERIES}?state=bad")


@pytest.mark.parametrize(
    "condition", ["key__regex=(", "last_error__regex=[", "sink=%00", "key=a", "state=%00"], ids=lambda given: given[:6]
)
def test_a_condition_that_no_filter_has_is_no_error_of_the_server(site: Database, condition: str) -> None:
    dead_letters(site, "gone")
    client = browser(*VIEWS)
    for path in (EVENTS, DELIVERIES):
        answer = client.get(f"{path}?{condition}", follow=True)
        assert answer.status_code < 500
        assert path == EVENTS or "gone" not in answer.content.decode()


@pytest.mark.parametrize("index", ["x", "-1", "²", "99999999"])
def test_an_index_that_is_none_is_that_of_the_first_form(site: Database, index: str) -> None:
    places = dead_letters(site, "gone")
    client = browser(*VIEWS, "retry_eventdelivery")
    given = {"action": "retry", "_selected_action": places, "index": index, "reason": ["because"]}
    assert "1 retried" in client.post(DELIVERIES, given, follow=True).content.decode()


@pytest.mark.parametrize("place", ["x", "1", "@s", "99999999999999999999@s", "1@\0", "1'@s", "-1@s"])
def test_a_place_that_is_none_finds_no_delivery(site: Database, place: str) -> None:
    dead_letters(site, "a")
    client = browser(*VIEWS, "retry_eventdelivery")
    assert client.get(f"{DELIVERIES}{admin_quote(place)}/change/").status_code == 302
    assert "0 retried" in act(client, "retry", [place])
    assert states(site) == ["dead"]


# -- actions ------------------------------------------------------------------------------------------------------


def test_selected_dead_letters_are_retried(site: Database) -> None:
    places = dead_letters(site, "a", "b", "c")
    client = browser(*VIEWS, "retry_eventdelivery")
    assert "2 retried." in act(client, "retry", places[:2], "mended")
    assert states(site) == ["waiting", "waiting", "dead"]
    assert audited(site) == [("dead retry", "s", 2, "anna@django", "mended")]


def test_a_discard_needs_a_reason(site: Database) -> None:
    places = dead_letters(site, "a", "b")
    client = browser(*VIEWS, "discard_eventdelivery")
    assert "a discard needs one" in act(client, "discard", places[:1], "  ")
    assert "at most 500 characters" in act(client, "discard", places[:1], "x" * 501)
    assert states(site) == ["dead", "dead"]
    assert "1 discarded." in act(client, "discard", places[:1], "of no use")
    assert states(site) == ["dead"]
    assert audited(site) == [("dead discard", "s", 1, "anna@django", "of no use")]


def test_an_action_needs_the_right_of_the_role(site: Database) -> None:
    places = dead_letters(site, "a")
    client = browser(*VIEWS, "retry_eventdelivery")
    with new_role(site, "reader") as user:
        migrate(site.dsn, grants={"read": [user]})
        with site.connect() as owner:
            owner.execute(f"grant all on all tables in schema public to {user}".encode())
        django_site.place(DEFAULT_DB_ALIAS, site, user=user)
        assert "--grant-operate" in act(client, "retry", places)
        connections.close_all()
        with site.connect() as owner:
            owner.execute(f"drop owned by {user}".encode())
    assert states(site) == ["dead"]


def test_a_delivery_that_cannot_be_retried_is_left(site: Database) -> None:
    places = dead_letters(site, "a")
    with site.connect() as owner:
        owner.execute("update outbox.delivery set state = 'held'")
    client = browser(*VIEWS, "retry_eventdelivery")
    assert "0 retried; 1 left" in act(client, "retry", places, path=f"{DELIVERIES}?state=held")
    assert states(site) == ["held"]
