"""Warnings of `check`: clear text, verification that is switched off, secrets that others can read, code to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outbox_relay.cli import main
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import dsn_faults, exposures, load
from tests.support.receiver.signatures import SECRET

CANARY = "hunter2canary"


def warned(directory: Path, text: str, environ: dict[str, str] | None = None, mode: int = 0o600) -> list[str]:
    """Return the warnings about a file with this text, without its directory."""
    path = directory / "relay.toml"
    path.write_text(text)
    path.chmod(mode)
    found = exposures(load(path, environ or {}), {"HOME": str(directory), **(environ or {})})
    assert CANARY not in "".join(found)
    return [line.replace(f"{directory}/", "") for line in found]


def kafka(producer: str, more: str = "") -> str:
    """Return a file with one sink for Kafka."""
    return f'[sinks.events]\ntype = "kafka"\ntopic = "shop"\n{more}\n[sinks.events.producer]\n{producer}\n'


def registry(lines: str) -> str:
    """Return a file with one sink with a schema registry."""
    return kafka('"bootstrap.servers" = "localhost"') + f'[sinks.events.registry]\nformat = "avro"\n{lines}\n'


def webhook(lines: str) -> str:
    """Return a file with one webhook."""
    return f'[sinks.crm]\ntype = "webhook"\n{lines}\n'


SAFE = [
    kafka('"bootstrap.servers" = "localhost:9092,127.0.0.2,[::1]:9092,PLAINTEXT://a.localhost:1"'),
    kafka('"bootstrap.servers" = "k.internal:9092"\n"security.protocol" = "SSL"'),
    kafka('"bootstrap.servers" = "k.internal"\n"security.protocol" = "sasl_ssl"\n"sasl.password" = "hunter2canary"'),
    kafka('"bootstrap.servers" = "localhost"\n"enable.ssl.certificate.verification" = true'),
    registry('url = "https://r.internal, http://localhost:8081"\nuser_info = "u:hunter2canary"'),
    webhook(f'url = "https://crm.example.com"\nsecrets = ["{SECRET}"]\nallow_http = true'),
    webhook(f'url = "http://127.0.0.1:1"\nsecrets = ["{SECRET}"]\nallow_http = true\nallow_networks = ["127.0.0.0/8"]'),
    '[database]\ndsn = "postgresql://u@localhost/x"',
    '[database]\ndsn = "postgresql:///x?host=/run/postgresql"',
    '[database]\ndsn = "postgresql://u:hunter2canary@db.internal/x?sslmode=verify-full"',
    '[database]\ndsn = "host=db.internal sslmode=require"\npooler = "transaction"\n'
    'listen_dsn = "host=db2 sslmode=verify-ca"',
    '[database]\ndsn = "host=db.internal sslrootcert=system"',
]


@pytest.mark.parametrize("text", SAFE)
def test_what_is_safe_is_not_warned_of(tmp_path: Path, text: str) -> None:
    assert warned(tmp_path, text) == []


EXPOSED = [
    (kafka('"bootstrap.servers" = "localhost:9092,k.internal:9092"'),
     'relay.toml:5: sinks.events.producer: events go to k.internal in clear text: set "security.protocol" = "SSL"'),
    (kafka('"metadata.broker.list" = "10.0.0.1:9092"\n"security.protocol" = "SASL_PLAINTEXT"'),
     "relay.toml:5: sinks.events.producer: events and the password go to 10.0.0.1 in clear text: "
     'set "security.protocol" = "SASL_SSL"'),
    (kafka('"bootstrap.servers" = "localhost"\n"enable.ssl.certificate.verification" = false'),
     'relay.toml:7: sinks.events.producer."enable.ssl.certificate.verification": the brokers\' certificates are not '
     "verified: remove this, and set ssl.ca.location"),
    (kafka('"bootstrap.servers" = "localhost"\n"ssl.endpoint.identification.algorithm" = "none"'),
     'relay.toml:7: sinks.events.producer."ssl.endpoint.identification.algorithm": a certificate of any host is '
     "accepted from the brokers: remove this"),
    (kafka('"bootstrap.servers" = "localhost"\n"plugin.library.paths" = "/tmp/evil.so"'),
     'relay.toml:7: sinks.events.producer."plugin.library.paths": makes the relay run the code that it names: '
     "protect this file from changes"),
    (registry('url = "https://r.internal, http://r.internal:8081"'),
     "relay.toml:9: sinks.events.registry.url: schemas come over plain http, which anyone on the way can change: "
     "use https"),
    (registry('url = "http://r.internal"\nuser_info = "u:hunter2canary"'),
     "relay.toml:9: sinks.events.registry.url: schemas and the password come and go over plain http, which anyone on "
     "the way can change: use https"),
    (webhook(f'url = "http://crm.example.com"\nsecrets = ["{SECRET}"]\nallow_http = true'),
     "relay.toml:3: sinks.crm.url: events go over plain http, which anyone on the way can read and answer: use https"),
    ('[database]\ndsn = "postgresql://u:hunter2canary@localhost,db.internal/x"',
     "relay.toml:2: database.dsn: the connection to db.internal may be in clear text, and the server is not verified: "
     "add sslmode=verify-full, and sslrootcert if its authority is not the system's"),
    ('[database]\ndsn = "postgresql:///x"\nlisten_dsn = "host=db.internal sslmode=prefer"',
     "relay.toml:3: database.listen_dsn: the connection to db.internal may be in clear text, and the server is not "
     "verified: add sslmode=verify-full, and sslrootcert if its authority is not the system's"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), EXPOSED)
def test_what_is_exposed_is_warned_of_with_place_and_fix(tmp_path: Path, text: str, said: str) -> None:
    assert warned(tmp_path, text) == [said]


def test_the_mode_of_tls_may_come_from_the_environment(tmp_path: Path) -> None:
    text = '[database]\ndsn = "host=db.internal"'
    assert len(warned(tmp_path, text, {})) == 1
    assert warned(tmp_path, text, {"PGSSLMODE": "verify-full"}) == []


def test_two_fields_that_can_make_one_topic_are_warned_of(tmp_path: Path) -> None:
    text = kafka('"bootstrap.servers" = "localhost"').replace('"shop"', '"{headers.tenant}.{type}"')
    [line] = warned(tmp_path, text)
    assert line.startswith("relay.toml:3: sinks.events.topic: different events can share a topic")
    assert warned(tmp_path, text.replace("{headers.tenant}.", "shop.")) == []


INLINE = [
    registry('url = "https://r.internal"\nuser_info = "u:hunter2canary"'),
    kafka('"bootstrap.servers" = "localhost"\n"sasl.password" = "hunter2canary"'),
    webhook(f'url = "https://crm.example.com"\nsecrets = ["{SECRET}"]'),
    '[database]\ndsn = "postgresql://u:hunter2canary@localhost/x"',
]


@pytest.mark.parametrize("text", INLINE)
def test_a_file_with_secrets_that_others_can_read_is_named_with_the_fix(tmp_path: Path, text: str) -> None:
    said = "relay.toml: holds a secret and is open to group or others (mode {}): chmod 600 relay.toml"
    for mode in (0o644, 0o640, 0o604, 0o602):
        assert warned(tmp_path, text, mode=mode) == [said.format(f"{mode:04o}")]
    assert warned(tmp_path, text, mode=0o400) == []


def test_a_file_whose_secrets_are_elsewhere_may_be_read(tmp_path: Path) -> None:
    text = '[database]\ndsn = "postgresql://u@localhost/x"\n' + kafka('"bootstrap.servers" = "localhost"')
    environ = {
        "OUTBOX_RELAY_DATABASE__DSN": "postgresql://u:hunter2canary@localhost/x",
        "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__SASL_PASSWORD": "hunter2canary",
    }
    assert warned(tmp_path, text, environ, mode=0o644) == []


def test_a_path_that_no_file_can_have_is_no_warning(tmp_path: Path) -> None:
    text = webhook(f'url = "https://crm.example.com"\nsecrets = ["{SECRET}"]\nclient_certificate = "a\\u0000b"')
    assert warned(tmp_path, text) == []


def test_files_of_secrets_that_others_can_read_are_named(tmp_path: Path) -> None:
    names = ("dsn", "sasl", "key", "crm", "header", "client", "proxy", ".pgpass", "pg.key", "login", "registry")
    for name in names:
        (tmp_path / name).write_text("host=db.internal sslmode=require sslkey=" + str(tmp_path / "pg.key"))
        (tmp_path / name).chmod(0o640)
    at = {name: json.dumps(str(tmp_path / name)) for name in names}
    text = (
        f"[database]\ndsn_file = {at['dsn']}\n"
        + kafka(f'"bootstrap.servers" = "localhost"\n"ssl.key.location" = {at["key"]}',
                "").replace('"ssl.key', f'"sasl.password" = {{ file = {at["sasl"]} }}\n"ssl.key')
        + f'[sinks.events.registry]\nurl = "https://r.internal"\nformat = "avro"\n'
          f'user_info = {{ file = {at["login"]} }}\nclient_certificate = {at["registry"]}\n'
        + webhook(f'url = "https://crm.example.com"\nsecrets = [{{ file = {at["crm"]} }}]\n'
                  f'client_certificate = {at["client"]}\nproxy = {{ file = {at["proxy"]} }}\n'
                  f'headers = {{ authorization = {{ file = {at["header"]} }} }}')
    )  # fmt: skip
    found = warned(tmp_path, text, mode=0o644)
    assert {line.partition(":")[0] for line in found} == set(names)
    assert len(found) == len(names)
    for name in names:
        (tmp_path / name).chmod(0o600)
    assert warned(tmp_path, text, mode=0o644) == []


@pytest.mark.parametrize("name", ["PLUGIN_LIBRARY_PATHS", "SASL_KERBEROS_KINIT_CMD", "SASL_KERBEROS_PRINCIPAL"])
def test_what_runs_code_is_not_taken_from_the_environment(tmp_path: Path, name: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(kafka('"bootstrap.servers" = "localhost"'))
    sink, table = "OUTBOX_RELAY_SINKS__EVENTS", {name.lower().replace("_", "."): CANARY}
    for variable, value in (
        (f"{sink}__PRODUCER__{name}", CANARY),
        (f"{sink}__PRODUCER", json.dumps(table)),
        (sink, json.dumps({"producer": table})),
    ):
        with pytest.raises(
            ConfigurationError, match="makes the relay run code: it is taken from the file only"
        ) as refused:
            load(path, {variable: value})
        assert f"{variable}: sinks." in str(refused.value)
        assert CANARY not in str(refused.value)


MALFORMED = "it is not a connection string"
AT_IN_HOST = "it has an @ in a wrong place, which probably belongs to the password"
NO_PORT = "its port is not a number, so a part of the password was probably taken for it"


@pytest.mark.parametrize(
    ("dsn", "fault"),
    [
        ("postgresql://u:pa%BBhunter2canary@db.internal/x", MALFORMED),
        ("host=db.internal password=a hunter2canary dbname=x", MALFORMED),
        ("postgresql://u:a@hunter2canary@db.internal/x", AT_IN_HOST),
        ("postgresql://u@db.internal,hunter2canary@db.internal/x", AT_IN_HOST),
        ("postgresql://u:a@ss/hunter2canary@db.internal/x", AT_IN_HOST),
        ("postgresql://u:a@ss:hunter2canary/x", NO_PORT),
        ("postgresql://hunter2canary/word@db.internal/x", AT_IN_HOST),
        ("host=db.internal port=hunter2canary user=x", NO_PORT),
        ("postgresql://me@server:hunter2canary@db.internal/x", NO_PORT),
    ],
)
def test_a_connection_string_with_a_password_that_is_not_encoded_is_refused_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dsn: str, fault: str
) -> None:
    """Goes red when a part of the password is taken for the host and printed, or ends a command with a traceback."""
    sink = f'[sinks.work]\ntype = "python"\nhandler = "a:b"\ntransaction = true\ndsn = "{dsn}"\n'
    path = tmp_path / "relay.toml"
    path.write_text(f'[database]\ndsn = "{dsn}"\n{sink}[routes]\n"*" = ["work"]\n')
    path.chmod(0o600)
    assert main(["check", "-c", str(path)]) == 2
    printed = capsys.readouterr()
    lines = [line.replace(f"{path}:", "") for line in printed.err.splitlines() if not line.startswith("warning: ")]
    assert [line.split(" (")[0].split(": write")[0] for line in lines] == [
        f"2: database.dsn: {fault}", f"7: sinks.work.dsn: {fault}",
    ]  # fmt: skip
    assert CANARY not in printed.out + printed.err


@pytest.mark.parametrize(
    "dsn",
    [
        *("host=@socket", "postgresql:///x?host=@outbox,/run/a@b", "service=shop", "host=[::1] port=5432,"),
        *("postgresql://me%40server:p%40@h,i:5433/x", "host=h dbname=a@b"),
    ],
)
def test_connection_strings_that_can_be_one(tmp_path: Path, dsn: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(f'[database]\ndsn = "{dsn}"\n')
    assert dsn_faults(load(path, {})) == []
