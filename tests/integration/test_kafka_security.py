"""The Kafka sink and secured brokers: TLS, SASL, access rules, and faults of each."""

import json
import signal
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.fields import Secret
from outbox_relay.sinks.contract.handing import hand_over_all, some_events
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.command import inside
from tests.support.database import Database
from tests.support.kafka import Record
from tests.support.kafka.delivering import deliver, opening
from tests.support.kafka.secured import SecuredBroker
from tests.support.service import RelayService
from tests.support.wait import until

pytestmark = [pytest.mark.xdist_group("secured broker"), pytest.mark.slow]

STALL_SECONDS = 2.0
PASSWORD = "correct-horse"


@pytest.fixture(scope="session")
def secured() -> Generator[SecuredBroker]:
    """Start a broker where the user relay may write to topics that begin with `open.`."""
    broker = SecuredBroker()
    if not broker.real:
        broker.close()
        pytest.skip("needs Apache Kafka; the substitute knows no users")
    with broker:
        admin = broker.administration
        admin.set_password("relay", PASSWORD)
        for user in ("relay", "plain"):
            admin.allow(user, "WRITE", topic="open.")
        yield broker


@pytest.fixture
def open_topic(secured: SecuredBroker, topic: str) -> str:
    """Create a topic that the user may write to."""
    secured.administration.create_topic(f"open.{topic}", 2)
    return f"open.{topic}"


@pytest.fixture
def sink_of() -> Generator[Callable[..., Any]]:
    """Open sinks: `sink_of(topic, settings, **more)`."""
    with opening(STALL_SECONDS, KafkaSink) as open_sink:
        yield open_sink


def arrived(secured: SecuredBroker, topic: str) -> list[Record]:
    return secured.read_all(topic)


def delivers(sink: KafkaSink, secured: SecuredBroker, topic: str) -> None:
    events = some_events(10)
    hand_over_all(sink, events)
    assert len(arrived(secured, topic)) == 10


def refused(sink: KafkaSink) -> str:
    """Return the reason why an event is not delivered now."""
    (verdict,) = deliver(sink, some_events(1))
    assert isinstance(verdict, Unavailable)
    return verdict.reason


def test_scram_over_tls_with_the_password_in_a_file(
    secured: SecuredBroker, open_topic: str, sink_of: Any, tmp_path: Path
) -> None:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    sink = sink_of(open_topic, secured.scram(), secrets={"sasl.password": partial(Secret(file=path).read, str)})
    assert sink.check() is None
    delivers(sink, secured, open_topic)


def test_a_client_certificate(secured: SecuredBroker, open_topic: str, sink_of: Any) -> None:
    sink = sink_of(open_topic, secured.mtls(secured.certificates.client))
    delivers(sink, secured, open_topic)


def test_a_bearer_token(secured: SecuredBroker, open_topic: str, sink_of: Any) -> None:
    sink = sink_of(open_topic, secured.oauth("relay"))
    delivers(sink, secured, open_topic)


