"""Handlers and their argument: what is imported, what is refused, what a delivery accepts."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

import outbox_relay
from outbox_relay.sinks.python.handler import MOST_CHARS, Unusable, described, load


@pytest.mark.processes
def test_importing_the_package_imports_no_driver_and_no_class_of_handlers() -> None:
    code = "import sys, outbox_relay; print([m for m in ('psycopg', 'outbox_relay.delivery') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("name", "is_async"), [("plain", False), ("asynchronous", True)])
def test_a_handler_is_loaded(name: str, is_async: bool) -> None:
    assert load(f"tests.support.handlers:{name}").is_async == is_async


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tests.missing:send", "there is no module tests.missing"),
        ("tests.support.handlers:missing", "has no missing"),
        ("tests.support.handlers:POISON", "is no function"),
        ("tests.support.handlers:no_argument", "wrong signature"),
        ("tests.support.handlers:Abrupt", "is no function"),
        ("tests.support.handlers:generator", "is a generator"),
    ],
)
def test_what_is_no_handler_is_refused_with_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(Unusable, match=sentence):
        load(name)


def test_the_text_of_an_exception_is_short_and_printable() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert described(ValueError("a\nb\x1b[31m")) == "ValueError: a b [31m"
    assert len(described(ValueError("x" * 10_000))) == MOST_CHARS
    assert described(Silent()) == "Silent"


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
