"""Settings that are right: what file, environment and command line add up to, and what can be asked of the result."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.service.clients import build_specs
from outbox_relay.settings import KafkaSettings, Settings, WebhookSettings, load, log_settings, warnings
from outbox_relay.settings.effective import recorded, shown
from tests.support.settings_file import DSN, FILE, KEY, OTHER, SECRET, load_text

PRODUCER = "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER"


def kafka(settings: Settings) -> KafkaSettings:
    """Return the Kafka sink."""
    sink = settings.sinks["events"]
    assert isinstance(sink, KafkaSettings)
    return sink


def webhook(settings: Settings) -> WebhookSettings:
    """Return the webhook."""
    sink = settings.sinks["crm"]
    assert isinstance(sink, WebhookSettings)
    return sink


def with_secrets(text: str) -> str:
    """Return the file with other secrets of the webhook."""
    return FILE.replace(FILE[FILE.index("secrets =") : FILE.index("allow_networks")], f"{text}\n")


def signatures(settings: Settings) -> list[tuple[bytes, float | None]]:
    """Return the signature of an empty message by each key of the webhook, and the key's end."""
    return [(key.sign(b""), key.until) for key in webhook(settings).signing_keys()]


def by(key: bytes) -> bytes:
    """Return the signature of an empty message by a symmetric key."""
    return hmac.digest(key, b"", "sha256")


