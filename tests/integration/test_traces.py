"""From a traced application through a relay process to a collector: spans, links, attributes, and no secret in them."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_relay import __version__
from tests.support.collector import Collector, Span
from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.kafka import KafkaBroker
from tests.support.receiver import Receiver
from tests.support.receiver.answers import in_turn, say
from tests.support.relay_config import KAFKA, webhook_with_files_config
from tests.support.service import RelayService
from tests.support.traced_application import emit_traced
from tests.support.wait import until

TOKEN = "hunter2-canary"
CANARIES = (b"canary", b"whsec_", b"hooks")
"""Parts of payloads, keys, headers, credentials and of the URL's path, none of which may be in a span."""
QUICK_RETRY = "[sinks.crm.retry]\nattempts = 3\nbase_seconds = 0.1\nmax_seconds = 0.1\n[routes]"


@pytest.fixture
def collector() -> Generator[Collector]:
    with Collector() as collector:
        yield collector
        assert not [canary for canary in CANARIES for body in collector.bodies if canary in body]


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def webhook_relay(
    database: Database, url: str, directory: Path, *, expects: Sequence[str] = (), **environment: str
) -> RelayService:
    text = webhook_with_files_config(f'dsn = "{database.dsn}"', url, directory).replace("[routes]", QUICK_RETRY)
    return RelayService(directory, text, expects=expects, CRM_TOKEN=TOKEN, **environment)


def created(collector: Collector, uid: str) -> Span:
    """Return the create span of an event."""
    [span] = [span for span in collector.spans if span.attributes.get("messaging.message.id") == uid]
    assert (span.kind, span.resource["service.name"]) == ("PRODUCER", "shop")
    return span


def requests(collector: Collector, uid: str) -> list[Span]:
    """Return the spans of an event's requests that have arrived."""
    return [span for span in collector.named("POST") if span.attributes["outbox.event.uid"] == uid]


def requests_of(collector: Collector, uid: str, count: int) -> list[Span]:
    """Wait for the spans of an event's requests, and return them in the order of the attempts."""
    until(lambda: len(requests(collector, uid)) >= count, seconds=30, what=f"{count} spans of requests arrive")
    found = requests(collector, uid)
    assert len(found) == count
    return sorted(found, key=lambda span: span.attributes.get("http.request.resend_count", 0))


def an_event(**more: Any) -> dict[str, Any]:
    return {"type": "a.created", "payload": {"secret": "canary"}, "key": "canary", **more}


HOSTILE = (
    *("canary", "00-canary-b7ad6b7169203331-01", f"00-{'0' * 32}-b7ad6b7169203331-01", "00-" * 4000),
    "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "\u00e9\u0661", "", "{}",
)  # fmt: skip


def test_each_request_is_a_child_of_the_create_span_and_is_sent_as_it_was(
    database: Database, receiver: Receiver, collector: Collector, tmp_path: Path
) -> None:
    url = f"{receiver.url}/canary?token=canary"
    [uid] = emit_traced(database, collector.variables, an_event(headers={"x": "canary"}))
    with webhook_relay(database, url, tmp_path, expects=["reload"], **collector.variables) as relay:
        [span] = requests_of(collector, uid, 1)
        _is_of_the_request(span, created(collector, uid), receiver, uid)
        [request] = receiver.requests
        [(headers,)] = query(database, "select headers from outbox.event")
        assert request.header("traceparent") == headers["traceparent"]
        assert headers["traceparent"].startswith(created(collector, uid).traceparent)
        assert request.header("tracestate") is None

        replayed = outbox_relay("replay", "start", "--sink", "crm", "--uid", uid, "--yes", "--dsn", database.dsn)
        assert replayed.code == 0, replayed.err
        spans = requests_of(collector, uid, 2)
        assert {(span.context[0], span.parent) for span in spans} == {created(collector, uid).context}

        relay.config.write_text(relay.config.read_text().replace(url, f"{receiver.url}/other"))
        relay.send(signal.SIGHUP)
        until(lambda: "configuration reloaded" in relay.log.read_text(), seconds=20, what="the reload is applied")
        receiver.answer = in_turn(say(500, body=b"canary"), say(404), say(500), say(204))
        _fails_three_times(database, collector, relay)

        with psycopg.connect(database.dsn) as connection:
            for parent in HOSTILE:
                odd = json.dumps({"traceparent": parent, "tracestate": "canary,,=" * 9})
                connection.execute("select outbox.emit('a.odd', '1', headers => %s::jsonb)", [odd])

        def odd_spans() -> list[Span]:
            return [span for span in collector.named("POST") if span.attributes["outbox.event.type"] == "a.odd"]

        until(lambda: len(odd_spans()) >= len(HOSTILE), seconds=30, what="every odd request has a span")
        assert [(span.parent, span.links, span.failed) for span in odd_spans()] == [("", [], False)] * len(HOSTILE)

        receiver.stop()
        [uid] = emit_traced(database, collector.variables, an_event())
        until(lambda: requests(collector, uid), seconds=30, what="the span of the first request arrives")
        span = requests(collector, uid)[0]
        assert (span.failed, span.attributes["error.type"]) == (True, "connection_refused")
        assert "http.response.status_code" not in span.attributes
        assert relay.stop() == 0
    assert set(collector.paths) == {"/v1/traces"}


