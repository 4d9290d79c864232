"""Settings that are right: what file, environment and command line add up to, and what can be asked of the result."""

from __future__ import annotations

import hmac
import os
import socket
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr, ValidationError

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.settings import KafkaSettings, Settings, WebhookSettings, load, log_settings, warnings
from tests.support.settings_file import DSN, ED25519, FILE, KEY, OTHER, SECRET, load_text


def kafka(settings: Settings, name: str = "events") -> KafkaSettings:
    """Return the Kafka sink of that name."""
    sink = settings.sinks[name]
    assert isinstance(sink, KafkaSettings)
    return sink


def webhook(settings: Settings, name: str = "crm") -> WebhookSettings:
    """Return the webhook sink of that name."""
    sink = settings.sinks[name]
    assert isinstance(sink, WebhookSettings)
    return sink


def hmac_of(key: bytes) -> bytes:
    """Return the signature of an empty message by a symmetric key."""
    return hmac.digest(key, b"", "sha256")


def retry_policy(sink: KafkaSettings | WebhookSettings) -> RetryPolicy:
    """Return the table ``retry`` as the value that decisions use."""
    return RetryPolicy(**sink.retry.model_dump())


def test_file_of_the_documentation_loads(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    assert settings.database.dsn() == DSN
    assert settings.http.address == ("127.0.0.1", 8080)
    assert kafka(settings).topic_template() == TopicTemplate.parse("shop.{type}")
    assert kafka(settings).producer == {
        "bootstrap.servers": "localhost:9092",
        "linger.ms": 5,
        "socket.keepalive.enable": True,
    }
    assert retry_policy(webhook(settings)) == RetryPolicy(12, 1.0, 3600.0, 0.5)
    assert settings.routes.sinks_for("order.created") == {"events", "crm"}
    assert settings.routes.sinks_for("payment.captured") == {"events"}
    assert warnings(settings) == []


def test_defaults_are_those_of_the_contract(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    assert (settings.database.pooler, settings.database.dsn_file, settings.database.listen_dsn) == ("none", None, None)
    assert settings.relay.name == f"{socket.gethostname()}:{os.getpid()}"
    relay = settings.relay
    assert (relay.lease_seconds, relay.park_after_seconds, relay.stop_after_seconds) == (15, 1, 20)
    for sink in settings.sinks.values():
        assert (sink.order, sink.start, sink.when_dead) == ("key", None, "skip")
        assert (sink.circuit.open_after, sink.circuit.probe_seconds, sink.circuit.probe_max_seconds) == (20, 1, 60)
        assert (sink.cloudevents, sink.cloudevents_source) == ("none", "/outbox-relay")
    assert retry_policy(kafka(settings)) == RetryPolicy()
    crm = webhook(settings)
    assert (crm.timeout_seconds, crm.max_in_flight, crm.allow_http, crm.forward_headers) == (15, 64, False, ())
    assert (crm.headers, crm.accepted_statuses, crm.permanent_statuses) == ({}, (), ())
    assert crm.retry_after_max_seconds == 3600
    assert (crm.client_certificate, crm.client_key, crm.ca_file) == (None, None, None)


def test_nothing_given_is_no_error_but_names_no_database() -> None:
    settings = load(None, {})
    assert settings.http.address is None
    assert settings.sinks == {}
    for ask in (settings.database.require_dsn, settings.database.dsn):
        with pytest.raises(ConfigurationError, match=r"dsn or dsn_file .*OUTBOX_RELAY_DATABASE__DSN.*--dsn"):
            ask()


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    with pytest.raises(ValidationError):
        settings.relay.lease_seconds = 3
    with pytest.raises(ValidationError):
        kafka(settings).topic = "other"


def test_loading_twice_gives_equal_settings(tmp_path: Path) -> None:
    assert load_text(tmp_path, FILE) == load_text(tmp_path, FILE)
    assert load_text(tmp_path, FILE) != load_text(tmp_path, FILE.replace("attempts = 12", "attempts = 13"))


def test_process_environment_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE", "database", "RELAY", "SINKS", "OUTBOX_RELAY_RELAY__NAME"):
        monkeypatch.setenv(name, '{"name": "from-the-process"}')
    assert load_text(tmp_path, FILE).relay.name != "from-the-process"


def test_file_is_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(FILE)
    assert load(None, {"OUTBOX_RELAY_CONFIG": str(path)}).sinks.keys() == {"events", "crm"}


def test_path_wins_over_the_environments_file(tmp_path: Path) -> None:
    assert load_text(tmp_path, FILE, {"OUTBOX_RELAY_CONFIG": "/nowhere/relay.toml"}).sinks.keys() == {"events", "crm"}


@pytest.mark.parametrize("change", ["\ufeff{}", "{}"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_files_of_other_editors_load(tmp_path: Path, change: str, newline: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(change.format(FILE).replace("\n", newline).encode())
    assert load(path, {}).database.dsn() == DSN


class TestEnvironment:
    """The twins of the settings."""

    @pytest.mark.parametrize(
        ("name", "value", "place", "expected"),
        [
            ("RELAY__LEASE_SECONDS", "30", "relay.lease_seconds", 30),
            ("RELAY__NAME", "r1", "relay.name", "r1"),
            ("HTTP__LISTEN", "[::1]:9", "http.listen", "[::1]:9"),
            ("HTTP__LISTEN", "", "http.listen", None),
            ("DATABASE__POOLER", "transaction", "database.pooler", "transaction"),
            ("SINKS__EVENTS__TOPIC", "t", "sinks.events.topic", "t"),
            ("SINKS__EVENTS__START", "now", "sinks.events.start", "now"),
            ("SINKS__EVENTS__CIRCUIT__OPEN_AFTER", "3", "sinks.events.circuit.open_after", 3),
            ("SINKS__CRM__RETRY__JITTER", "0.1", "sinks.crm.retry.jitter", 0.1),
            ("SINKS__CRM__ALLOW_HTTP", "true", "sinks.crm.allow_http", True),
            ("SINKS__CRM__FORWARD_HEADERS", "X-Tenant", "sinks.crm.forward_headers", ("x-tenant",)),
            ("SINKS__CRM__FORWARD_HEADERS", '["X-A", "x-b", "x-a"]', "sinks.crm.forward_headers", ("x-a", "x-b")),
            ("SINKS__CRM__RETRY", '{"attempts": 5}', "sinks.crm.retry.attempts", 5),
            ("SINKS__CRM__RETRY", '{"attempts": 5}', "sinks.crm.retry.jitter", 0.2),
        ],
    )
    def test_variable_wins_over_the_file(
        self, tmp_path: Path, name: str, value: str, place: str, expected: object
    ) -> None:
        settings = load_text(tmp_path, FILE, {f"OUTBOX_RELAY_{name}": value})
        assert (
            attrgetter(place)(SimpleNamespace(**dict(settings) | {"sinks": SimpleNamespace(**settings.sinks)}))
            == expected
        )

    def test_underscore_of_a_producer_setting_stands_for_a_dot(self, tmp_path: Path) -> None:
        environ = {
            "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__BOOTSTRAP_SERVERS": "kafka:9092",
            "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__SSL_CA_LOCATION": "/ca.pem",
        }
        producer = kafka(load_text(tmp_path, FILE, environ)).producer
        assert producer["bootstrap.servers"] == "kafka:9092"
        assert producer["ssl.ca.location"] == "/ca.pem"
        assert producer["linger.ms"] == 5

    def test_table_as_json_replaces_the_files_and_deeper_variables_come_after(self, tmp_path: Path) -> None:
        environ = {
            "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__CLIENT_ID": "r",
            "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER": '{"bootstrap.servers": "kafka:9092"}',
        }
        assert kafka(load_text(tmp_path, FILE, environ)).producer == {
            "bootstrap.servers": "kafka:9092",
            "client.id": "r",
        }

    def test_routes_as_json_replace_the_table(self, tmp_path: Path) -> None:
        settings = load_text(tmp_path, FILE, {"OUTBOX_RELAY_ROUTES": '{"invoice.*": ["crm"], "x": ["events"]}'})
        assert settings.routes.patterns_for("crm") == ("invoice.*",)
        assert settings.routes.patterns_for("events") == ("x",)

    def test_secrets_are_one_string_or_json(self, tmp_path: Path) -> None:
        name = "OUTBOX_RELAY_SINKS__CRM__SECRETS"
        plain = webhook(load_text(tmp_path, FILE, {name: OTHER})).signing_keys()
        assert [(key.sign(b""), key.until) for key in plain] == [(hmac_of(b"o" * 64), None)]
        text = f'[{{"secret": "{SECRET}", "until": "2030-05-01T02:00:00+02:00"}}, "{OTHER}"]'
        listed = webhook(load_text(tmp_path, FILE, {name: text})).signing_keys()
        assert [(key.sign(b""), key.until) for key in listed] == [
            (hmac_of(KEY), datetime(2030, 5, 1, tzinfo=UTC).timestamp()),
            (hmac_of(b"o" * 64), None),
        ]

    def test_whole_relay_without_a_file(self) -> None:
        settings = load(
            None,
            {
                "OUTBOX_RELAY_DATABASE__DSN": DSN,
                "OUTBOX_RELAY_SINKS__SHOP_EVENTS__TYPE": "kafka",
                "OUTBOX_RELAY_SINKS__SHOP_EVENTS__TOPIC": "shop",
                "OUTBOX_RELAY_SINKS__SHOP_EVENTS__PRODUCER__BOOTSTRAP_SERVERS": "kafka:9092",
                "OUTBOX_RELAY_SINKS__X_": f'{{"type": "webhook", "url": "https://x.org", "secrets": ["{SECRET}"]}}',
                "OUTBOX_RELAY_SINKS__X___TIMEOUT_SECONDS": "3",
                "OUTBOX_RELAY_ROUTES": '{"*": ["shop_events", "x_"]}',
            },
        )
        assert kafka(settings, "shop_events").topic == "shop"
        assert webhook(settings, "x_").timeout_seconds == 3
        assert settings.routes.sinks_for("anything") == {"shop_events", "x_"}

    def test_names_that_kubernetes_injects_are_ignored(self, tmp_path: Path) -> None:
        environ = {
            "OUTBOX_RELAY_PORT": "tcp://10.0.0.1:8080",
            "OUTBOX_RELAY_SERVICE_HOST": "10.0.0.1",
            "OUTBOX_RELAY_PORT_8080_TCP_PROTO": "tcp",
            "OUTBOX_RELAY_HTTP": "x",
            "OUTBOX_RELAY_LOG_LEVEL": "debug",
            "OTHER__DATABASE__DSN": "x",
            "outbox_relay_nothing__here": "x",
        }
        assert load_text(tmp_path, FILE, environ) == load_text(tmp_path, FILE)


def test_longest_delay_may_be_the_first(tmp_path: Path) -> None:
    text = FILE.replace("attempts = 12", "base_seconds = 30\nmax_seconds = 30")
    assert retry_policy(webhook(load_text(tmp_path, text))) == RetryPolicy(30, 30, 30, 0.5)


class TestDatabase:
    """The ways to name the database."""

    def test_option_wins_over_environment_and_file(self, tmp_path: Path) -> None:
        environ = {"OUTBOX_RELAY_DATABASE__DSN_FILE": str(tmp_path / "none")}
        assert load_text(tmp_path, FILE, environ, dsn="host=other").database.dsn() == "host=other"
        assert load(None, {}, dsn="host=other").database.dsn() == "host=other"

    def test_environment_replaces_the_files_way(self, tmp_path: Path) -> None:
        text = '[database]\ndsn_file = "/nowhere"'
        assert load_text(tmp_path, text, {"OUTBOX_RELAY_DATABASE__DSN": DSN}).database.dsn() == DSN

    def test_file_is_read_at_each_call(self, tmp_path: Path) -> None:
        secret = tmp_path / "dsn"
        secret.write_text(f"  {DSN}?password=one\n")
        database = load_text(tmp_path, f"[database]\ndsn_file = '{secret}'").database
        database.require_dsn()
        assert database.dsn() == f"{DSN}?password=one"
        secret.write_text(f"{DSN}?password=two")
        assert database.dsn() == f"{DSN}?password=two"

    def test_file_need_not_be_there_at_load(self, tmp_path: Path) -> None:
        database = load_text(tmp_path, f"[database]\ndsn_file = '{tmp_path}/later'").database
        database.require_dsn()
        with pytest.raises(ConfigurationError, match="later: No such file or directory"):
            database.dsn()

    @pytest.mark.parametrize("content", [b"", b" \n", b"hunter2", b"postgresql://u:hunter2@h/d\nx", b"\xffhunter2="])
    def test_file_without_a_connection_string_is_refused_without_its_content(
        self, tmp_path: Path, content: bytes
    ) -> None:
        secret = tmp_path / "dsn"
        secret.write_bytes(content)
        with pytest.raises(ConfigurationError, match="dsn_file ") as refused:
            load_text(tmp_path, f"[database]\ndsn_file = '{secret}'").database.dsn()
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize(
        ("pooler", "listen_dsn", "expected"),
        [
            ("none", "", DSN),
            ("transaction", "", None),
            ("transaction", "host=direct", "host=direct"),
            ("none", "host=direct", "host=direct"),
        ],
    )
    def test_wakeups_need_a_direct_connection(
        self, tmp_path: Path, pooler: str, listen_dsn: str, expected: str | None
    ) -> None:
        text = f'[database]\ndsn = "{DSN}"\npooler = "{pooler}"\nlisten_dsn = "{listen_dsn}"'
        assert load_text(tmp_path, text).database.wakeup_dsn() == expected


class TestSecretsFile:
    """Signing secrets that stand in a file of their own."""

    FILE = FILE.replace(FILE[FILE.index("secrets =") : FILE.index("allow_networks")], "secrets_file = 'PATH'\n")

    def test_each_line_is_a_secret_and_it_is_read_at_each_call(self, tmp_path: Path) -> None:
        path = tmp_path / "secrets"
        sink = webhook(load_text(tmp_path, self.FILE.replace("PATH", str(path))))
        path.write_text(f"# new\n{SECRET}\n\n  {OTHER}  \n")
        assert [key.sign(b"") for key in sink.signing_keys()] == [hmac_of(KEY), hmac_of(b"o" * 64)]
        path.write_text(OTHER)
        assert [key.sign(b"") for key in sink.signing_keys()] == [hmac_of(b"o" * 64)]

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("", "holds 0 secrets"),
            ("# nothing\n", "holds 0 secrets"),
            (f"{SECRET}\n" * 17, "holds 17 secrets"),
            (f"{SECRET}\nwhsec_hunter2", "line 2: is not standard base64"),
            ("hunter2", "line 1: should be whsec_ followed by"),
            (f"{SECRET} 2027-01-01T00:00:00", "line 1: the text after the secret should be its end"),
            (f"{SECRET} hunter2", "line 1: the text after the secret should be its end"),
            ("#" * 65_537, "is larger than 65536 bytes"),
            ("whsec_hünter2", "line 1: is not standard base64"),
        ],
    )
    def test_wrong_content_is_refused_without_it(self, tmp_path: Path, content: str, said: str) -> None:
        path = tmp_path / "secrets"
        path.write_text(content, encoding="utf-8")
        sink = webhook(load_text(tmp_path, self.FILE.replace("PATH", str(path))))
        with pytest.raises(ConfigurationError, match=said) as refused:
            sink.signing_keys()
        assert "nter2" not in str(refused.value)
        assert SECRET.removeprefix("whsec_") not in str(refused.value)

    def test_a_secret_may_have_its_end_behind_it(self, tmp_path: Path) -> None:
        path = tmp_path / "secrets"
        path.write_text(f"{OTHER}\n{SECRET}  2027-01-01T00:00:00Z\n{ED25519}\t2027-01-01 01:00:00+02:00 \n")
        sink = webhook(load_text(tmp_path, self.FILE.replace("PATH", str(path))))
        assert [key.until for key in sink.signing_keys()] == [
            None,
            datetime(2027, 1, 1, tzinfo=UTC).timestamp(),
            datetime(2026, 12, 31, 23, tzinfo=UTC).timestamp(),
        ]
        assert [key.version for key in sink.signing_keys()] == ["v1", "v1", "v1a"]

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        sink = webhook(load_text(tmp_path, self.FILE.replace("PATH", str(tmp_path / "gone"))))
        with pytest.raises(ConfigurationError, match="gone: No such file"):
            sink.signing_keys()


class TestHeaders:
    """Headers that are added to the requests of a webhook."""

    FILE = FILE.replace("allow_networks", "headers = HEADERS\nallow_networks")

    def sink(self, tmp_path: Path, headers: str) -> WebhookSettings:
        """Return a sink with these headers."""
        return webhook(load_text(tmp_path, self.FILE.replace("HEADERS", headers)))

    def test_values_are_text_variables_or_files_and_read_at_each_call(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        sink = self.sink(
            tmp_path, f"{{ X-Tenant = 'a b', authorization = {{ env = 'TOKEN' }}, x-key = {{ file = '{path}' }} }}"
        )
        path.write_text("one\n")
        expected = {"x-tenant": "a b", "authorization": "Bearer hunter2", "x-key": "one"}
        assert sink.request_headers({"TOKEN": "Bearer hunter2"}) == expected
        path.write_bytes(b"two\r\n")
        assert sink.request_headers({"TOKEN": "x"}) == expected | {"authorization": "x", "x-key": "two"}

    def test_headers_come_from_the_environment_as_json(self, tmp_path: Path) -> None:
        environ = {"OUTBOX_RELAY_SINKS__CRM__HEADERS": '{"x-a": "1", "x-b": {"env": "B"}}'}
        assert webhook(load_text(tmp_path, FILE, environ)).request_headers({"B": "2"}) == {"x-a": "1", "x-b": "2"}

    @pytest.mark.parametrize(
        ("headers", "said"),
        [
            ("{ x-a = { env = 'GONE' } }", "headers.x-a: the variable GONE is not set"),
            ("{ x-a = { env = 'EMPTY' } }", "headers.x-a: the variable EMPTY: should hold visible ASCII characters"),
            ("{ x-a = { env = 'LINES' } }", "headers.x-a: the variable LINES: should hold visible ASCII characters"),
            ("{ x-a = { file = 'DIR/gone' } }", "headers.x-a: DIR/gone: No such file or directory"),
            ("{ x-a = { file = 'DIR' } }", "headers.x-a: DIR: Is a directory"),
            ("{ x-a = { file = 'DIR/long' } }", "headers.x-a: DIR/long: holds more than 4096 bytes"),
            ("{ x-a = { file = 'DIR/binary' } }", "headers.x-a: DIR/binary: is not a text file in UTF-8"),
            (
                "{ " + ", ".join(f"x-{n} = {{ env = 'LONG' }}" for n in range(5)) + " }",
                "headers: names and values hold 20015 bytes together, should hold at most 16384",
            ),
        ],
    )
    def test_what_cannot_be_read_is_named_without_its_value(self, tmp_path: Path, headers: str, said: str) -> None:
        (tmp_path / "long").write_text("hunter2" * 600)
        (tmp_path / "binary").write_bytes(b"hunter2\xff")
        sink = self.sink(tmp_path, headers.replace("DIR", str(tmp_path)))
        with pytest.raises(ConfigurationError) as refused:
            sink.request_headers({"EMPTY": "", "LINES": "hunter2\r\nx: y", "LONG": "h" * 4000})
        assert said.replace("DIR", str(tmp_path)) in str(refused.value)
        assert "hunter2" not in str(refused.value)

    def test_the_most_that_may_be_added(self, tmp_path: Path) -> None:
        headers = "{ " + ", ".join(f"x-{n} = '{'v' * 400}'" for n in range(32)) + " }"
        assert len(self.sink(tmp_path, headers).request_headers({})) == 32
        assert len(self.sink(tmp_path, f"{{ x-a = '{'v' * 4096}' }}").request_headers({})["x-a"]) == 4096


class TestAddresses:
    """The addresses to which a webhook sink connects: each that its host resolves to is checked."""

    @pytest.mark.parametrize(
        "address",
        [
            *("127.0.0.1", "127.255.0.1", "0.0.0.0", "10.0.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254"),  # noqa: S104 - nothing binds here
            *("100.100.100.200", "168.63.129.16", "224.0.0.1", "255.255.255.255", "192.0.0.1", "198.19.0.1"),
            *("::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1", "fc00::1", "fd00:ec2::254"),
            *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::", "ff02::1", "fec0::1", "2001:db8::1", "100::1"),
        ],
    )
    def test_special_addresses_are_denied(self, tmp_path: Path, address: str) -> None:
        sink = webhook(load_text(tmp_path, FILE.replace('"10.1.0.0/16", "fd00::1"', "")))
        assert sink.denied(address)

    @pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8"])
    def test_public_addresses_are_taken(self, tmp_path: Path, address: str) -> None:
        assert webhook(load_text(tmp_path, FILE)).denied(address) is None

    @pytest.mark.parametrize(
        ("address", "taken"),
        [
            ("10.1.2.3", True),
            ("::ffff:10.1.2.3", True),
            ("10.2.0.0", False),
            ("fd00::1", True),
            ("fd00::2", False),
            ("127.0.0.1", False),
        ],
    )
    def test_listed_networks_are_taken_and_nothing_beside(self, tmp_path: Path, address: str, taken: bool) -> None:
        assert (webhook(load_text(tmp_path, FILE)).denied(address) is None) is taken

    def test_text_that_is_no_address_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="address"):
            webhook(load_text(tmp_path, FILE)).denied("crm.example.com")


@pytest.mark.parametrize(
    ("networks", "url"),
    [
        ('["10.0.0.0/8"]', "http://10.9.8.7:65535/x"),
        ('["127.0.0.0/8"]', "http://127.0.0.1:1"),
        ('["127.0.0.1"]', "http://localhost:8000/hook?token=a%20b"),
        ('["::1"]', "http://[::1]:8000/"),
        ("[]", "http://8.8.8.8/"),
        ("[]", "https://[2606:4700::1111]/"),
        ("[]", "HTTPS://Crm.Example.com./x"),
        ("[]", "https://xn--bcher-kva.example/"),
        ("[]", "https://under_score.internal"),
        ("[]", "https://1and1.example/"),
    ],
)
def test_urls_that_may_be_addressed(tmp_path: Path, networks: str, url: str) -> None:
    text = f"""
[sinks.crm]
type = "webhook"
url = "{url}"
allow_http = true
allow_networks = {networks}
secrets = ["{SECRET}"]
"""
    assert webhook(load_text(tmp_path, text)).url == url


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("10.0.0.9:8080", ("10.0.0.9", 8080)),
        ("[::]:80", ("::", 80)),
        ("localhost:0", ("localhost", 0)),
        ("", None),
    ],
)
def test_listen_address(tmp_path: Path, listen: str, address: tuple[str, int] | None) -> None:
    assert load_text(tmp_path, f'[http]\nlisten = "{listen}"').http.address == address


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.idempotence", "true"),
        ("enable.gapless.guarantee", "true"),
        ("acks", '"all"'),
        ("acks", "-1"),
        ("request.required.acks", '"-1"'),
        ("message.timeout.ms", "0"),
        ("delivery.timeout.ms", '"0"'),
        ("max.in.flight", "1"),
        ("max.in.flight.requests.per.connection", '"1"'),
        ("partitioner", '"murmur2"'),
        ("queuing.strategy", '"fifo"'),
        ("delivery.report.only.error", "false"),
        ("compression.type", '"zstd"'),
        ("test.mock.num.brokers", "3"),
    ],
)
def test_harmless_producer_settings_are_handed_on(tmp_path: Path, name: str, value: str) -> None:
    text = FILE.replace('"linger.ms" = 5', f'"{name}" = {value}')
    assert str(kafka(load_text(tmp_path, text)).producer[name]) == value.strip('"').replace("true", "True").replace(
        "false", "False"
    )


