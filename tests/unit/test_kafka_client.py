"""What librdkafka is told, and what people are told of it."""

import logging
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.kafka.certificate_errors import diagnosed
from outbox_relay.sinks.kafka.client import DEFAULTS, GUARANTEES, ClientLog, ClientSettings
from outbox_relay.sinks.kafka.statistics import NOTHING, Statistics, ended, together

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
        "max.in.flight": 5,
        "max.in.flight.requests.per.connection": 5,
    }
    told = ClientSettings({**SERVERS, **undone}).producer(900, {})
    assert {name: told[name] for name in GUARANTEES} == GUARANTEES
    assert "request.required.acks" not in told
    assert "delivery.timeout.ms" not in told
    # With a second one, what a partition that is being made did not take is reported as delivered.
    assert (told["max.in.flight.requests.per.connection"], "max.in.flight" in told) == (1, False)


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


# -- settings in files -------------------------------------------------------------------------------------------


def test_a_file_is_read_for_every_client_without_the_end_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    settings = ClientSettings(SERVERS, {"sasl.password": path})
    for secret, content in (("first one", "first one\n"), ("second\r", "second\r\r\n"), ("third", "third")):
        path.write_bytes(content.encode())
        assert settings.producer(900, {})["sasl.password"] == secret
        assert settings.admin(create_topics=False)["sasl.password"] == secret
        assert settings.redact(f"<{secret}>") == "<***>"


def test_a_file_does_not_undo_what_keeps_order(tmp_path: Path) -> None:
    path = tmp_path / "acks"
    path.write_text("1")
    assert ClientSettings(SERVERS, {"acks": path}).producer(900, {})["acks"] == "all"


def test_who_creates_topics_lets_no_broker_do_it() -> None:
    assert ClientSettings(SERVERS, creates=True).producer(900, {})["allow.auto.create.topics"] is False
    assert "allow.auto.create.topics" not in ClientSettings(SERVERS).producer(900, {})


# -- statistics --------------------------------------------------------------------------------------------------

REPORT = """{ "name": "rdkafka#producer-1", "msg_cnt": 7, "msg_size": 900, "brokers":{
"a:1/1": {"state": "UP",
  "tx": 10, "txerrs": 1, "txretries": 2, "req_timeouts": 3, "rtt": {"avg": 2000, "p99": 9000, "cnt": 30}},
"b:1/2": {"tx": 5, "txerrs": 0, "txretries": 0, "req_timeouts": 0, "rtt": {"avg": 6000, "p99": 7000, "cnt": 10}},
"c:1/bootstrap": {"state": "TRY_CONNECT",
  "tx": 1, "txerrs": 4, "txretries": 0, "req_timeouts": 0, "rtt": {"avg": 0, "p99": 0, "cnt": 0}}
}, %s "tx": 16 }"""


@pytest.mark.parametrize("topics", ["", '"topics":{ "t": {"partitions": {"0": {"msgq_cnt": 1}}} },'])
def test_statistics_are_of_all_brokers(topics: str) -> None:
    found = Statistics.of(REPORT % topics)
    assert (found.producers, found.brokers_up, found.queued_records, found.queued_bytes) == (1, 1, 7, 900)
    assert (found.requests, found.request_errors, found.request_retries, found.request_timeouts) == (16, 5, 2, 3)
    assert found.round_trip_seconds == pytest.approx(0.003)
    assert found.round_trip_p99_seconds == pytest.approx(0.009)


def test_statistics_of_several_producers_outlive_those_that_are_replaced() -> None:
    one = Statistics.of(REPORT % "")
    total = together([ended(one), one, one])
    assert (total.producers, total.queued_records, total.requests) == (2, 14, 48)
    assert total.round_trip_seconds == one.round_trip_seconds
    assert together([]) == NOTHING


# -- errors without a record -------------------------------------------------------------------------------------


def refused(address: str) -> KafkaError:
    """Return what the client reports when nothing listens at `address`."""
    return KafkaError(KafkaError._TRANSPORT, f"{address}/bootstrap: Connect to {address} failed: Connection refused")


def test_an_error_is_shown_in_other_words_as_seldom_as_log_lines_repeat() -> None:
    log, shown = ClientLog(ClientSettings({})), list[str | None]()
    for _ in range(50):
        for address in ("127.0.0.1:9092", "[::1]:9092"):
            log.unreachable(refused(address))
            shown.append(log.trouble)
    assert sum(one != other for one, other in pairwise(shown)) == 1
    assert log.last_error is not None
    assert "[::1]" in log.last_error, "the reasons of failed deliveries have the newest one"


def test_an_error_is_over_once_a_broker_answers_and_shown_at_once_when_it_comes_again() -> None:
    log = ClientLog(ClientSettings({}))
    for over in (log.forget, log.answered, log.forget):
        log.unreachable(refused("127.0.0.1:9092"))
        assert "Connection refused" in (log.trouble or "")
        over()
        assert log.trouble is None
        assert (log.last_error is None) == (over == log.answered), (
            "a stall is explained by it until records come through"
        )


def test_metadata_that_come_late_are_no_reason_to_say_that_no_broker_answers() -> None:
    log = ClientLog(ClientSettings({}))
    log.failed(KafkaError(KafkaError._TIMED_OUT, "Failed to get metadata: Local: Timed out"))
    assert (log.trouble, log.last_error) == (None, "_TIMED_OUT: Failed to get metadata: Local: Timed out")


def test_an_error_that_ends_a_producer_is_not_shown() -> None:
    log = ClientLog(ClientSettings({}))
    log.unreachable(KafkaError(KafkaError._FATAL, "fatal for this producer", True))
    assert log.trouble is None


# -- certificates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason",
    [
        "_TRANSPORT: connection refused",
        "_SSL: ssl://127.0.0.1:1/bootstrap: certificate verify failed",
        "_SSL: certificate verify failed",
    ],
)
def test_what_cannot_be_found_out_about_a_certificate_is_left_as_it_is(reason: str, tmp_path: Path) -> None:
    assert diagnosed(reason, None) == reason
    assert diagnosed(reason, str(tmp_path / "gone")) == reason