def test_a_wrong_password_is_reported_and_a_new_one_in_the_file_is_used_without_a_restart(
    secured: SecuredBroker, open_topic: str, sink_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.delivery.CHECK_SECONDS", 1.0)
    path = tmp_path / "password"
    path.write_text("hunter2-and-more")
    sink = sink_of(open_topic, secured.scram(), secrets={"sasl.password": partial(Secret(file=path).read, str)})
    for reason in (sink.check() or "", refused(sink)):
        assert "Authentication failed" in reason
        assert "hunter2" not in reason
    path.write_text(PASSWORD)
    assert sink.check() is None
    delivers(sink, secured, open_topic)


def test_an_expired_client_certificate_is_reported_and_a_new_one_is_used(
    secured: SecuredBroker, open_topic: str, sink_of: Any, tmp_path: Path
) -> None:
    path = tmp_path / "client.pem"
    path.write_bytes(secured.certificates.expired_client.read_bytes())
    sink = sink_of(open_topic, secured.mtls(path))
    assert "certificate" in (refused(sink)).lower()
    path.write_bytes(secured.certificates.client.read_bytes())
    delivers(sink, secured, open_topic)


def test_a_denied_topic_is_reported_and_used_once_it_is_allowed(
    secured: SecuredBroker, topic: str, sink_of: Any
) -> None:
    denied = f"closed.{topic}"
    secured.administration.create_topic(denied, 2)
    sink = sink_of(denied, secured.scram(PASSWORD))
    reason = refused(sink)
    assert denied in reason
    assert "TOPIC_AUTHORIZATION_FAILED" in reason
    secured.administration.allow("relay", "WRITE", topic=denied)
    delivers(sink, secured, denied)


def test_a_right_revoked_meanwhile_loses_nothing(secured: SecuredBroker, topic: str, sink_of: Any) -> None:
    """The topic may still be described, so only a record shows that writing is denied."""
    name = f"taken.{topic}"
    admin = secured.administration
    admin.create_topic(name, 2)
    for operation in ("WRITE", "DESCRIBE"):
        admin.allow("relay", operation, topic=name)
    sink = sink_of(name, secured.scram(PASSWORD))
    events = some_events(40)
    assert deliver(sink, events[:20]) == [DELIVERED] * 20
    admin.take_back("relay", "WRITE", topic=name)
    assert "TOPIC_AUTHORIZATION_FAILED" in refused(sink)
    admin.allow("relay", "WRITE", topic=name)
    hand_over_all(sink, events[20:])
    found = [record.headers["id"] for record in arrived(secured, name)]
    assert {event.uid.encode() for event in events} <= set(found)


# -- in a relay's process ------------------------------------------------------------------------------------------

CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 9
[sinks.events]
type = "kafka"
topic = "{topic}"
producer = {producer}
[sinks.events.circuit]
probe_seconds = 0.5
probe_max_seconds = 1
[routes]
"*" = ["events"]
"""
EVENTS = 60
WRONG = "hunter2-and-more"


class Case(NamedTuple):
    """A fault that exists when the relay starts, and its repair."""

    topic: str
    producer: Mapping[str, str]
    files: Mapping[str, Path]
    said: str
    mend: Callable[[], object]


def relay_of(database: Database, case: Case, directory: Path) -> RelayService:
    given = [f'"{name}" = "{value}"' for name, value in case.producer.items()]
    given += [f'"{name}" = {{ file = "{path}" }}' for name, path in case.files.items()]
    text = CONFIG.format(dsn=database.dsn, topic=case.topic, producer=f"{{{', '.join(given)}}}")
    return RelayService(directory, text)


def emit(database: Database, numbers: range, kind: str = "order") -> None:
    events = [outbox.Event(kind, {"n": n}, key=f"k{n % 5}") for n in numbers]
    with psycopg.connect(database.dsn) as connection:
        outbox.emit_many(connection, events)


def status(relay: RelayService) -> dict[str, Any]:
    ended = inside("status", "--json", "-c", relay.config)
    assert ended.code == 0, ended.err
    return ended.json["sinks"]["events"]


def numbers(secured: SecuredBroker, topic: str) -> dict[bytes | None, list[int]]:
    """Return the first occurrences of the arrived numbers by key."""
    found: dict[bytes | None, dict[int, None]] = {}
    for record in arrived(secured, topic):
        found.setdefault(record.key, {})[json.loads(record.value or b"")["n"]] = None
    return {key: list(of_key) for key, of_key in found.items()}


def in_order(count: int) -> dict[bytes | None, list[int]]:
    return {f"k{key}".encode(): list(range(key, count, 5)) for key in range(5)}


def wrong_password(secured: SecuredBroker, topic: str, directory: Path) -> Case:
    path = directory / "password"
    path.write_text(WRONG)
    mend = lambda: path.write_text(PASSWORD)  # noqa: E731
    return Case(f"open.{topic}", secured.scram(), {"sasl.password": path}, "Authentication failed", mend)


def denied_topic(secured: SecuredBroker, topic: str, directory: Path) -> Case:
    path = directory / "password"
    path.write_text(PASSWORD)
    name = f"closed.{topic}"
    mend = lambda: secured.administration.allow("relay", "WRITE", topic=name)  # noqa: E731
    return Case(name, secured.scram(), {"sasl.password": path}, f"topic {name}: TOPIC_AUTHORIZATION_FAILED", mend)


@pytest.mark.parametrize(
    "make",
    [
        wrong_password,
        pytest.param(denied_topic, marks=pytest.mark.thorough),
    ],
)
def test_status_has_the_reason_and_after_the_repair_all_events_arrive_without_a_restart(
    secured: SecuredBroker, database: Database, topic: str, tmp_path: Path, make: Callable[..., Case]
) -> None:
    case = make(secured, topic, tmp_path)
    secured.administration.create_topic(case.topic, 2)
    try:
        with relay_of(database, case, tmp_path) as relay:
            emit(database, range(EVENTS))
            until(lambda: case.said in (status(relay)["last_error"] or ""), seconds=30, what="status says why")
            # An idle client reports a failed handshake too, before a failed delivery opens the circuit.
            until(lambda: status(relay)["circuit"] in ("open", "half-open"), seconds=30, what="the circuit is open")
            found = status(relay)
            assert {name: found[name] for name in ("backlog", "waiting", "held", "dead")} == {
                "backlog": EVENTS, "waiting": 0, "held": 0, "dead": 0,
            }  # fmt: skip
            case.mend()
            until(lambda: numbers(secured, case.topic) == in_order(EVENTS), seconds=60, what="all of it arrives")
            until(lambda: status(relay)["circuit"] == "closed", seconds=10, what="the circuit is closed")
            until(lambda: status(relay)["backlog"] == 0, seconds=10, what="nothing is left")
            assert relay.stop() == 0
            for secret in (WRONG, PASSWORD):
                assert secret not in relay.log.read_text() + json.dumps(found)
    finally:
        secured.show("SCRAM", secured.certificates.server)


def test_files_are_read_again_at_sighup_and_a_bad_one_changes_nothing(
    secured: SecuredBroker, database: Database, topic: str, tmp_path: Path
) -> None:
    """Another user takes over without an interruption: the first one then has no rights, and no event is refused."""
    admin, name = secured.administration, f"handed.{topic}"
    admin.create_topic(name, 2)
    admin.set_password("successor", "tr0ubador-and-3")
    for user in ("relay", "successor"):
        admin.allow(user, "WRITE", topic=name)
    user, password = tmp_path / "user", tmp_path / "password"
    user.write_text("relay")
    password.write_text(PASSWORD)
    settings = secured.scram()
    del settings["sasl.username"]
    case = Case(name, settings, {"sasl.username": user, "sasl.password": password}, "", str)
    with relay_of(database, case, tmp_path) as relay:
        emit(database, range(20))
        until(lambda: numbers(secured, name) == in_order(20), seconds=30, what="the first user delivers")
        user.write_text("successor")
        password.unlink()
        relay.send(signal.SIGHUP)
        until(lambda: "nothing has changed" in relay.log.read_text(), seconds=20, what="the missing file is refused")
        assert f'sinks.events.producer.\\"sasl.password\\": {password}: No such file' in relay.log.read_text()
        emit(database, range(20, 40))
        until(lambda: numbers(secured, name) == in_order(40), seconds=30, what="the first user still delivers")
        password.write_text("tr0ubador-and-3")
        relay.send(signal.SIGHUP)
        until(lambda: "configuration reloaded" in relay.log.read_text(), seconds=20, what="the files are read")
        admin.take_back("relay", "WRITE", topic=name)
        emit(database, range(40, 60))
        until(lambda: numbers(secured, name) == in_order(60), seconds=30, what="the other user delivers")
        assert status(relay)["last_error"] is None
        assert relay.stop() == 0
        for secret in (PASSWORD, "tr0ubador"):
            assert secret not in relay.log.read_text()
