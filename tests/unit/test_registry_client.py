"""Requests to a schema registry: bounded in time and size, with secrets that appear nowhere, and what answers mean."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outbox_relay.domain.file_reading import FileReader
from outbox_relay.sinks.kafka.event_schemas import SchemasUnavailable, SchemaUnusable, Subject
from outbox_relay.sinks.kafka.registry_client import (
    MAX_REFERENCES,
    MAX_SCHEMA_BYTES,
    MAX_THREADS,
    RegistryClient,
    RegistryOptions,
)
from outbox_relay.sinks.kafka.registry_requests import MAX_ANSWER_BYTES
from tests.support.apicurio import AVRO
from tests.support.receiver.certificates import Authority
from tests.support.wait import until

SECRET = "a-password-of-the-registry"
SUBJECT = Subject("orders-value", None, "order.created")
FOUND = {"subject": "orders-value", "version": 1, "id": 7, "schema": json.dumps(AVRO)}


class Answers(ThreadingHTTPServer):
    """A server that answers every request alike, or by its path, or not at all."""

    daemon_threads = True
    block_on_close = False
    status = 200
    body: object = FOUND
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.scheme = "http"
        if tls is not None:
            self.scheme, self.socket = "https", tls.wrap_socket(self.socket, server_side=True)
        self.logins: list[str | None] = []
        self.paths: list[str] = []
        self.posted: list[object] = []
        self.ended = 0
        self.pieces: Callable[[], Iterator[bytes]] | None = None
        """Returns the bytes of an answer, instead of one of HTTP."""
        self.released = threading.Event()
        self.released.set()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing: clients that give up close their connections."""

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        super().shutdown_request(request)
        self.ended += 1


