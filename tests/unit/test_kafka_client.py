"""Settings of librdkafka's clients, and what is logged of them."""

import logging

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.sinks.kafka.settings import DEFAULTS, GUARANTEES, ClientLog, ClientSettings

SERVERS = {"bootstrap.servers": "a:1"}


def test_the_users_settings_override_ours() -> None:
    found = ClientSettings({**SERVERS, "linger.ms": 7, "partitioner": "consistent", "client.id": "x"}).producer(900, {})
    assert (found["linger.ms"], found["partitioner"], found["client.id"]) == (7, "consistent", "x")
    assert found["batch.size"] == 900
    assert {name: found[name] for name in DEFAULTS if name not in ("linger.ms", "partitioner")} == {
        name: value for name, value in DEFAULTS.items() if name not in ("linger.ms", "partitioner")
    }


def test_no_setting_overrides_a_guarantee() -> None:
    undone = {
        "enable.idempotence": False,
        "acks": 1,
        "request.required.acks": 1,
        "message.timeout.ms": 5,
        "delivery.timeout.ms": 5,
        "enable.gapless.guarantee": False,
        "delivery.report.only.error": True,
        "max.in.flight": 5,
        "max.in.flight.requests.per.connection": 5,
    }
    found = ClientSettings({**SERVERS, **undone}).producer(900, {})
    assert {name: found[name] for name in GUARANTEES} == GUARANTEES
    assert "request.required.acks" not in found
    assert "delivery.timeout.ms" not in found
    # With a second request, records that a new partition did not accept are reported as delivered.
    assert (found["max.in.flight.requests.per.connection"], "max.in.flight" in found) == (1, False)


def test_no_line_contains_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    settings = ClientSettings({**SERVERS, "sasl.password": "hunter2", "sasl.oauthbearer.client.secret": "s3cret"})
    log = ClientLog(settings)
    with caplog.at_level(logging.INFO, "outbox_relay.kafka"):
        log.log(logging.ERROR, "%s [%s] %s", "FAIL", "rdkafka#1", "refused hunter2 and s3cret")
    log.failed(KafkaError(KafkaError._AUTHENTICATION, "refused hunter2"))
    assert caplog.messages == ["FAIL [rdkafka#1] refused *** and ***"]
    assert log.explain("down") == "down; the client's last error: _AUTHENTICATION: refused ***"


def test_own_purges_are_not_logged_and_handled_errors_are_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ClientLog(ClientSettings(SERVERS))
    with caplog.at_level(logging.INFO, "outbox_relay.kafka"):
        for cause in ("Local: Purged in flight", "Broker: Broker failed to validate record"):
            line = f"ProduceRequest failed: {cause} (broker 1): unable to satisfy gap-less guarantee"
            log.log(logging.CRITICAL, "%s [%s] %s", "FATAL", "rdkafka#1", line)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "failed to validate" in caplog.text


def test_the_cause_is_kept_when_all_brokers_are_reported_down() -> None:
    log = ClientLog(ClientSettings(SERVERS))
    log.failed(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    log.failed(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert log.last_error == "_AUTHENTICATION: wrong password"


# -- secrets in other places -------------------------------------------------------------------------------------------


def test_a_secret_is_read_for_every_client_is_redacted_and_overrides_no_guarantee() -> None:
    found = iter(["first one", "second"])
    settings = ClientSettings(SERVERS, {"sasl.password": lambda: next(found), "acks": lambda: "1"})
    for secret in ("first one", "second"):
        client = settings.producer(900, {})
        assert (client["sasl.password"], client["acks"]) == (secret, "all")
        assert settings.redact(f"<{secret}>") == "<***>"


def test_a_secret_that_cannot_be_read_is_named() -> None:
    def unread() -> str:
        raise ValueError("/run/x: Permission denied")

    with pytest.raises(ConfigurationError, match=r"Permission denied$"):
        ClientSettings(SERVERS, {"sasl.password": unread}).admin(create_topics=False)


def test_a_sink_that_creates_topics_lets_no_broker_do_it() -> None:
    assert ClientSettings(SERVERS, creates=True).producer(900, {})["allow.auto.create.topics"] is False
    assert "allow.auto.create.topics" not in ClientSettings(SERVERS).producer(900, {})


# -- errors without a record -------------------------------------------------------------------------------------


def refused(address: str) -> KafkaError:
    """Return what the client reports when nothing listens at `address`."""
    return KafkaError(KafkaError._TRANSPORT, f"{address}/bootstrap: Connect to {address} failed: Connection refused")


def test_an_unreachable_broker_is_shown_until_records_are_acknowledged() -> None:
    log, shown = ClientLog(ClientSettings({})), set[str | None]()
    for port in range(9092, 9142):
        log.unreachable(refused(f"127.0.0.1:{port}"))
        shown.add(log.trouble)
    assert len(shown) == 1, "one that differs only in numbers is not written again"
    log.clear()
    assert (log.trouble, log.last_error) == (None, None)


def test_an_error_that_ends_a_producer_is_not_shown() -> None:
    log = ClientLog(ClientSettings({}))
    log.unreachable(KafkaError(KafkaError._FATAL, "fatal for this producer", True))
    assert log.trouble is None


# -- log lines of a client that cannot connect ----------------------------------------------------------------


def test_an_outage_of_an_hour_writes_few_lines_and_each_has_the_sinks_name(caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog(ClientSettings(SERVERS), "events")
    with caplog.at_level(logging.INFO, "outbox_relay.kafka"):
        for n in range(3 * 3600):
            log.log(logging.ERROR, "%s", f"FAIL localhost:9092/bootstrap: Connection refused (after {n}ms)")
    assert len(caplog.records) == 1
    assert {getattr(record, "sink", None) for record in caplog.records} == {"events"}
