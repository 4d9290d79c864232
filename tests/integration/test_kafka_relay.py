"""The Kafka sink in a relay: topics in trouble, several clusters, and what status shows."""

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database
from tests.support.kafka import Administration, KafkaBroker
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}.{{type}}"
pending_max = {pending_max}
# One broker cannot hold three copies: what is missing stays missing, until the test makes it.
create_topics = {{ partitions = 1, replication_factor = 3 }}
[sinks.events.circuit]
probe_seconds = 0.2
probe_max_seconds = 1
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"*" = ["events"]
"""


def emit(database: Database, kind: str, numbers: range, key: str = "k") -> None:
    """Emit events of one type, with five keys in turn."""
    events = [outbox.Event(kind, {"n": n}, key=f"{key}{n % 5}") for n in numbers]
    with psycopg.connect(database.dsn) as connection:
        outbox.emit_many(connection, events)


def numbers(kafka: KafkaBroker, topic: str) -> list[int]:
    """Return the arrived numbers in the order of each partition."""
    return [json.loads(record.value or b"")["n"] for record in kafka.read_all(topic)]


def shown(database: Database) -> dict[str, Any]:
    """Return the state of the sink from its tables."""
    with psycopg.connect(database.dsn) as connection:
        rows = dict(connection.execute("select state, count(*) from outbox.delivery group by state").fetchall())
        attempts = connection.execute("select coalesce(max(attempts), 0) from outbox.delivery").fetchone()
        sink = connection.execute("select circuit, last_error from outbox.sink").fetchone()
    assert attempts is not None
    assert sink is not None
    return {"waiting": 0, "held": 0, "dead": 0, **rows, "attempts": attempts[0], "circuit": sink[0], "error": sink[1]}


def relay(database: Database, kafka: KafkaBroker, topic: str, directory: Path, pending_max: int) -> RelayService:
    text = CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=kafka.bootstrap, pending_max=pending_max)
    return RelayService(directory, text)


@pytest.fixture
def good(real_kafka: KafkaBroker, topic: str) -> str:
    """Create a topic; `bad` does not exist."""
    Administration(real_kafka.bootstrap).create_topic(f"{topic}.good", 2)
    return f"{topic}.good"


def test_events_of_a_missing_topic_wait_as_rows_while_others_flow(
    database: Database, real_kafka: KafkaBroker, topic: str, good: str, tmp_path: Path
) -> None:
    with relay(database, real_kafka, topic, tmp_path, 100_000) as service:
        emit(database, "bad", range(200), key="bad")
        emit(database, "good", range(300))
        until(lambda: len(numbers(real_kafka, good)) == 300, seconds=30, what="the good topic gets its events")
        until(lambda: shown(database)["waiting"] + shown(database)["held"] == 200, seconds=30, what="others wait")
        until(lambda: f"{topic}.bad" in (shown(database)["error"] or ""), seconds=10, what="the sink names the topic")
        found = shown(database)
        assert (found["attempts"], found["dead"], found["circuit"]) == (0, 0, "closed")
        said = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
        [trouble] = [finding["evidence"] for finding in said if finding["id"] == "topics-in-trouble"]
        assert f"topic {topic}.bad" in trouble
        assert good not in trouble
        Administration(real_kafka.bootstrap).create_topic(f"{topic}.bad", 1)
        until(lambda: shown(database)["waiting"] + shown(database)["held"] == 0, seconds=60, what="nothing waits")
        assert service.stop() == 0
    arrived = numbers(real_kafka, f"{topic}.bad")
    assert sorted(arrived) == list(range(200))
    for key in range(5):
        assert [n for n in arrived if n % 5 == key] == list(range(key, 200, 5))


def test_a_key_does_not_overtake_its_event_that_waits_for_a_topic(
    database: Database, real_kafka: KafkaBroker, topic: str, good: str, tmp_path: Path
) -> None:
    with relay(database, real_kafka, topic, tmp_path, 100_000) as service:
        emit(database, "bad", range(1))
        emit(database, "good", range(50))
        until(lambda: len(numbers(real_kafka, good)) == 40, seconds=30, what="the other keys are delivered")
        assert [n for n in numbers(real_kafka, good) if n % 5 == 0] == []
        Administration(real_kafka.bootstrap).create_topic(f"{topic}.bad", 1)
        until(lambda: len(numbers(real_kafka, good)) == 50, seconds=60, what="the key is delivered")
        assert service.stop() == 0
    assert [n for n in numbers(real_kafka, good) if n % 5 == 0] == list(range(0, 50, 5))


def check(database: Database, kafka: KafkaBroker, topic: str, directory: Path, producer: str = "") -> tuple[int, str]:
    """Return the exit code of `check --online` and its lines on stderr."""
    text = CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=kafka.bootstrap, pending_max=1)
    file = directory / "relay.toml"
    file.write_text(text.replace("[routes]", f"{producer}\n[routes]").replace(".{type}", ""))
    ended = inside("check", "--online", "-c", file)
    return ended.code, ended.err


def test_check_online_warns_about_events_that_the_topic_would_refuse(
    database: Database, real_kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    Administration(real_kafka.bootstrap).create_topic(topic, 1, config={"max.message.bytes": "3000000"})
    assert check(database, real_kafka, topic, tmp_path) == (0, "")
    migrate(database.dsn, max_payload_bytes=3000001)
    code, said = check(database, real_kafka, topic, tmp_path)
    assert code == 0
    assert said == (
        "warning: sinks.events: events may have payloads of 3000001 bytes (the ceiling of the database), "
        f"but topic {topic} takes at most 3000000 bytes (max.message.bytes): "
        "raise that limit, or lower the ceiling (migrate --max-payload-bytes); larger events would end dead\n"
    )
    _, said = check(database, real_kafka, topic, tmp_path, '"message.max.bytes" = 2000000')
    assert 'but the producer\'s "message.max.bytes" is 2000000' in said
    _, said = check(database, real_kafka, f"{topic}.of.{{key}}", tmp_path)
    assert "but the brokers take at most 1048588 bytes (message.max.bytes)" in said
