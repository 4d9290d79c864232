"""What `check` warns of: secrets and events that others could read, destinations that are not verified.

Every line names the place and the fix, and no value that may be secret.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.postgres import dsn
from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import Path as Place
from outbox_relay.settings.producer import RUNS_CODE, SERVERS, holds_secret
from outbox_relay.settings.webhook import WebhookSettings

FOREIGN_BITS = stat.S_IRWXG | stat.S_IRWXO
"""The permissions of a file for its group and for others."""
_ENCRYPTED = frozenset(("ssl", "sasl_ssl"))
_FALSE = frozenset(("false", "f", "0"))
_KEY_FILES = ("ssl.key.location", "ssl.keystore.location", "sasl.kerberos.keytab")
_KEY_FILE_ENDS = (".key.file", ".assertion.file")


def exposures(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return what is sent or kept less safely than it could be, a line each. Blocks while it looks at files.

    ``environ`` has what libpq falls back on.
    """
    found = [*_of_database(settings, environ)]
    files: dict[Path, None] = dict.fromkeys(_files_of_database(settings, environ))
    for name, sink in settings.sinks.items():
        of_sink = _of_kafka(sink) if isinstance(sink, KafkaSettings) else _of_webhook(sink)
        found += (settings.at(("sinks", name, *place), text) for place, text in of_sink)
        files |= dict.fromkeys(_files_of_kafka(sink) if isinstance(sink, KafkaSettings) else _files_of_webhook(sink))
    if (own := settings.file) is not None and any(map(settings.in_file, _secret_places(settings))):
        files[own] = None
    found += (text for path in files if (text := _readable(path)) is not None)
    return found


# -- on the wire --------------------------------------------------------------------------------------------------


def _of_database(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    for setting, text in _connection_strings(settings):
        hosts = [host for host, _ in dsn.endpoints(text, environ) if not _is_loopback(host)]
        if hosts and not dsn.encrypts(text, environ):
            said = (
                f"the connection to {hosts[0]} may be in clear text, and the server is not verified: add "
                "sslmode=verify-full, and sslrootcert if its authority is not the system's"
            )
            yield settings.at(("database", setting), said)


def _connection_strings(settings: Settings) -> Iterator[tuple[str, str]]:
    database = settings.database
    with suppress(Misconfigured):  # said elsewhere
        yield "dsn" if database.dsn_file is None else "dsn_file", database.dsn()
    if database.listen_dsn is not None:
        yield "listen_dsn", database.listen_dsn.get_secret_value()


def _of_kafka(sink: KafkaSettings) -> Iterator[tuple[Place, str]]:
    told = {name: str(value).strip().lower() for name, value in sink.producer.items()}
    protocol = told.get("security.protocol", "plaintext")
    brokers = ",".join(told.get(name, "") for name in SERVERS).split(",")
    remote = [host for broker in brokers if (host := _host(broker)) and not _is_loopback(host)]
    if remote and protocol not in _ENCRYPTED and "security.protocol" not in sink.producer_files:
        what = "events and the password go" if protocol.startswith("sasl") else "events go"
        wanted = "SASL_SSL" if protocol.startswith("sasl") else "SSL"
        yield ("producer",), f'{what} to {remote[0]} in clear text: set "security.protocol" = "{wanted}"'
    if told.get("enable.ssl.certificate.verification") in _FALSE:
        place = ("producer", "enable.ssl.certificate.verification")
        yield place, "the brokers' certificates are not verified: take this out, and set ssl.ca.location"
    if told.get("ssl.endpoint.identification.algorithm") == "none":
        place = ("producer", "ssl.endpoint.identification.algorithm")
        yield place, "a certificate of any host is taken for the brokers': take this out"
    for table, names in (("producer", sink.producer), ("producer_files", sink.producer_files)):
        for name in names:
            if name in RUNS_CODE:
                yield (table, name), "makes the relay run code that this names: whoever writes this file runs it"
    if (pair := sink.topic_template().joined) is not None:
        one, other = pair
        said = (
            f"different events can share a topic: what stands between {{{one}}} and {{{other}}} may stand in their "
            "values too; use one field, or a sink for each value, where that must not be"
        )
        yield ("topic",), said


def _of_webhook(sink: WebhookSettings) -> Iterator[tuple[Place, str]]:
    parts = urlsplit(sink.url)
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        yield ("url",), "events go over plain http, which anybody on the way can read and answer: use https"


def _host(broker: str) -> str:
    """Return the host of an entry of ``bootstrap.servers``: ``[PROTOCOL://]HOST[:PORT]``."""
    address = broker.strip().rpartition("://")[2]
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") <= 1 else address


def _is_loopback(host: str) -> bool:
    name = host.rstrip(".").lower()
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


# -- in files -----------------------------------------------------------------------------------------------------


def _secret_places(settings: Settings) -> Iterator[Place]:
    """Yield where a secret may stand in the file of the settings itself."""
    yield from (("database", setting) for setting, text in _connection_strings(settings) if dsn.has_password(text))
    for name, sink in settings.sinks.items():
        if isinstance(sink, KafkaSettings):
            yield from (("sinks", name, "producer", key) for key in sink.producer if holds_secret(key))
        else:
            yield ("sinks", name, "secrets")
            yield from (("sinks", name, "headers", key) for key, value in sink.headers.items() if value.text)


def _files_of_database(settings: Settings, environ: Mapping[str, str]) -> Iterator[Path]:
    if settings.database.dsn_file is not None:
        yield settings.database.dsn_file
    for _, text in _connection_strings(settings):
        yield from map(Path, dsn.secret_files(text, environ))


def _files_of_kafka(sink: KafkaSettings) -> Iterator[Path]:
    yield from (path for name, path in sink.producer_files.items() if holds_secret(name))
    for name, value in sink.producer.items():
        if name in _KEY_FILES or name.endswith(_KEY_FILE_ENDS):
            yield Path(str(value))


def _files_of_webhook(sink: WebhookSettings) -> Iterator[Path]:
    key = sink.client_key or sink.client_certificate
    named = (sink.secrets_file, sink.proxy_authorization_file, key, *(value.file for value in sink.headers.values()))
    yield from (path for path in named if path is not None)


def _readable(path: Path) -> str | None:
    """Return what to do if others than its owner may do anything with the file; None if not, or if it is not there."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    if not mode & FOREIGN_BITS:
        return None
    return f"{path}: holds a secret and is open to group or others (mode {mode:04o}): chmod 600 {path}"
