"""Settings of librdkafka's clients, and what is logged of them."""

import logging
from itertools import pairwise

import pytest
from confluent_kafka import KafkaError

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


@pytest.mark.parametrize("name", ["ssl.engine.passphrase", "ssl.key.password", "sasl.jaas.config", "ssl.key.location"])
def test_values_of_settings_that_may_be_secret_are_redacted(name: str) -> None:
    assert ClientSettings({**SERVERS, name: "hunter2"}).redact("<hunter2>") == "<***>"


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


# -- settings in files -------------------------------------------------------------------------------------------


def test_a_secret_is_read_for_every_client_and_overrides_no_guarantee() -> None:
    values = iter(("one secret", "1", "another", "1"))
    settings = ClientSettings(SERVERS, {"sasl.password": lambda: next(values), "acks": lambda: next(values)})
    for secret in ("one secret", "another"):
        found = settings.producer(900, {})
        assert (found["sasl.password"], found["acks"]) == (secret, "all")
        assert settings.redact(f"<{secret}>") == "<***>"


def test_a_sink_that_creates_topics_lets_no_broker_do_it() -> None:
    assert ClientSettings(SERVERS, creates=True).producer(900, {})["allow.auto.create.topics"] is False
    assert "allow.auto.create.topics" not in ClientSettings(SERVERS).producer(900, {})


# -- errors without a record -------------------------------------------------------------------------------------


def refused(address: str) -> KafkaError:
    """Return what the client reports when nothing listens at `address`."""
    return KafkaError(KafkaError._TRANSPORT, f"{address}/bootstrap: Connect to {address} failed: Connection refused")


def test_a_shown_error_is_reworded_as_rarely_as_log_lines_repeat() -> None:
    log, shown = ClientLog(ClientSettings({})), list[str | None]()
    for _ in range(50):
        for address in ("127.0.0.1:9092", "[::1]:9092"):
            log.unreachable(refused(address))
            shown.append(log.trouble)
    assert sum(one != other for one, other in pairwise(shown)) == 1
    assert log.last_error is not None
    assert "[::1]" in log.last_error, "the reasons of failed deliveries have the newest error"


def test_an_error_is_cleared_once_a_broker_answers_and_shown_at_once_when_it_recurs() -> None:
    log = ClientLog(ClientSettings({}))
    for over in (log.clear_trouble, log.clear, log.clear_trouble):
        log.unreachable(refused("127.0.0.1:9092"))
        assert "Connection refused" in (log.trouble or "")
        over()
        assert log.trouble is None
        assert (log.last_error is None) == (over == log.clear), "it explains a stall until records are acknowledged"


def test_late_metadata_do_not_show_that_no_broker_answers() -> None:
    log = ClientLog(ClientSettings({}))
    log.failed(KafkaError(KafkaError._TIMED_OUT, "Failed to get metadata: Local: Timed out"))
    assert (log.trouble, log.last_error) == (None, "_TIMED_OUT: Failed to get metadata: Local: Timed out")


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
