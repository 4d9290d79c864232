"""The kinds of all error codes of Kafka's client."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from outbox_relay.sinks.kafka.errors import ERROR_KINDS, ErrorKind, error_kind

PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"
CODES = {
    name: value
    for name, value in vars(KafkaError).items()
    if name.strip("_").isupper() and not name.startswith("__") and isinstance(value, int)
}


@dataclass
class Reported:
    """An error as the client reports it."""

    code_name: str
    is_fatal: bool = False

    def name(self) -> str:
        return self.code_name

    def fatal(self) -> bool:
        return self.is_fatal


def test_every_code_of_the_client_is_in_the_table() -> None:
    assert sorted(CODES.keys() - ERROR_KINDS.keys()) == []


def test_the_table_names_codes_as_the_client_does() -> None:
    named = {KafkaError(value).name() for value in CODES.values()}
    assert sorted(named - ERROR_KINDS.keys()) == []
    assert sorted(ERROR_KINDS.keys() - named) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NO_ERROR", ErrorKind.DELIVERED),
        ("MSG_SIZE_TOO_LARGE", ErrorKind.MESSAGE),
        ("INVALID_RECORD", ErrorKind.MESSAGE),
        ("INVALID_TIMESTAMP", ErrorKind.DESTINATION),
        ("UNKNOWN_TOPIC_OR_PART", ErrorKind.TOPIC),
        ("_UNKNOWN_PARTITION", ErrorKind.TOPIC),
        ("TOPIC_AUTHORIZATION_FAILED", ErrorKind.TOPIC),
        ("CLUSTER_AUTHORIZATION_FAILED", ErrorKind.DESTINATION),
        ("_TRANSPORT", ErrorKind.DESTINATION),
        ("_MSG_TIMED_OUT", ErrorKind.DESTINATION),
        ("_PURGE_QUEUE", ErrorKind.WITHDRAWN),
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", ErrorKind.FATAL),
        ("_FENCED", ErrorKind.FATAL),
        ("_GAPLESS_GUARANTEE", ErrorKind.FATAL),
    ],
)
def test_codes_have_the_kind_that_their_meaning_requires(name: str, expected: ErrorKind) -> None:
    assert error_kind(cast("Any", Reported(name))) is expected


def test_an_unknown_code_is_not_the_events_fault() -> None:
    unknown = KafkaError(9_999)
    assert unknown.name() not in ERROR_KINDS
    assert error_kind(unknown) is ErrorKind.DESTINATION


@pytest.mark.parametrize("name", ["_TRANSPORT", "MSG_SIZE_TOO_LARGE", "ERR_9999?"])
def test_any_fatal_error_ends_the_producer(name: str) -> None:
    assert error_kind(cast("Any", Reported(name, is_fatal=True))) is ErrorKind.FATAL


def test_the_page_classifies_codes_as_the_table_does() -> None:
    rows = {
        "a record can never be accepted": ErrorKind.MESSAGE,
        "a topic accepts no records": ErrorKind.TOPIC,
        "the cluster is down": ErrorKind.DESTINATION,
        "the producer is broken": ErrorKind.FATAL,
    }
    lines = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for begin, expected in rows.items():
        (codes,) = [cells[2] for cells in lines if cells[1].strip().startswith(begin)]
        named = re.findall(r"`(\w+)`", codes)
        assert len(named) > 3
        assert {error_kind(cast("Any", Reported(name))) for name in named} == {expected}