class Answer(BaseHTTPRequestHandler):
    """One answer."""

    server: Answers  # pyright: ignore[reportIncompatibleVariableOverride] - as socketserver documents it
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        assert self.headers["content-type"] == "application/vnd.schemaregistry.v1+json"
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.logins.append(self.headers.get("authorization"))
        self.server.paths.append(self.path)
        self.server.released.wait(20)
        if self.server.pieces is not None:
            self.close_connection = True
            try:
                for piece in self.server.pieces():
                    self.wfile.write(piece)
            except OSError:
                self.server.ended += 1
            return
        found = self.server.body
        found = found(self.path) if callable(found) else found
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        for header in self.server.headers:
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Write nothing."""


def running(answers: Answers) -> Generator[Answers]:
    thread = threading.Thread(target=answers.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield answers
    answers.released.set()
    answers.shutdown()
    thread.join()
    answers.server_close()


@pytest.fixture
def server() -> Generator[Answers]:
    yield from running(Answers())


def never() -> bool:
    return False


def client(server: Answers, **options: object) -> RegistryClient:
    return RegistryClient(RegistryOptions(server.url, "avro", **options), FileReader())  # type: ignore[arg-type]


def ask(
    asked: RegistryClient, subject: Subject = SUBJECT, seconds: float = 5.0, cancelled: Callable[[], bool] = never
) -> bytes:
    """Return an event in the schema that the registry gives."""
    inquiry = asked.inquire(time.monotonic() + seconds, cancelled)
    try:
        return inquiry.encoder(subject).encode("orders", b'{"n": 1}')
    finally:
        inquiry.close()


def test_password_is_sent_and_shown_nowhere(server: Answers) -> None:
    options = RegistryOptions(server.url, "avro", username="relay", password=SECRET)
    asked = RegistryClient(options, FileReader())
    ask(asked)
    expected = "Basic " + base64.b64encode(f"relay:{SECRET}".encode()).decode()
    assert server.logins == [expected]
    assert SECRET not in repr(options)
    server.status, server.body = 401, {"error_code": 40101, "message": f"no such user: {expected} {SECRET}"}
    with pytest.raises(SchemasUnavailable) as raised:
        ask(asked)
    assert str(raised.value) == f"schema registry {server.url}: HTTP status 401, code 40101"
    assert raised.value.__cause__ is None


def test_password_file_is_read_again_after_a_refusal(server: Answers, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    asked = RegistryClient(RegistryOptions(server.url, "avro", username="u", password_file=file), FileReader())
    server.status = 401
    with pytest.raises(SchemasUnavailable):
        ask(asked)
    file.write_text("new\n")
    server.status = 200
    ask(asked)
    assert [base64.b64decode((each or "")[6:]) for each in server.logins] == [b"u:old", b"u:new"]
    file.unlink()
    server.status = 401
    with pytest.raises(SchemasUnavailable):
        ask(asked)
    with pytest.raises(SchemasUnavailable, match=r"registry.password_file: .*: No such file or directory"):
        ask(asked)


@pytest.mark.parametrize("status", [400, 401, 403, 406, 429, 500, 503])
def test_registry_that_cannot_answer_is_unavailable(server: Answers, status: int) -> None:
    server.status = status
    with pytest.raises(SchemasUnavailable, match=f"HTTP status {status}"):
        ask(client(server))


def test_redirect_is_not_followed(server: Answers) -> None:
    server.status, server.headers = 302, (("location", f"{server.url}/elsewhere"),)
    with pytest.raises(SchemasUnavailable, match="HTTP status 302: redirects are not followed"):
        ask(client(server, username="relay", password=SECRET))
    assert server.paths == ["/subjects/orders-value/versions/latest"]


@pytest.mark.parametrize(("status", "code"), [(404, 40401), (404, 40402), (404, 40403), (409, 409), (422, 42201)])
def test_refused_subject_is_unusable_alone(server: Answers, status: int, code: int) -> None:
    server.status, server.body = status, {"error_code": code, "message": SECRET}
    with pytest.raises(SchemaUnusable, match=rf"subject orders-value: .*HTTP status {status}, code {code}") as raised:
        ask(client(server))
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("body", [b"<html>not found</html>", {"error_code": 50001}, {"error_code": "40401"}, {}])
def test_other_server_than_a_registry_makes_no_event_dead(server: Answers, body: object) -> None:
    """Goes red if the status alone decides: with a wrong path in `url` all events would be dead letters."""
    server.status, server.body = 404, body
    with pytest.raises(SchemasUnavailable, match=r"HTTP status 404: .* is the path in url right"):
        ask(client(server))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({**FOUND, "schemaType": "JSON"}, "type JSON, not AVRO"),
        ({**FOUND, "schemaType": "XML"}, "of an unknown type"),
        ({**FOUND, "schema": "nonsense"}, "unusable schema"),
        ({**FOUND, "schema": "[" * 200 + "]" * 200}, "nested too deeply"),
        ({**FOUND, "ruleSet": {"domainRules": []}}, "rules, which the relay does not run"),
        *(({**FOUND, "references": each}, "references that cannot be read") for each in (5, "x", [1], [{"name": 1}])),
    ],
)
def test_schema_that_the_sink_cannot_use_is_named(server: Answers, answer: object, reason: str) -> None:
    server.body = answer
    with pytest.raises(SchemaUnusable, match=f"subject orders-value: .*{reason}"):
        ask(client(server))


ODD: list[object] = [
    [],
    "x",
    None,
    {"schema": 5},
    {**FOUND, "id": -1},
    {**FOUND, "id": True},
    {**FOUND, "id": 2**31},
    b"{",
]


@pytest.mark.parametrize("body", [*ODD, b"[" * 1_000_000, b"\xff", gzip.compress(json.dumps(FOUND).encode())])
def test_nonsense_for_an_answer_is_no_error_of_the_relay_and_makes_no_event_dead(server: Answers, body: object) -> None:
    server.body = body
    with pytest.raises(SchemasUnavailable):
        ask(client(server))


def test_subject_is_quoted_and_file_is_looked_up_or_registered(server: Answers, tmp_path: Path) -> None:
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(AVRO))
    odd = Subject("../a b?/ä", None, "order.created")
    ask(client(server), odd)
    server.body = {"id": 9}
    for auto_register in (False, True):
        files = {"order.created": file}
        assert ask(client(server, schema_files=files, auto_register=auto_register), odd).startswith(b"\0\0\0\0\x09")
    quoted = "/subjects/..%2Fa%20b%3F%2F%C3%A4"
    assert server.paths == [f"{quoted}/versions/latest", quoted, f"{quoted}/versions"]
    assert server.posted == [{"schema": json.dumps(AVRO), "schemaType": "AVRO"}] * 2
    file.unlink()
    with pytest.raises(SchemasUnavailable, match=r'registry.schema_files."order.created": .*No such file'):
        ask(client(server, schema_files={"order.created": file}))


def test_references_are_limited_in_number_and_bytes(server: Answers) -> None:
    numbers = itertools.count(1)

    def with_another(_path: str) -> object:
        return {**FOUND, "references": [{"name": "n", "subject": "s", "version": next(numbers)}]}

    server.body = with_another
    with pytest.raises(SchemaUnusable, match=f"orders-value: its schema refers to more than {MAX_REFERENCES} schemas"):
        ask(client(server), seconds=20)
    assert len(server.paths) == MAX_REFERENCES + 1
    large = json.dumps({**AVRO, "doc": "x" * (MAX_SCHEMA_BYTES // 3)})
    server.body = lambda path: {**FOUND, "schema": large, "references": with_another(path)["references"]}  # type: ignore[index]
    with pytest.raises(SchemaUnusable, match=f"larger than {MAX_SCHEMA_BYTES}"):
        ask(client(server), seconds=20)
    assert len(server.paths) == MAX_REFERENCES + 1 + 3


# -- time and size -----------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\n"


def slowly(beginning: bytes, piece: bytes) -> Iterator[bytes]:
    yield beginning
    while True:
        time.sleep(0.05)
        yield piece


TRICKLES = {
    "head": lambda: slowly(b"HTTP/1.1 2", b"0"),
    "headers": lambda: slowly(HEAD, b"a: b\r\n"),
    "interim": lambda: slowly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": lambda: slowly(HEAD + b"content-length: 100000\r\n\r\n", b" "),
    "chunks": lambda: slowly(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@pytest.mark.parametrize("kind", TRICKLES)
def test_answer_that_never_ends_is_given_up_and_its_connection_is_closed(server: Answers, kind: str) -> None:
    """Goes red without `end`: each operation of the socket is in time, and the thread would read for days."""
    server.pieces = TRICKLES[kind]
    begin = time.monotonic()
    with pytest.raises(SchemasUnavailable, match="no answer in time"):
        ask(client(server, timeout_seconds=0.3))
    assert time.monotonic() - begin < 2
    until(lambda: not threads() and server.ended >= 1, seconds=10, what="thread and connection end")


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "schema registry"]


def endless(beginning: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([beginning], itertools.repeat(piece))


SIZES = {
    "body": endless(HEAD + b"\r\n", b" " * 65_536),
    "length": endless(HEAD + b"content-length: 99999999999\r\n\r\n", b" " * 65_536),
    "chunks": endless(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65_536 + b"\r\n"),
    "status": endless(b"HTTP/1.1 200 ", b"x" * 65_536),
    "headers": endless(HEAD, b"a: b\r\n" * 1000),
}


@pytest.mark.parametrize("kind", SIZES)
def test_size_of_an_answer_is_limited(server: Answers, kind: str) -> None:
    server.pieces = SIZES[kind]
    with pytest.raises(SchemasUnavailable) as raised:
        ask(client(server))
    is_body = kind in ("body", "length", "chunks")
    assert (f"its answer is larger than {MAX_ANSWER_BYTES} bytes" in str(raised.value)) == is_body
    until(lambda: not threads() and server.ended >= 1, seconds=10, what="thread and connection end")


def test_wait_ends_in_time_and_few_requests_remain(server: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver cannot be interrupted."""
    resolving = threading.Event()

    def resolve(*_: object, **__: object) -> socket.socket:
        resolving.wait(20)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", resolve)
    asked = client(server, timeout_seconds=10.0)
    try:
        for _ in range(MAX_THREADS):
            begin = time.monotonic()
            with pytest.raises(SchemasUnavailable, match="no answer in time"):
                ask(asked, seconds=0.1)
            assert time.monotonic() - begin < 2
        with pytest.raises(SchemasUnavailable, match="earlier requests have not ended"):
            ask(asked, seconds=0.1)
        assert len(threads()) == MAX_THREADS
    finally:
        resolving.set()
    monkeypatch.undo()
    until(lambda: not threads(), seconds=10, what="the threads end")
    ask(asked)


