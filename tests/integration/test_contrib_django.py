"""Emitting and consuming in Django: in atomic blocks of one of several databases, and refused outside of them."""

from __future__ import annotations

import unittest
import uuid
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory, TestCase, override_settings
from django.urls import path

from outbox_relay.contrib.django import (
    Event,
    InvalidEvent,
    cancel,
    emit,
    emit_many,
    once,
    once_per_event,
    reschedule,
)
from tests.support import django_site
from tests.support.database import Database, query

LOGGED = "select type, key, convert_from(payload, 'UTF8'), headers, deliver_at, uid from outbox.event order by id"
django_site.set_up()


@pytest.fixture(autouse=True)
def shop(database: Database) -> Generator[Database]:
    """Yield a database that Django knows as ``shop``; ``default`` is one that does not exist."""
    django_site.place("shop", database)
    django_site.place("default", database, name="nowhere")
    yield database
    connections.close_all()


def execute(statement: str) -> None:
    """Execute a statement over Django's connection."""
    with connections["shop"].cursor() as cursor:
        cursor.execute(statement)


def test_an_event_is_committed_and_rolled_back_with_the_block(shop: Database) -> None:
    execute("create table orders (id bigint primary key)")
    with transaction.atomic(using="shop"):
        execute("insert into orders values (1)")
        kept = emit("kept", {}, using="shop")
        assert query(shop, "select count(*) from outbox.event") == [(0,)]
        with transaction.atomic(using="shop"):
            emit("undone.savepoint", {}, using="shop")
            transaction.set_rollback(True, using="shop")
    with transaction.atomic(using="shop"):
        emit_many([Event("undone", {})], using="shop")
        transaction.set_rollback(True, using="shop")
    assert query(shop, "select type, uid from outbox.event") == [("kept", kept)]


def test_every_argument_is_stored(shop: Database) -> None:
    at, uid = datetime(2020, 1, 2, 3, 4, 5, 678901, UTC), uuid.UUID(int=7)
    with transaction.atomic(using="shop"):
        found = emit("t", {"a": "ö"}, key="schlüssel", headers={"x": "ä"}, deliver_at=at, uid=uid, using="shop")
        own = emit_many([Event("raw", b"\xc3\xbc", content_type="text/plain"), Event("b", 1)], using="shop")
        assert emit_many([], using="shop") == []
    assert found == uid
    assert query(shop, LOGGED) == [
        ("t", "schlüssel", '{"a":"ö"}', {"x": "ä"}, at, uid),
        ("raw", None, "ü", None, None, own[0]),
        ("b", None, "1", None, None, own[1]),
    ]


def test_unique_keys_and_changes_of_scheduled_events(shop: Database) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with transaction.atomic(using="shop"):
        first = emit("t", {}, tenant="acme", priority=5, unique_key="k", deliver_at=later, using="shop")
        again = emit_many([Event("t", {}), Event("t", {}, unique_key="k")], using="shop")
        assert again[1] == first
        assert reschedule(first, later + timedelta(hours=1), using="shop") is True
        assert cancel(first, using="shop") is True
        assert cancel(again[0], using="shop") is False
    with pytest.raises(TransactionManagementError, match="was changed outside an atomic block of database 'shop'"):
        cancel(first, using="shop")
    assert cancel(first, using="shop", require_atomic=False) is False
    assert query(shop, "select tenant, priority from outbox.event order by id") == [(None, None)]
    assert query(shop, "select from outbox.scheduled") == []


def test_an_event_outside_an_atomic_block_is_refused_unless_told(shop: Database) -> None:
    with pytest.raises(TransactionManagementError, match=r"atomic\(using='shop'\)"):
        emit("t", {}, using="shop")
    with pytest.raises(TransactionManagementError):
        emit_many([Event("t", {})], using="shop")
    emit("told", {}, using="shop", require_atomic=False)
    emit_many([Event("told.too", {})], using="shop", require_atomic=False)
    assert query(shop, "select type from outbox.event order by id") == [("told",), ("told.too",)]


def order_view(request: HttpRequest) -> HttpResponse:
    """Place an order, and fail afterwards if the request says so."""
    emit("order.created", {"id": 1}, using="shop")
    execute("insert into orders values (1)")
    if request.GET:
        raise RuntimeError
    return HttpResponse(status=201)


