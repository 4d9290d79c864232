"""What librdkafka is told, and what people are told of it."""

import logging

import pytest
from confluent_kafka import KafkaError

from outbox_relay.sinks.kafka.client import DEFAULTS, GUARANTEES, ClientLog, ClientSettings
from outbox_relay.sinks.kafka.records import own_headers

SERVERS = {"bootstrap.servers": "a:1"}


def test_the_users_settings_override_ours() -> None:
    told = ClientSettings({**SERVERS, "linger.ms": 7, "partitioner": "consistent", "client.id": "x"}).producer(900, {})
    assert (told["linger.ms"], told["partitioner"], told["client.id"]) == (7, "consistent", "x")
    assert told["batch.size"] == 900
    assert {name: told[name] for name in DEFAULTS if name not in ("linger.ms", "partitioner")} == {
        name: value for name, value in DEFAULTS.items() if name not in ("linger.ms", "partitioner")
    }


def test_nothing_overrides_what_keeps_order_and_loses_nothing() -> None:
    undone = {
        "enable.idempotence": False,
        "acks": 1,
        "request.required.acks": 1,
        "message.timeout.ms": 5,
        "delivery.timeout.ms": 5,
        "enable.gapless.guarantee": False,
        "delivery.report.only.error": True,
    }
    told = ClientSettings({**SERVERS, **undone}).producer(900, {})
    assert {name: told[name] for name in GUARANTEES} == GUARANTEES
    assert "request.required.acks" not in told
    assert "delivery.timeout.ms" not in told


@pytest.mark.parametrize(
    ("settings", "compresses"),
    [({}, False), ({"compression.type": "none"}, False), ({"compression.codec": "lz4"}, True)],
)
def test_compression_is_known(settings: dict[str, str], compresses: bool) -> None:
    assert ClientSettings({**SERVERS, **settings}).compresses is compresses


def test_secrets_stand_in_no_line(caplog: pytest.LogCaptureFixture) -> None:
    settings = ClientSettings({**SERVERS, "sasl.password": "hunter2", "sasl.oauthbearer.client.secret": "s3cret"})
    log = ClientLog(settings)
    with caplog.at_level(logging.INFO, "outbox_relay.kafka"):
        log.log(logging.ERROR, "%s [%s] %s", "FAIL", "rdkafka#1", "refused hunter2 and s3cret")
    log.failed(KafkaError(KafkaError._AUTHENTICATION, "refused hunter2"))
    assert caplog.messages == ["FAIL [rdkafka#1] refused *** and ***"]
    assert log.explain("down") == "down; the client's last error: _AUTHENTICATION: refused ***"


def test_the_log_tells_neither_what_we_took_back_nor_what_is_handled_as_a_disaster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ClientLog(ClientSettings(SERVERS))
    with caplog.at_level(logging.INFO, "outbox_relay.kafka"):
        for cause in ("Local: Purged in flight", "Broker: Broker failed to validate record"):
            line = f"ProduceRequest failed: {cause} (broker 1): unable to satisfy gap-less guarantee"
            log.log(logging.CRITICAL, "%s [%s] %s", "FATAL", "rdkafka#1", line)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "failed to validate" in caplog.text


def test_the_cause_is_kept_when_all_brokers_are_said_to_be_down() -> None:
    log = ClientLog(ClientSettings(SERVERS))
    log.failed(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    log.failed(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert log.last_error == "_AUTHENTICATION: wrong password"


def test_own_headers_keep_their_order() -> None:
    assert own_headers('{"b": "1", "a": "", "я": "日"}') == [("b", "1"), ("a", ""), ("я", "日")]


@pytest.mark.parametrize("text", ["", "[]", "null", '"a"', '{"a": 1}', '{"a": null}', "{"])
def test_headers_that_are_no_object_of_strings_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a JSON object of strings"):
        own_headers(text)
