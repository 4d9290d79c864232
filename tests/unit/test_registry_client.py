"""Requests to a schema registry: bounded in time, with credentials that appear nowhere, and what each answer means."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outbox_relay.domain.file_reading import FileReader
from outbox_relay.sinks.kafka.event_schemas import SchemasUnavailable, SchemaUnusable, Subject
from outbox_relay.sinks.kafka.registry_client import MAX_STUCK, RegistryClient, RegistryOptions
from tests.support.apicurio import AVRO

SECRET = "a-password-of-the-registry"
SUBJECT = Subject("orders-value", None, "order.created")
FOUND = {"subject": "orders-value", "version": 1, "id": 7, "schema": json.dumps(AVRO)}


class Answers(ThreadingHTTPServer):
    """A server that answers every request alike, or not at all."""

    daemon_threads = True
    block_on_close = False
    status = 200
    body: object = FOUND

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.logins: list[str | None] = []
        self.released = threading.Event()
        self.released.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """One answer."""

    server: Answers

    def do_GET(self) -> None:
        self.server.logins.append(self.headers.get("authorization"))
        self.server.released.wait(20)
        body = json.dumps(self.server.body).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Write nothing."""


@pytest.fixture
def server() -> Generator[Answers]:
    answers = Answers()
    thread = threading.Thread(target=answers.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield answers
    answers.released.set()
    answers.shutdown()
    thread.join()
    answers.server_close()


def never() -> bool:
    return False


def client(server: Answers, **options: object) -> RegistryClient:
    return RegistryClient(RegistryOptions(server.url, "avro", **options), FileReader())  # type: ignore[arg-type]


def test_password_is_sent_and_shown_nowhere(server: Answers) -> None:
    options = RegistryOptions(server.url, "avro", username="relay", password=SECRET)
    asked = RegistryClient(options, FileReader())
    asked.encoder(SUBJECT, 5, never)
    expected = "Basic " + base64.b64encode(f"relay:{SECRET}".encode()).decode()
    assert server.logins == [expected]
    assert SECRET not in repr(options)
    server.status, server.body = 401, {"error_code": 40101, "message": f"no such user: {expected} {SECRET}"}
    with pytest.raises(SchemasUnavailable) as raised:
        asked.encoder(SUBJECT, 5, never)
    assert str(raised.value) == f"schema registry {server.url}: HTTP status 401, code 40101"


def test_password_file_is_read_again_after_a_refusal(server: Answers, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    asked = RegistryClient(RegistryOptions(server.url, "avro", username="u", password_file=file), FileReader())
    server.status = 401
    with pytest.raises(SchemasUnavailable):
        asked.encoder(SUBJECT, 5, never)
    file.write_text("new\n")
    server.status = 200
    asked.encoder(SUBJECT, 5, never)
    assert [base64.b64decode((each or "")[6:]) for each in server.logins] == [b"u:old", b"u:new"]
    file.unlink()
    server.status = 401
    with pytest.raises(SchemasUnavailable):
        asked.encoder(SUBJECT, 5, never)
    with pytest.raises(SchemasUnavailable, match=r"password_file: .*: No such file or directory"):
        asked.encoder(SUBJECT, 5, never)


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503, 302])
def test_registry_that_cannot_answer_is_unavailable(server: Answers, status: int) -> None:
    server.status = status
    with pytest.raises(SchemasUnavailable, match=f"HTTP status {status}"):
        client(server).encoder(SUBJECT, 5, never)


@pytest.mark.parametrize("status", [404, 409, 422])
def test_refused_subject_is_unusable_alone(server: Answers, status: int) -> None:
    server.status = status
    with pytest.raises(SchemaUnusable, match=rf"subject orders-value: .*HTTP status {status}"):
        client(server).encoder(SUBJECT, 5, never)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({**FOUND, "schemaType": "JSON"}, "type JSON, not AVRO"),
        ({**FOUND, "schema": "nonsense"}, "unusable schema"),
        ({**FOUND, "ruleSet": {"domainRules": []}}, "rules, which the relay does not run"),
    ],
)
def test_schema_that_the_sink_cannot_use_is_named(server: Answers, answer: object, reason: str) -> None:
    server.body = answer
    with pytest.raises(SchemaUnusable, match=f"subject orders-value: .*{reason}"):
        client(server).encoder(SUBJECT, 5, never)


def test_nonsense_for_an_answer_is_no_error_of_the_relay(server: Answers) -> None:
    for server.body in ([], "x", None, {"schema": 5}):
        with pytest.raises((SchemasUnavailable, SchemaUnusable)):
            client(server).encoder(SUBJECT, 5, never)


def test_wait_ends_in_time_and_few_requests_remain(server: Answers) -> None:
    server.released.clear()
    asked = client(server, timeout_seconds=10.0)
    for _ in range(MAX_STUCK):
        begin = time.monotonic()
        with pytest.raises(SchemasUnavailable, match="no answer in time"):
            asked.encoder(SUBJECT, 0.1, never)
        assert time.monotonic() - begin < 2
    with pytest.raises(SchemasUnavailable, match="earlier requests have not ended"):
        asked.encoder(SUBJECT, 0.1, never)
    assert len(server.logins) <= MAX_STUCK


def test_withdrawn_call_does_not_wait(server: Answers) -> None:
    server.released.clear()
    begin = time.monotonic()
    with pytest.raises(SchemasUnavailable):
        client(server, timeout_seconds=10.0).encoder(SUBJECT, 10, lambda: True)
    assert time.monotonic() - begin < 2


def test_registry_that_is_not_there_is_unavailable() -> None:
    absent = RegistryClient(RegistryOptions("http://127.0.0.1:1/path", "avro"), FileReader())
    with pytest.raises(SchemasUnavailable, match=r"schema registry http://127.0.0.1:1: no answer \(ConnectError\)"):
        absent.probe(5)