def test_withdrawn_call_does_not_wait(server: Answers) -> None:
    server.released.clear()
    begin = time.monotonic()
    with pytest.raises(SchemasUnavailable):
        ask(client(server, timeout_seconds=10.0), seconds=10, cancelled=lambda: True)
    assert time.monotonic() - begin < 2


def test_one_connection_serves_an_inquiry_and_is_closed_with_it(server: Answers) -> None:
    asked = client(server)
    inquiry = asked.inquire(time.monotonic() + 5, never)
    inquiry.probe()
    for _ in range(3):
        inquiry.encoder(SUBJECT)
    assert server.ended == 0
    inquiry.close()
    until(lambda: server.ended == 1, seconds=10, what="the connection ends")
    assert not threads()


def test_registry_that_is_not_there_is_unavailable() -> None:
    absent = RegistryClient(RegistryOptions("http://127.0.0.1:1/path", "avro"), FileReader())
    with pytest.raises(SchemasUnavailable, match=r"schema registry http://127.0.0.1:1: no answer: Connection refused"):
        absent.inquire(time.monotonic() + 5, never).probe()


def test_next_address_is_asked_first_after_one_that_does_not_answer(server: Answers) -> None:
    asked = RegistryClient(RegistryOptions(f"http://127.0.0.1:1, {server.url}/", "avro"), FileReader())
    assert ask(asked)
    assert asked.addresses()[0] == f"{server.url}/"
    server.status = 503
    with pytest.raises(SchemasUnavailable, match=r"http://127.0.0.1:1: no answer"):
        ask(asked)


