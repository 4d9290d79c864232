"""Which attempts are recorded, what of them, and as which parameters of a statement."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest

from outbox_relay.domain.attempts import AttemptRecord, RecordAttempts, delivery_record, failure_record
from outbox_relay.domain.outcomes import (
    DELIVERED,
    Attempt,
    Delivered,
    Failed,
    Refused,
    RetryLater,
    RetryPolicy,
    Unavailable,
    Verdict,
    decide,
)
from outbox_relay.postgres.parameters import DETAIL_BYTES, detail_json, record_columns
from outbox_relay.relay.calls import new_row_lease
from outbox_relay.sinks.contract.handing import an_event

EVENT = an_event()
POLICY = RetryPolicy(attempts=3, base_seconds=1.0, max_seconds=9.0, jitter=0.0)
ATTEMPT = Attempt("http_500", 0.0125, "oops\x00\ud800", (("connect", 0.01),))
NOW = 7.0


def outcome(verdict: Verdict, failures: int, record: RecordAttempts = "failures") -> str | None:
    """Return the recorded outcome of an attempt that is not delivered; None if it is not recorded."""
    found = failure_record(record, EVENT, decide(failures, verdict, POLICY, 0.0), failures, NOW)
    return found and found.outcome


@pytest.mark.parametrize(
    ("verdict", "failures", "recorded"),
    [
        (Failed("no"), 0, "failed"),
        (Failed("no"), 1, "failed"),
        (Failed("no"), 2, "dead"),
        (Refused("never"), 0, "refused"),
        (Refused("never"), 2, "refused"),
        (Unavailable("down"), 1, None),
        (Unavailable("topic", part="t"), 0, None),
        (Unavailable("topic", part="t"), 2, None),
        (Unavailable("behind", behind=True), 1, None),
        (DELIVERED, 1, None),
    ],
)
def test_a_failure_is_recorded_if_it_counts(verdict: Verdict, failures: int, recorded: str | None) -> None:
    assert outcome(verdict, failures) == recorded
    assert outcome(verdict, failures, "all") == recorded
    assert outcome(verdict, failures, "none") is None


@pytest.mark.parametrize(
    ("record", "failures", "recorded"),
    [("none", 0, False), ("none", 3, False), ("failures", 1, True), ("all", 0, True)],
)
def test_a_delivery_has_a_record_unless_none_is_wanted(record: RecordAttempts, failures: int, recorded: bool) -> None:
    found = delivery_record(record, EVENT, Delivered(204, 0.5), failures, NOW)
    wanted = AttemptRecord(EVENT.id, EVENT.uid, failures + 1, "delivered", NOW, 0.5, 204)
    assert found == (wanted if recorded else None)


@pytest.mark.parametrize(("record", "recorded"), [("none", False), ("failures", False), ("all", True)])
def test_a_delivery_without_an_attempt_before_is_no_end_of_failures(record: RecordAttempts, recorded: bool) -> None:
    """Goes red when each delivery carries a record that the database drops, or a wanted one is missing."""
    found = delivery_record(record, EVENT, Delivered(204, 0.5), 0, NOW, tried=False)
    assert (found is not None) == recorded


def test_a_failure_is_recorded_with_its_details_and_none_of_the_payload() -> None:
    found = failure_record("failures", EVENT, RetryLater(1.0, 2, "answered 500", 500, ATTEMPT), 1, NOW)
    assert found == AttemptRecord(
        *(EVENT.id, EVENT.uid, 2, "failed", NOW, 0.0125, 500, "answered 500"),
        {"code": "http_500", "answer": "oops  ", "steps": {"connect": 0.01}},
    )


def test_details_of_a_delivery_have_no_character_that_the_database_refuses() -> None:
    found = delivery_record("all", EVENT, Delivered(detail={"topic": "a\x00\ud800b", "offset": 3}), 0, NOW)
    assert found is not None
    assert found.detail == {"topic": "a  b", "offset": 3}


def test_details_that_are_too_large_lose_the_answer_first() -> None:
    assert detail_json(None) is None
    assert detail_json({}) is None
    large = "ü" * DETAIL_BYTES
    assert json.loads(detail_json({"code": "http_500", "answer": large}) or "") == {"code": "http_500"}
    assert detail_json({"code": large}) is None
    assert detail_json({"answer": large}) is None
    fits = "x" * (DETAIL_BYTES - len('{"answer": ""}'))
    assert detail_json({"answer": fits}) == f'{{"answer": "{fits}"}}'


def test_a_row_without_a_record_has_no_value_in_any_column() -> None:
    record = AttemptRecord(1, EVENT.uid, 2, "failed", time.monotonic() - 5.0, 0.0123456, error='said "no", {\\}')
    columns = record_columns([None, record])
    age = columns.pop("record_age").removeprefix("{NULL,").removesuffix("}")
    assert 5.0 <= float(age) < 60.0
    assert (columns["record_number"], columns["record_milliseconds"]) == ("{NULL,2}", "{NULL,12.346}")
    assert columns["record_error"] == '{NULL,"said \\"no\\", {\\\\}"}'
    assert set(record_columns([None]).values()) == {"{}"}


def test_a_lease_contains_the_time_at_which_its_delivery_began() -> None:
    began = datetime(2026, 11, 23, 4, 5, 6, 789_000, tzinfo=UTC)
    one, other = new_row_lease(began), new_row_lease(began)
    assert one != other
    assert (one.version, one.variant) == (7, "specified in RFC 4122")
    assert one.int >> 80 == int(began.timestamp() * 1000)