def test_file_of_the_documentation_loads_and_cannot_be_changed(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    assert settings.database.dsn() == DSN
    assert settings.http.address == ("127.0.0.1", 8080)
    assert kafka(settings).producer["linger.ms"] == 5
    assert webhook(settings).retry == RetryPolicy(12, 1.0, 3600.0, 0.5)
    assert settings.routes.sinks_for("order.created") == {"events", "crm"}
    assert warnings(settings) == []
    assert load_text(tmp_path, FILE) == settings != load_text(tmp_path, FILE.replace("= 12", "= 13"))
    with pytest.raises(ValidationError):
        settings.relay.lease_seconds = 3


def test_nothing_given_is_no_error_but_names_no_database() -> None:
    settings = load(None, {})
    assert (settings.http.address, settings.sinks) == (None, {})
    for ask in (settings.database.require_dsn, settings.database.dsn):
        with pytest.raises(ConfigurationError, match=r"dsn or dsn_file .*DATABASE_URL.*--dsn"):
            ask()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_file_is_named_by_the_environment_and_may_be_of_another_editor(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(f"\ufeff{FILE}".replace("\n", newline).encode())
    assert load(None, {"OUTBOX_RELAY_CONFIG": str(path)}).sinks.keys() == {"events", "crm"}
    assert load(path, {"OUTBOX_RELAY_CONFIG": "/nowhere/relay.toml"}).sinks.keys() == {"events", "crm"}


@pytest.mark.parametrize(
    ("name", "value", "place", "expected"),
    [
        ("RELAY__LEASE_SECONDS", "30", "relay.lease_seconds", 30),
        ("HTTP__LISTEN", "[::1]:9", "http.listen", "[::1]:9"),
        ("HTTP__LISTEN", "", "http.listen", None),
        ("SINKS__EVENTS__TOPIC", "123", "sinks.events.topic", "123"),
        ("SINKS__EVENTS__CIRCUIT__OPEN_AFTER", "3", "sinks.events.circuit.open_after", 3),
        ("SINKS__CRM__RETRY__BASE_SECONDS", "30", "sinks.crm.retry.base_seconds", 30),
        ("SINKS__CRM__ALLOW_HTTP", "true", "sinks.crm.allow_http", True),
        ("SINKS__CRM__FORWARD_HEADERS", "X-Tenant", "sinks.crm.forward_headers", ("x-tenant",)),
        ("SINKS__CRM__FORWARD_HEADERS", '["X-A", "x-b", "x-a"]', "sinks.crm.forward_headers", ("x-a", "x-b")),
        ("SINKS__CRM__RETRY", '{"attempts": 5}', "sinks.crm.retry", RetryPolicy(attempts=5, jitter=0.5)),
        ("SINKS__CRM__CLAIM", "rows", "sinks.crm.pending_max", 10_000_000),
        ("SINKS__CRM__CLAIM", "log", "sinks.crm.pending_max", 100_000),
    ],
)
def test_variable_wins_over_the_file(tmp_path: Path, name: str, value: str, place: str, expected: object) -> None:
    settings = load_text(tmp_path, FILE, {f"OUTBOX_RELAY_{name}": value})
    found: Any = SimpleNamespace(**dict(settings) | {"sinks": SimpleNamespace(**settings.sinks)})
    assert attrgetter(place)(found) == expected


def test_variables_of_a_producer_have_underscores_for_dots_and_any_text(tmp_path: Path) -> None:
    environ = {f"{PRODUCER}__BOOTSTRAP_SERVERS": "kafka:9092", f"{PRODUCER}__SASL_PASSWORD": "1e5"}
    producer = kafka(load_text(tmp_path, FILE, environ)).producer
    assert (producer["bootstrap.servers"], producer["sasl.password"]) == ("kafka:9092", "1e5")
    assert producer["linger.ms"] == 5


def test_routes_as_json_replace_the_table(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE, {"OUTBOX_RELAY_ROUTES": '{"invoice.*": ["crm"], "x": ["events"]}'})
    assert (settings.routes.patterns_for("crm"), settings.routes.patterns_for("events")) == (("invoice.*",), ("x",))


def test_names_that_kubernetes_injects_are_ignored(tmp_path: Path) -> None:
    environ = {
        "OUTBOX_RELAY_PORT": "tcp://10.0.0.1:8080",
        "OUTBOX_RELAY_HTTP": "x",
        "OUTBOX_RELAY_LOG_LEVEL": "debug",
        "OTHER__DATABASE__DSN": "x",
        "outbox_relay_nothing__here": "x",
    }
    assert load_text(tmp_path, FILE, environ) == load_text(tmp_path, FILE)


# -- the database -----------------------------------------------------------------------------------------------------


def test_database_is_named_by_option_then_variable_then_file_then_database_url(tmp_path: Path) -> None:
    own = {"OUTBOX_RELAY_DATABASE__DSN_FILE": str(tmp_path / "none"), "DATABASE_URL": "postgres://url/x"}
    assert load_text(tmp_path, FILE, own, dsn="host=option").database.dsn() == "host=option"
    variable = {"OUTBOX_RELAY_DATABASE__DSN": "host=variable", "DATABASE_URL": "postgres://url/x"}
    for text in (FILE, '[database]\ndsn_file = "/nowhere"', ""):
        assert load_text(tmp_path, text, variable).database.dsn() == "host=variable"
    assert load_text(tmp_path, FILE, {"DATABASE_URL": "postgres://url/x"}).database.dsn() == DSN
    pooled = {"DATABASE_URL": "postgres://url/x", "OUTBOX_RELAY_DATABASE__POOLER": "transaction"}
    database = load(None, pooled).database
    assert (database.dsn(), database.pooler) == ("postgres://url/x", "transaction")


def test_file_with_the_connection_string_is_read_at_each_call(tmp_path: Path) -> None:
    secret = tmp_path / "dsn"
    database = load_text(tmp_path, f"[database]\ndsn_file = '{secret}'").database
    database.require_dsn()
    with pytest.raises(ConfigurationError, match="dsn: No such file or directory"):
        database.dsn()
    for text in (f"  {DSN}?password=one\n", f"{DSN}?password=two"):
        secret.write_text(text)
        assert database.dsn() == text.strip()
    for wrong in (b"", b" \n", b"hunter2", b"postgresql://u:hunter2@h/d\nx", b"\xffhunter2="):
        secret.write_bytes(wrong)
        with pytest.raises(ConfigurationError, match="dsn_file ") as refused:
            database.dsn()
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("pooler", "listen_dsn", "expected"),
    [("none", "", DSN), ("transaction", "", None), ("transaction", "host=direct", "host=direct")],
)
def test_wakeups_need_a_direct_connection(tmp_path: Path, pooler: str, listen_dsn: str, expected: str | None) -> None:
    text = f'[database]\ndsn = "{DSN}"\npooler = "{pooler}"\nlisten_dsn = "{listen_dsn}"'
    assert load_text(tmp_path, text).database.wakeup_dsn() == expected


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_secret_is_a_text_or_names_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRM_SECRET", OTHER)
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\r\n")
    named = f'secrets = [{{ file = "{path}" }}, {{ secret = {{ env = "CRM_SECRET" }}, until = 2030-05-01T00:00:00Z }}]'
    settings = load_text(tmp_path, with_secrets(named))
    expected = [(by(KEY), None), (by(b"o" * 64), datetime(2030, 5, 1, tzinfo=UTC).timestamp())]
    assert signatures(settings) == expected
    variable = {"OUTBOX_RELAY_SINKS__CRM__SECRETS": OTHER}
    assert signatures(load_text(tmp_path, FILE, variable)) == [(by(b"o" * 64), None)]
    monkeypatch.delenv("CRM_SECRET")
    with pytest.raises(ConfigurationError, match=r"secrets\[1\]: the variable CRM_SECRET is not set"):
        signatures(settings)


@pytest.mark.parametrize("content", [b"", b"hunter2", b"whsec_hunter2", b"\xffhunter2", b"hunter2" * 10_000])
def test_file_without_a_secret_is_named_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"secrets\[0\]: {path}: ") as refused:
        signatures(load_text(tmp_path, with_secrets(f'secrets = [{{ file = "{path}" }}]')))
    assert "hunter2" not in str(refused.value)