class TestWarnings:
    """Settings that are allowed but probably not meant."""

    def test_sink_without_a_route_is_named_with_its_line(self, tmp_path: Path) -> None:
        settings = load_text(tmp_path, FILE.replace('["events", "crm"]', '["events"]'))
        line = FILE.splitlines().index("[sinks.crm]") + 1
        assert warnings(settings) == [
            f"{tmp_path}/relay.toml:{line}: sinks.crm: no route leads to this sink; add it to a list in [routes]"
        ]

    def test_sink_of_the_environment_is_named_with_its_variable(self) -> None:
        environ = {
            "OUTBOX_RELAY_SINKS__AUDIT__TYPE": "kafka",
            "OUTBOX_RELAY_SINKS__AUDIT__TOPIC": "audit",
            "OUTBOX_RELAY_SINKS__AUDIT__PRODUCER__BOOTSTRAP_SERVERS": "k:9092",
        }
        (said,) = warnings(load(None, environ))
        assert said.startswith("OUTBOX_RELAY_SINKS__AUDIT__…: sinks.audit: ")
        assert "no route leads to this sink" in said

    def test_no_sink_at_all(self) -> None:
        assert warnings(load(None, {})) == [
            "environment: there is no sink, so nothing is delivered: "
            'add a table [sinks.NAME] with type = "kafka", "webhook" or "python", and a route to it in [routes]'
        ]

    @pytest.mark.parametrize(
        ("network", "kinds"),
        [("0.0.0.0/0", ["loopback", "link-local", "private"]), ("::/0", ["loopback", "link-local", "multicast"])],
    )
    def test_network_that_opens_more_than_one_range(self, tmp_path: Path, network: str, kinds: list[str]) -> None:
        (said,) = warnings(load_text(tmp_path, FILE.replace("10.1.0.0/16", network)))
        assert f"sinks.crm.allow_networks[0]: {network} allows" in said
        assert all(kind in said for kind in kinds)

    def test_secrets_that_all_end(self, tmp_path: Path) -> None:
        text = FILE.replace(f'["{SECRET}", ', "[")
        line = text.splitlines().index(next(line for line in text.splitlines() if line.startswith("secrets"))) + 1
        assert warnings(load_text(tmp_path, text)) == [
            f"{tmp_path}/relay.toml:{line}: sinks.crm.secrets: all secrets expire: "
            "nothing is sent after 2027-01-01T00:00:00+00:00; add one without an end"
        ]