# -- TLS ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def test_certificate_of_the_authority_in_the_settings_is_accepted(authority: Authority) -> None:
    for server in running(Answers(authority.good())):
        assert ask(client(server, ca_file=authority.certificate_file))


@pytest.mark.parametrize("kind", ["expired", "wrong_host", "self_signed", "unknown", "tls_1_0"])
def test_other_certificate_is_refused_before_the_password_is_sent(authority: Authority, kind: str) -> None:
    context = authority.good() if kind == "unknown" else getattr(authority, kind)()
    trusted = {} if kind == "unknown" else {"ca_file": authority.certificate_file}
    for server in running(Answers(context)):
        with pytest.raises(SchemasUnavailable, match=r"its certificate is not accepted|TLS failed") as raised:
            ask(client(server, username="relay", password=SECRET, **trusted))
        assert server.logins == []
        assert SECRET not in str(raised.value)


def test_client_presents_its_certificate(authority: Authority) -> None:
    for server in running(Answers(authority.asks_for_certificate())):
        certificate, key = authority.client_files()
        tls = {"ca_file": authority.certificate_file, "client_certificate": certificate, "client_key": key}
        assert ask(client(server, **tls))
        with pytest.raises(SchemasUnavailable, match="no answer"):
            ask(client(server, ca_file=authority.certificate_file))


def test_files_of_tls_are_named_and_read_again(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    for server in running(Answers(authority.good())):
        asked = client(server, ca_file=file)
        with pytest.raises(SchemasUnavailable, match=r"registry.ca_file .*ca.pem: No such file"):
            ask(asked)
        file.write_text(SECRET)
        with pytest.raises(SchemasUnavailable, match=r"registry.ca_file .*ca.pem: ") as raised:
            ask(asked)
        assert SECRET not in str(raised.value)
        file.write_bytes(authority.certificate_file.read_bytes())
        assert ask(asked)