def test_headers_and_proxy_are_read_from_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "Bearer x")
    proxy = tmp_path / "proxy"
    proxy.write_text("http://relay:a%40b@egress:3128\n")
    more = f'headers = {{ X-Tenant = "a b", authorization = {{ env = "TOKEN" }} }}\nproxy = {{ file = "{proxy}" }}\n'
    crm = webhook(load_text(tmp_path, FILE.replace("allow_networks", f"{more}allow_networks")))
    assert crm.request_headers() == {"x-tenant": "a b", "authorization": "Bearer x"}
    assert (crm.proxy_endpoint(), crm.proxy_authorization()) == (("egress", 3128), "Basic cmVsYXk6YUBi")
    monkeypatch.setenv("TOKEN", "hunter2\r\nx: y")
    proxy.write_text("http://u:hunter2@egress")
    places = {crm.request_headers: "headers.authorization: the variable TOKEN", crm.proxy_endpoint: "proxy: /"}
    for read, place in places.items():
        with pytest.raises(ConfigurationError, match=place) as refused:
            read()
        assert "hunter2" not in str(refused.value)


def test_producer_and_registry_take_secrets(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("u:p\n")
    text = FILE.replace('"linger.ms" = 5', f'"sasl.password" = {{ file = "{path}" }}\n"linger.ms" = 5')
    registry = f'registry = {{ url = "http://r", format = "avro", user_info = {{ file = "{path}" }} }}\n'
    sink = kafka(load_text(tmp_path, text.replace("topic =", f"{registry}topic =")))
    assert "sasl.password" not in sink.plain_producer
    assert sink.secret_producer["sasl.password"].read(str) == "u:p"
    assert sink.registry.user_info is not None
    assert sink.registry.user_info.read(str) == "u:p"


def test_no_secret_is_shown_and_another_has_another_hash(tmp_path: Path) -> None:
    texts = ("hunter2canary", "another")
    secrets = [
        FILE.replace('"linger.ms"', f'"sasl.password" = "{text}"\n"linger.ms"').replace(
            "relay@localhost", f"relay:{text}@localhost"
        )
        for text in texts
    ]
    one, two = (load_text(tmp_path, text) for text in secrets)
    flat = shown(one)
    assert flat['sinks.events.producer."sasl.password"'] == flat["database.dsn"] == "…"
    assert flat["sinks.crm.url"] == "https://crm.example.com/…"
    assert flat["sinks.crm.retry.attempts"] == 12
    assert flat["sinks.crm.secrets[0].secret"] == "…"
    assert flat['routes."order.*"'] == ["events", "crm"]
    hashes, others = recorded(one, b"key"), recorded(two, b"key")
    for text in (repr(one), str(flat), str(hashes)):
        assert "hunter2canary" not in text
        assert SECRET not in text
    assert {name for name in hashes if hashes[name] != others[name]} == {
        "database.dsn",
        'sinks.events.producer."sasl.password"',
    }
    assert recorded(one, b"key") == hashes != recorded(one, b"another key")


# -- what is made of it -----------------------------------------------------------------------------------------------


def test_specs_are_the_settings_of_their_sinks(tmp_path: Path) -> None:
    more = "rate_per_second = 0.5\nmax_in_flight_total = 20\nspread_seconds = 300\n"
    settings = load_text(tmp_path, FILE.replace("allow_networks", f'when_dead = "hold"\n{more}allow_networks'))
    crm, events = (build_specs(settings)[name] for name in ("crm", "events"))
    assert (crm.settings, crm.patterns, crm.types) == (settings.sinks["crm"], ("order.*",), ("order.%",))
    assert (crm.hold, crm.ordered, crm.limits) == (True, True, SinkLimits(0.5, 20, 300.0))
    assert (events.hold, events.limits) == (False, NO_LIMITS)


def test_warnings_name_what_is_doubtful(tmp_path: Path) -> None:
    text = FILE.replace('["10.1.0.0/16", "fd00::1"]', '["0.0.0.0/0"]').replace('"crm"]', '"events"]')
    text += '[schedules.nightly]\ncron = "0 3 * * *"\ntype = "nightly"\n'
    found = warnings(load_text(tmp_path, text))
    for warning, place in zip(found, ("sinks.crm", "allow_networks[0]", "schedules.nightly.type"), strict=True):
        assert place in warning
    assert "there is no sink" in warnings(load(None, {}))[0]


def test_level_and_format_of_the_log_come_from_variables() -> None:
    assert log_settings({}, terminal=False) == ("info", "json")
    assert log_settings({"OUTBOX_RELAY_LOG_LEVEL": " Debug "}, terminal=True) == ("debug", "console")
    with pytest.raises(ConfigurationError, match="OUTBOX_RELAY_LOG_FORMAT: should be one of json, console"):
        log_settings({"OUTBOX_RELAY_LOG_FORMAT": "hunter2"}, terminal=True)