def test_the_transaction_of_a_request_has_its_events(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["shop"].settings_dict, "ATOMIC_REQUESTS", True)
    execute("create table orders (id bigint)")
    client = Client(raise_request_exception=False)
    apart = transaction.non_atomic_requests(using="shop")(partial(order_view))
    with override_settings(ROOT_URLCONF=(path("orders", order_view), path("apart", apart))):
        assert client.get("/orders?fail=1").status_code == 500
        assert query(shop, "select count(*) from orders") == query(shop, "select count(*) from outbox.event") == [(0,)]
        assert client.get("/apart").status_code == 500, "emit refuses"
        assert client.get("/orders").status_code == 201
    assert query(shop, "select type from outbox.event") == [("order.created",)]


def test_a_database_that_a_test_case_may_not_use_takes_no_event(shop: Database, empty_database: Database) -> None:
    """Its event would stay after the test. Red without the cursor of Django, if the connection is open already."""
    django_site.place("default", empty_database)
    connections["shop"].ensure_connection()

    class Orders(TestCase):
        def runTest(self) -> None:  # noqa: N802 - the name of unittest
            for call in (lambda: emit("t", {}, using="shop"), lambda: once("billing", uuid.uuid4(), using="shop")):
                with (
                    pytest.raises(AssertionError, match="not allowed in this test"),
                    transaction.atomic(using="shop"),
                ):
                    call()

    Orders.databases = {"default"}
    result = unittest.TestSuite([Orders()]).run(unittest.TestResult())
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    assert query(shop, "select count(*) from outbox.event") == [(0,)]


def test_a_refused_event_leaves_the_block_to_its_savepoint(shop: Database) -> None:
    with transaction.atomic(using="shop"):
        with pytest.raises(InvalidEvent, match="key") as caught, transaction.atomic(using="shop"):
            emit("t", {"card": 4711}, key="k" * 2000, using="shop")
        assert caught.value.index is None
        assert "4711" not in str(caught.value)
        with pytest.raises(InvalidEvent, match=r"^event 1: ") as caught, transaction.atomic(using="shop"):
            emit_many([Event("a", {}), Event("", {})], using="shop")
        assert caught.value.index == 1
        emit("kept", {}, using="shop")
    assert query(shop, "select type from outbox.event") == [("kept",)]


# -- the inbox ----------------------------------------------------------------------------------------------------


def test_an_event_is_handled_once(shop: Database) -> None:
    uid = uuid.uuid4()
    with transaction.atomic(using="shop"):
        assert once("billing", uid, using="shop")
        transaction.set_rollback(True, using="shop")
    with transaction.atomic(using="shop"):
        assert once("billing", str(uid), using="shop")
        assert query(shop, "select count(*) from outbox.inbox") == [(0,)]
    with transaction.atomic(using="shop"):
        assert not once("billing", uid, using="shop")
        assert once("mail", uid, using="shop")
    assert query(shop, "select consumer, uid from outbox.inbox order by 1") == [("billing", uid), ("mail", uid)]


def test_a_handler_is_called_once_for_an_event(shop: Database) -> None:
    handled: list[str] = []
    calls = 0

    @once_per_event("billing", using="shop")
    def invoice(request: HttpRequest) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the first time fails")
        handled.append(request.headers["webhook-id"])
        return "done"

    uid = str(uuid.uuid4())
    request = RequestFactory().post("/", headers={"webhook-id": uid})
    with pytest.raises(RuntimeError, match="first time"), transaction.atomic(using="shop"):
        invoice(request)
    for wanted in ("done", None):
        with transaction.atomic(using="shop"):
            assert invoice(request) == wanted
    replayed = RequestFactory().post("/", headers={"webhook-id": uid, "outbox-replay": "7"})
    with transaction.atomic(using="shop"):
        assert invoice(replayed) == "done"
    with pytest.raises(TransactionManagementError, match=r"atomic\(using='shop'\)"):
        invoice(request)
    assert (invoice.__name__, handled) == ("invoice", [uid, uid])
    names = query(shop, "select consumer from outbox.inbox order by 1")
    assert names == [("billing",), ("billing/replay-7",)]
