"""Handlers and their argument: what is imported, what is refused, what a delivery accepts."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.trace import NoOpTracer

import outbox_relay
from outbox_relay.service.python_sinks import worker_environment
from outbox_relay.service.tracing.traced_sinks import traced_sink
from outbox_relay.settings import load
from outbox_relay.sinks import ExtendsDeliveries, RunsHandlers
from outbox_relay.worker.answers import MOST_CHARS, described
from outbox_relay.worker.handler import Unusable
from outbox_relay.worker.handler import load as load_handler
from outbox_relay.worker.statements import TransactionEnded, check_statement
from tests.support.memory_sink import MemorySink


@pytest.mark.processes
def test_importing_the_package_imports_no_driver_and_no_class_of_handlers() -> None:
    code = "import sys, outbox_relay; print([m for m in ('psycopg', 'outbox_relay.delivery') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("name", "is_async"), [("plain", False), ("asynchronous", True)])
def test_a_handler_is_loaded(name: str, is_async: bool) -> None:
    assert load_handler(f"tests.support.handlers:{name}").is_async == is_async


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tests.missing:send", "there is no module tests.missing"),
        ("tests.support.handlers:missing", "has no missing"),
        ("tests.support.handlers:POISON", "is not callable"),
        ("tests.support.handlers:no_argument", "wrong signature"),
        ("tests.support.handlers:Abrupt", "is a class"),
    ],
)
def test_what_is_no_handler_is_refused_with_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(Unusable, match=sentence):
        load_handler(name)


def test_the_text_of_an_exception_is_short_and_printable() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert described(ValueError("a\nb\x1b[31m")) == "ValueError: a b [31m"
    assert len(described(ValueError("x" * 10_000))) == MOST_CHARS
    assert described(Silent()) == "Silent"


CONTROL = [
    *("commit", "  COMMIT;", "-- x\ncommit", "/* x */ end", "/* a /* b */ c */ commit", "rollback", "begin"),
    *("start transaction", "abort", "prepare transaction 'x'", "rollback and chain", b"commit", ";;commit"),
    *("insert into a values (1); commit", "select ';' ; commit", "select $$;$$; rollback; x", "select 1;/* x */commit"),
    *("select $a$ $$ ; $a$; end", "select 'a''; x'; commit", r"select e'\'; x'; commit", 'select "a;" ; commit'),
    *("select a$b$; commit; select $b$", "select 1-2;commit", "select 1/2; commit", "select 1 -- '\n; commit"),
    "create function f() returns int begin atomic select 1; end; commit",
]
OTHERS = [
    *("rollback to savepoint a", "rollback work to a", "select 1", "savepoint a", "release savepoint a", ""),
    *("select 'commit'", "select ';commit'", "select 1; -- commit", "select 1; select $$; commit;$$"),
    *("select case when true then 1 end; select 1", "insert into a values ('x;commit')", r"select e'\'; commit'"),
    *("select 1 /* ; commit */", "do $x$ begin perform 1; end $x$", "update a set b=1; update c set d=2"),
    *("select commit from a", 'select 1; select "commit"', "select '; commit", "select $a$; commit"),
    "create function f() returns int language sql begin atomic select 1; select case when true then 1 end; end",
]
LONG = (
    "a,",
    "/*",
    "'",
    "$",
    "$a$",
    "/* /*",
    "-",
    "- ",
    "''",
    "$a$ $b$",
    "$a",
    "create x;",
    "create begin ",
    "select 1;",
)


@pytest.mark.parametrize("statement", CONTROL)
def test_a_script_that_ends_the_transaction_is_refused(statement: str | bytes) -> None:
    with pytest.raises(TransactionEnded):
        check_statement(statement, None)


@pytest.mark.parametrize("statement", OTHERS)
def test_any_other_script_is_not(statement: str) -> None:
    check_statement(statement, None)


def test_a_long_script_is_looked_at_in_time() -> None:
    """Nested comments took minutes with a pattern for them."""
    began = time.process_time()
    for part in LONG:
        check_statement(f"select {part * 20_000};", None)
        check_statement(f"{part * 20_000};", None)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), True, "5", 1e12])
def test_a_delay_that_is_none_is_refused(after: Any) -> None:
    with pytest.raises(ValueError, match="after must be"):
        outbox_relay.Retry(after=after)


def test_a_delay_may_be_a_timedelta() -> None:
    assert outbox_relay.Retry(timedelta(minutes=1), "busy").after == 60.0
    assert outbox_relay.Retry().after is None


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 86_401, True])
def test_an_extension_that_is_none_is_refused(seconds: float) -> None:
    now = datetime.now(UTC)
    delivery = outbox_relay.Delivery(UUID(int=1), "a", None, b"1", "application/json", {}, 1, now, None, now)
    with pytest.raises(ValueError, match="seconds must be"):
        delivery.extend(seconds)
    assert delivery.json() == 1
    assert (delivery.tenant, delivery.connection) == (None, None)


def test_a_worker_gets_no_variable_with_a_secret_of_the_relay(tmp_path: Any) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(
        '[database]\ndsn = "host=a"\n[sinks.crm]\ntype = "webhook"\nurl = "https://example.com"\n'
        'secrets = ["whsec_ZXhhbXBsZS1vZi1hLW5ldy1zZWNyZXQtLS0t"]\nheaders = { x-token = { env = "CRM_TOKEN" } }\n'
    )
    environ = {"OUTBOX_RELAY_DATABASE__DSN": "x", "PGPASSWORD": "x", "CRM_TOKEN": "x", "PATH": "/bin", "SHOP": "1"}
    assert worker_environment(load(file, {}), environ) == {"PATH": "/bin", "SHOP": "1"}


async def test_a_fault_and_the_ends_of_calls_pass_through_traces() -> None:
    class Faulty(MemorySink):
        fault = "no worker"

        def deadlines(self) -> dict[int, float]:
            return {1: 2.0}

    for sink in (Faulty(), traced_sink(NoOpTracer(), "work", Faulty())):
        assert isinstance(sink, RunsHandlers)
        assert isinstance(sink, ExtendsDeliveries)
        assert (sink.fault, sink.deadlines()) == ("no worker", {1: 2.0})
    plain = traced_sink(NoOpTracer(), "work", MemorySink())
    assert isinstance(plain, RunsHandlers)
    assert plain.fault is None
