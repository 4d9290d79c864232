"""The Kafka sink and brokers that want to know who it is: TLS, SASL, access rules; wrong, expired, mended."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.envelope import TopicTemplate
from outbox_relay.errors import Misconfigured
from outbox_relay.policy import DELIVERED, Unavailable
from outbox_relay.sinks.kafka import KafkaSink
from tests.contract.harness import hand_over_all, some_events, soon
from tests.support.kafka import Record
from tests.support.kafka.secured import SecuredBroker

STALL_SECONDS = 2.0
PASSWORD = "correct-horse"


@pytest.fixture(scope="session")
def secured() -> Generator[SecuredBroker]:
    """A broker where user relay may write to topics that begin with `open.`, by any way in."""
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
    """A topic that the user may write to."""
    secured.administration.create_topic(f"open.{topic}", 2)
    return f"open.{topic}"


@pytest.fixture
async def sink_of() -> AsyncGenerator[Callable[..., Any]]:
    """Opens sinks: `await sink_of(topic, settings, **more)`."""
    async with contextlib.AsyncExitStack() as opened:

        async def open_one(template: str, producer: Mapping[str, str], **more: Any) -> KafkaSink:
            sink = KafkaSink("events", TopicTemplate.parse(template), producer, STALL_SECONDS, **more)
            await sink.open()
            opened.push_async_callback(sink.close)
            return sink

        yield open_one


def arrived(secured: SecuredBroker, topic: str) -> list[Record]:
    return secured.read_all(topic)


async def delivers(sink: KafkaSink, secured: SecuredBroker, topic: str) -> None:
    events = some_events(10)
    await hand_over_all(sink, events)
    assert len(arrived(secured, topic)) == 10


async def refused(sink: KafkaSink) -> str:
    """The reason why an event is not delivered now."""
    (verdict,) = await sink.deliver(some_events(1), soon())
    assert isinstance(verdict, Unavailable)
    return verdict.reason


async def test_scram_over_tls_with_the_password_in_a_file(
    secured: SecuredBroker, open_topic: str, sink_of: Any, tmp_path: Path
) -> None:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    sink = await sink_of(open_topic, secured.scram(), files={"sasl.password": path})
    assert await sink.check() is None
    await delivers(sink, secured, open_topic)


async def test_plain_over_tls(secured: SecuredBroker, open_topic: str, sink_of: Any) -> None:
    sink = await sink_of(open_topic, secured.scram("plain-secret", "PLAIN", "plain"))
    await delivers(sink, secured, open_topic)


async def test_a_client_certificate(secured: SecuredBroker, open_topic: str, sink_of: Any) -> None:
    sink = await sink_of(open_topic, secured.mtls(secured.certificates.client))
    await delivers(sink, secured, open_topic)


async def test_a_bearer_token(secured: SecuredBroker, open_topic: str, sink_of: Any) -> None:
    sink = await sink_of(open_topic, secured.oauth("relay"))
    await delivers(sink, secured, open_topic)


async def test_a_wrong_password_is_told_and_a_new_one_in_the_file_is_taken_without_a_restart(
    secured: SecuredBroker, open_topic: str, sink_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.sink.CHECK_SECONDS", 1.0)
    path = tmp_path / "password"
    path.write_text("hunter2-and-more")
    sink = await sink_of(open_topic, secured.scram(), files={"sasl.password": path})
    for reason in (await sink.check() or "", await refused(sink)):
        assert "Authentication failed" in reason
        assert "hunter2" not in reason
    path.write_text(PASSWORD)
    assert await sink.check() is None
    await delivers(sink, secured, open_topic)


async def test_a_password_that_the_brokers_change_is_followed(
    secured: SecuredBroker, open_topic: str, sink_of: Any
) -> None:
    """The wrong password becomes the right one at the brokers: nothing has to be done to the relay."""
    sink = await sink_of(open_topic, secured.scram("not-yet", user="newcomer"))
    assert "Authentication failed" in await refused(sink)
    admin = secured.administration
    admin.set_password("newcomer", "not-yet")
    admin.allow("newcomer", "WRITE", topic="open.")
    await delivers(sink, secured, open_topic)


async def test_an_expired_certificate_of_the_brokers_is_told_and_a_new_one_is_taken(
    secured: SecuredBroker, open_topic: str, sink_of: Any
) -> None:
    secured.show("SCRAM", secured.certificates.expired)
    try:
        sink = await sink_of(open_topic, secured.scram(PASSWORD))
        assert "certificate has expired" in await refused(sink)
    finally:
        secured.show("SCRAM", secured.certificates.server)
    await delivers(sink, secured, open_topic)


async def test_an_expired_certificate_of_ours_is_told_and_a_new_one_is_taken(
    secured: SecuredBroker, open_topic: str, sink_of: Any, tmp_path: Path
) -> None:
    path = tmp_path / "client.pem"
    path.write_bytes(secured.certificates.expired_client.read_bytes())
    sink = await sink_of(open_topic, secured.mtls(path))
    assert "certificate" in (await refused(sink)).lower()
    path.write_bytes(secured.certificates.client.read_bytes())
    await delivers(sink, secured, open_topic)


async def test_a_certificate_of_nobody_we_trust_is_told(secured: SecuredBroker, open_topic: str, sink_of: Any) -> None:
    settings = secured.scram(PASSWORD)
    del settings["ssl.ca.location"]
    sink = await sink_of(open_topic, settings)
    reason = await refused(sink)
    assert "unable to get local issuer certificate" in reason or "self-signed certificate" in reason


async def test_a_denied_topic_is_told_and_taken_once_it_is_allowed(
    secured: SecuredBroker, topic: str, sink_of: Any
) -> None:
    denied = f"closed.{topic}"
    secured.administration.create_topic(denied, 2)
    sink = await sink_of(denied, secured.scram(PASSWORD))
    reason = await refused(sink)
    assert denied in reason
    assert "TOPIC_AUTHORIZATION_FAILED" in reason
    secured.administration.allow("relay", "WRITE", topic=denied)
    await delivers(sink, secured, denied)


async def test_a_right_that_is_taken_back_under_way_loses_nothing(
    secured: SecuredBroker, topic: str, sink_of: Any
) -> None:
    """The topic may still be looked at, so only a record finds out that it may not be written to."""
    name = f"taken.{topic}"
    admin = secured.administration
    admin.create_topic(name, 2)
    for operation in ("WRITE", "DESCRIBE"):
        admin.allow("relay", operation, topic=name)
    sink = await sink_of(name, secured.scram(PASSWORD))
    events = some_events(40)
    assert list(await sink.deliver(events[:20], soon())) == [DELIVERED] * 20
    admin.take_back("relay", "WRITE", topic=name)
    assert "TOPIC_AUTHORIZATION_FAILED" in await refused(sink)
    admin.allow("relay", "WRITE", topic=name)
    await hand_over_all(sink, events[20:])
    found = [record.headers["id"] for record in arrived(secured, name)]
    assert {event.uid.encode() for event in events} <= set(found)


async def test_a_file_that_is_missing_is_named_at_the_start(tmp_path: Path, sink_of: Any) -> None:
    with pytest.raises(Misconfigured, match=r'sinks.events.producer_files."sasl.password": .*gone: No such file'):
        await sink_of("t", {"bootstrap.servers": "127.0.0.1:1"}, files={"sasl.password": tmp_path / "gone"})


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b"\xff\xfe", "is not text"), (b"x" * 70_000, "larger")]
)
async def test_a_file_that_holds_no_secret_is_named_without_what_is_in_it(
    tmp_path: Path, sink_of: Any, content: bytes, said: str
) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match=said) as refusal:
        await sink_of("t", {"bootstrap.servers": "127.0.0.1:1"}, files={"sasl.password": path})
    assert "xxx" not in str(refusal.value)
