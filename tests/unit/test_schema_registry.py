"""Answers of a schema registry: those about one subject, those about all, and secrets, which are in no reason."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import pytest

from outbox_relay.fields import Secret
from outbox_relay.sinks.kafka.delivery import Encoder
from outbox_relay.sinks.kafka.registry import MAX_THREADS, RegistryOptions, SchemaRegistry
from outbox_relay.sinks.kafka.schemas import SchemasUnavailable, SchemaUnusable, Subject
from tests.support.apicurio import AVRO
from tests.support.receiver.certificates import Authority
from tests.support.registry_server import RegistryServer
from tests.support.wait import until

SECRET = "a-password-of-the-registry"
SUBJECT = Subject("orders-value", None, "order.created")
FOUND = {"subject": "orders-value", "version": 1, "id": 7, "schema": json.dumps(AVRO)}


@pytest.fixture
def server() -> Generator[RegistryServer]:
    with RegistryServer() as running:
        running.register("orders-value", AVRO)
        yield running


def registry(server: RegistryServer, **options: object) -> SchemaRegistry:
    return SchemaRegistry(RegistryOptions(server.url, "avro", **options))  # type: ignore[arg-type]


def ask(asked: SchemaRegistry, subject: Subject = SUBJECT, seconds: float = 10.0) -> Encoder | SchemaUnusable:
    [(_, answer)] = asked.read([subject], seconds)
    return answer


def encoded(asked: SchemaRegistry, subject: Subject = SUBJECT) -> bytes:
    """Return an event in the schema that the registry gives."""
    answer = ask(asked, subject)
    assert not isinstance(answer, SchemaUnusable), answer
    return answer.encode("orders", b'{"n": 1}')


def test_password_is_sent_and_shown_nowhere(server: RegistryServer) -> None:
    options = RegistryOptions(server.url, "avro", user_info=lambda: f"relay:{SECRET}")
    asked = SchemaRegistry(options)
    assert encoded(asked)
    expected = "Basic " + base64.b64encode(f"relay:{SECRET}".encode()).decode()
    assert server.logins == [expected]
    assert SECRET not in repr(options)
    server.status, server.body = 401, {"error_code": 40101, "message": f"no such user: {expected} {SECRET}"}
    with pytest.raises(SchemasUnavailable) as raised:
        ask(asked)
    assert str(raised.value) == f"schema registry {server.url}: HTTP status 401, code 40101"


def test_password_file_is_read_at_each_time(server: RegistryServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    asked = registry(server, user_info=partial(Secret(file=file).read, "u:{}".format))
    for password in ("old", "new"):
        file.write_text(f"{password}\n")
        assert encoded(asked)
    assert [base64.b64decode((each or "")[6:]) for each in server.logins] == [b"u:old", b"u:new"]
    file.unlink()
    with pytest.raises(SchemasUnavailable, match=r"registry.user_info: .*: No such file or directory"):
        ask(asked)


@pytest.mark.parametrize("status", [401, 429, 503])
def test_registry_that_cannot_answer_is_unavailable(server: RegistryServer, status: int) -> None:
    server.status, server.body = status, {"error_code": 1, "message": SECRET}
    with pytest.raises(SchemasUnavailable, match=f"HTTP status {status}$"):
        ask(registry(server))


def test_redirect_is_not_followed(server: RegistryServer) -> None:
    server.status, server.location = 302, f"{server.url}/elsewhere"
    with pytest.raises(SchemasUnavailable, match="HTTP status 302: redirects are not followed"):
        ask(registry(server, user_info=lambda: f"relay:{SECRET}"))
    assert server.paths == ["/subjects/orders-value/versions/latest"]


@pytest.mark.parametrize(("status", "code"), [(404, 40401), (409, 409), (422, 42201)])
def test_refused_subject_is_unusable_alone(server: RegistryServer, status: int, code: int) -> None:
    server.status, server.body = status, {"error_code": code, "message": SECRET}
    reason = str(ask(registry(server)))
    assert reason.startswith("subject orders-value: the schema registry ")
    assert reason.endswith(f"(HTTP status {status}, code {code})")


@pytest.mark.fence("events are dead because a schema registry is down, moved, or no registry")
@pytest.mark.parametrize("body", [b"<html>not found</html>", {"error_code": 50001}, {"error_code": "40401"}, {}, []])
def test_other_server_than_a_registry_is_unavailable(server: RegistryServer, body: object) -> None:
    """Goes red if the status alone decides: with a wrong path in `url` all schemas would be missing."""
    server.status, server.body = 404, body
    with pytest.raises(SchemasUnavailable, match=r"HTTP status 404: .* is the path in url right"):
        ask(registry(server))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({**FOUND, "schemaType": "JSON"}, "type JSON, not AVRO"),
        ({**FOUND, "schemaType": "XML"}, "type XML, not AVRO"),
        ({**FOUND, "schema": "nonsense"}, "unusable schema"),
        ({**FOUND, "schema": "[" * 200 + "]" * 200}, "nested too deeply"),
        ({**FOUND, "ruleSet": {"domainRules": []}}, "rules, which the relay does not run"),
    ],
)
def test_schema_that_the_sink_cannot_use_is_named(server: RegistryServer, answer: object, reason: str) -> None:
    server.status, server.body = 200, answer
    assert reason in str(ask(registry(server)))


ODD: list[object] = [[], "x", None, {"schema": 5}, {**FOUND, "id": -1}, {**FOUND, "id": True}, b"{", b"\xff"]


@pytest.mark.parametrize("body", [*ODD, b"[" * 1_000_000, {**FOUND, "references": 5}, {**FOUND, "references": ["x"]}])
def test_nonsense_for_an_answer_is_no_error_of_the_relay(server: RegistryServer, body: object) -> None:
    server.status, server.body = 200, body
    with pytest.raises(SchemasUnavailable, match=r"is not that of a registry"):
        ask(registry(server))


def test_missing_reference_makes_its_subject_unusable(server: RegistryServer) -> None:
    server.register("orders-value", AVRO, references=[{"name": "n", "subject": "gone", "version": 3}])
    assert "no such subject, version or schema" in str(ask(registry(server)))
    assert server.paths[-1] == "/subjects/gone/versions/3"


def test_subject_is_quoted_and_file_is_looked_up_or_registered(server: RegistryServer, tmp_path: Path) -> None:
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(AVRO))
    odd = Subject("../a b?/ä", None, "order.created")
    server.status, server.body = 200, FOUND
    assert encoded(registry(server), odd)
    server.body = {"id": 9}
    for auto_register in (False, True):
        files = {"order.created": file}
        asked = registry(server, schema_files=files, auto_register=auto_register)
        assert encoded(asked, odd).startswith(b"\0\0\0\0\x09")
    quoted = "/subjects/..%2Fa%20b%3F%2F%C3%A4"
    assert server.paths == [f"{quoted}/versions/latest", quoted, f"{quoted}/versions"]
    assert [(each["schema"], each["schemaType"]) for each in server.posted] == [(json.dumps(AVRO), "AVRO")] * 2
    file.unlink()
    with pytest.raises(SchemasUnavailable, match=r'registry.schema_files."order.created": .*No such file'):
        ask(registry(server, schema_files={"order.created": file}))


# -- time ----------------------------------------------------------------------------------------------------------


def trickle(released: threading.Event) -> Iterator[bytes]:
    """Return the bytes of an answer that ends when it is released."""
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    while not released.wait(0.02):
        yield b" "


def threads() -> int:
    return sum(each.name == "schema registry" for each in threading.enumerate())


@pytest.fixture
def released() -> Generator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_answer_that_takes_too_long_is_not_awaited_and_few_requests_remain(
    server: RegistryServer, released: threading.Event
) -> None:
    """Goes red without a thread: each operation of the socket is in time, and the answer is not."""
    server.pieces = partial(trickle, released)
    asked = registry(server, timeout_seconds=10.0)
    reasons: list[str] = []

    def refused() -> bool:
        with pytest.raises(SchemasUnavailable) as raised:
            ask(asked, seconds=0.2)
        reasons.append(str(raised.value).rpartition(": ")[2])
        return reasons[-1] != "no answer in time"

    until(refused, seconds=60, what="no further request is made")
    assert reasons[-1] == "earlier requests have not ended"
    assert threads() == MAX_THREADS
    released.set()
    until(lambda: not threads(), seconds=60, what="the answers end")
    server.pieces = None
    assert encoded(asked)


def test_silent_registry_is_unavailable_after_the_time_limit_of_a_request(
    server: RegistryServer, released: threading.Event
) -> None:
    def silence() -> Iterator[bytes]:
        released.wait(60)
        yield b""

    server.pieces = silence
    with pytest.raises(SchemasUnavailable, match="no answer in time"):
        ask(registry(server, timeout_seconds=0.1), seconds=600)


def test_registry_that_is_not_there_is_unavailable() -> None:
    absent = SchemaRegistry(RegistryOptions("http://127.0.0.1:1/path", "avro"))
    with pytest.raises(SchemasUnavailable, match=r"schema registry http://127.0.0.1:1: no answer: Connection refused"):
        list(absent.read([], 10))


def test_next_address_is_asked_if_one_does_not_answer(server: RegistryServer) -> None:
    assert encoded(SchemaRegistry(RegistryOptions(f"http://127.0.0.1:1, {server.url}/", "avro")))
    # A status that the client takes for final.
    server.status = 403
    with RegistryServer() as other:
        other.register("orders-value", AVRO)
        asked = SchemaRegistry(RegistryOptions(f"{server.url},{other.url}", "avro"))
        with pytest.raises(SchemasUnavailable, match="HTTP status 403"):
            ask(asked)
        assert encoded(asked)


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def test_certificate_of_the_authority_in_the_settings_is_accepted(authority: Authority) -> None:
    with RegistryServer(authority.good()) as server:
        server.register("orders-value", AVRO)
        assert encoded(registry(server, ca_file=authority.certificate_file))


@pytest.mark.parametrize("kind", ["expired", "wrong_host", "self_signed", "unknown"])
def test_other_certificate_is_refused_before_the_password_is_sent(authority: Authority, kind: str) -> None:
    context = authority.good() if kind == "unknown" else getattr(authority, kind)()
    trusted = {} if kind == "unknown" else {"ca_file": authority.certificate_file}
    with RegistryServer(context) as server:
        with pytest.raises(SchemasUnavailable, match=r"its certificate is not accepted") as raised:
            ask(registry(server, user_info=lambda: f"relay:{SECRET}", **trusted))
        assert server.logins == []
        assert SECRET not in str(raised.value)


def test_client_presents_its_certificate(authority: Authority) -> None:
    with RegistryServer(authority.asks_for_certificate()) as server:
        server.register("orders-value", AVRO)
        certificate, key = authority.client_files()
        tls = {"ca_file": authority.certificate_file, "client_certificate": certificate, "client_key": key}
        assert encoded(registry(server, **tls))
        with pytest.raises(SchemasUnavailable, match="no answer"):
            ask(registry(server, ca_file=authority.certificate_file))


def test_files_of_tls_are_named_and_read_again(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with RegistryServer(authority.good()) as server:
        server.register("orders-value", AVRO)
        asked = registry(server, ca_file=file)
        with pytest.raises(SchemasUnavailable, match=r"registry.ca_file .*ca.pem: No such file"):
            ask(asked)
        file.write_text(SECRET)
        with pytest.raises(SchemasUnavailable, match=r"registry.ca_file .*ca.pem: ") as raised:
            ask(asked)
        assert SECRET not in str(raised.value)
        file.write_bytes(authority.certificate_file.read_bytes())
        assert encoded(asked)