def _is_of_the_request(span: Span, create: Span, receiver: Receiver, uid: str) -> None:
    assert (span.kind, span.context[0], span.parent) == ("CLIENT", create.context[0], create.context[1])
    assert (span.links, span.failed) == ([create.context], False)
    assert span.attributes == {
        "http.request.method": "POST",
        "url.full": f"http://127.0.0.1:{receiver.port}/REDACTED",
        "server.address": "127.0.0.1",
        "server.port": receiver.port,
        "http.response.status_code": 200,
        "outbox.sink": "crm",
        "outbox.event.uid": uid,
        "outbox.event.type": "a.created",
    }
    assert span.resource["service.name"] == "outbox-relay"
    assert span.resource["service.version"] == __version__
    assert str(span.resource["service.instance.id"])
    assert (span.scope, span.schema) == ("outbox_relay", "https://opentelemetry.io/schemas/1.44.0")


def _fails_three_times(database: Database, collector: Collector, relay: RelayService) -> None:
    [uid] = emit_traced(database, collector.variables, an_event())
    spans = requests_of(collector, uid, 3)
    create = created(collector, uid)
    until(lambda: "dead letter" in relay.log.read_text(), seconds=30, what="the dead letter is logged")
    [line] = [line for line in relay.lines() if line["event"] == "event.dead"]
    assert [span.attributes.get("http.request.resend_count") for span in spans] == [None, 1, 2]
    assert [span.attributes["http.response.status_code"] for span in spans] == [500, 404, 500]
    assert [span.attributes["error.type"] for span in spans] == ["500", "404", "500"]
    assert all(span.failed for span in spans)
    assert {(span.context[0], span.parent) for span in spans} == {create.context}
    assert (line["uid"], line["trace_id"]) == (uid, create.context[0])


def by_topic(collector: Collector, topic: str, count: int) -> list[Span]:
    """Wait until the spans of a topic tell of ``count`` events, and return them."""

    def sent() -> int:
        return sum(int(span.attributes["messaging.batch.message_count"]) for span in collector.named(f"send {topic}"))

    until(lambda: sent() >= count, seconds=40, what=f"spans of {count} events arrive")
    assert sent() == count
    return collector.named(f"send {topic}")


@pytest.mark.slow
def test_a_batch_has_one_span_with_at_most_128_links_and_the_variables_their_usual_meaning(
    database: Database, kafka: KafkaBroker, topic: str, collector: Collector, tmp_path: Path
) -> None:
    kafka.create_topic(topic, 1)
    uids = emit_traced(database, collector.variables, *[an_event() for _ in range(300)], many=True)
    config = KAFKA.format(dsn=database.dsn, lease=15, topic=topic, bootstrap=kafka.bootstrap)
    variables = {
        **collector.variables,
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_SERVICE_NAME": "billing-relay",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test,service.version=7",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=hunter2",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    }
    with RelayService(tmp_path, config, **variables) as relay:
        spans = by_topic(collector, topic, 300)
        [single] = emit_traced(database, collector.variables, an_event())
        last = by_topic(collector, topic, 301)[-1]
        assert relay.stop() == 0
    assert last.resource["service.name"] == "billing-relay"
    assert (last.resource["service.version"], last.resource["deployment.environment.name"]) == ("7", "test")
    assert collector.headers[-1]["api-key"] == "hunter2"
    assert "hunter2" not in relay.log.read_text()
    contexts = {span.context for span in collector.named("create a.created")}
    assert len(contexts) == 301
    assert max(len(span.links) for span in spans) == 128
    for span in spans:
        assert (span.kind, span.parent, span.failed) == ("CLIENT", "", False)
        assert (
            len(set(span.links)) == len(span.links) == min(128, int(span.attributes["messaging.batch.message_count"]))
        )
        assert set(span.links) <= contexts
    create = created_alone(collector, single)
    assert (last.context[0], last.parent, last.links) == (*create.context, [create.context])
    assert last.attributes == {
        "messaging.system": "kafka",
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        "messaging.destination.name": topic,
        "messaging.batch.message_count": 1,
        "messaging.message.id": single,
        "outbox.sink": "events",
    }
    stored = dict(query(database, "select uid::text, headers->>'traceparent' from outbox.event"))
    arrived = {str(record.headers["id"]): str(record.headers["traceparent"]) for record in kafka.read_all(topic)}
    assert arrived == {str(uid.encode()): str(parent.encode()) for uid, parent in stored.items()}
    assert set(stored) == {*uids, single}


def created_alone(collector: Collector, uid: str) -> Span:
    """Return the create span of an event that was also sent alone."""
    [span] = [s for s in collector.named("create a.created") if s.attributes["messaging.message.id"] == uid]
    return span