class TestLog:
    """The two variables about the log."""

    @pytest.mark.parametrize(("terminal", "expected"), [(True, "console"), (False, "json")])
    def test_format_depends_on_the_terminal(self, terminal: bool, expected: str) -> None:
        log = log_settings({"OUTBOX_RELAY_LOG_FORMAT": ""}, terminal=terminal)
        assert (log.level, log.format) == ("info", expected)

    @pytest.mark.parametrize("terminal", [True, False])
    def test_variables_win(self, terminal: bool) -> None:
        environ = {"OUTBOX_RELAY_LOG_LEVEL": "DEBUG", "OUTBOX_RELAY_LOG_FORMAT": " Json "}
        log = log_settings(environ, terminal=terminal)
        assert (log.level, log.format) == ("debug", "json")

    @pytest.mark.parametrize(("name", "choices"), [("LEVEL", "debug, info"), ("FORMAT", "json, console")])
    def test_other_values_are_refused_with_the_choices(self, name: str, choices: str) -> None:
        with pytest.raises(
            ConfigurationError, match=f"^OUTBOX_RELAY_LOG_{name}: should be one of {choices}"
        ) as refused:
            log_settings({f"OUTBOX_RELAY_LOG_{name}": "hunter2"}, terminal=False)
        assert "hunter2" not in str(refused.value)


def test_secrets_do_not_show(tmp_path: Path) -> None:
    text = FILE.replace("relay@localhost", "relay:hunter2@localhost").replace(
        'shop"\nsecrets', 'shop?t=hunter2"\nsecrets'
    )
    text = text.replace('"linger.ms" = 5', '"sasl.password" = "hunter2"')
    text = text.replace("allow_networks", "headers = { authorization = 'hunter2' }\nallow_networks")
    settings = load_text(tmp_path, text, {"OUTBOX_RELAY_DATABASE__LISTEN_DSN": "password=hunter2"})
    assert kafka(settings).producer["sasl.password"] == "hunter2"
    assert webhook(settings).url.endswith("hunter2")
    header = webhook(settings).headers["authorization"]
    assert webhook(settings).request_headers({}) == {"authorization": "hunter2"}
    for shown in (repr(settings), str(settings), f"{settings.database} {settings.sinks}", f"{header} {header!r}"):
        assert "hunter2" not in shown
        assert SECRET.removeprefix("whsec_") not in shown
    assert isinstance(webhook(settings).secrets[0].secret, SecretStr)
