"""Warnings: settings that are allowed but doubtful, or that leave secrets and events open to others.

Every line names the setting and the fix, and holds no value that may be secret.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from pydantic import SecretStr

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.redaction import holds_secret
from outbox_relay.fields import Secret, entries
from outbox_relay.postgres import dsn
from outbox_relay.settings.addresses import LOOPBACK, canonical_host, opens
from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import Problem, SettingPath
from outbox_relay.settings.producer import RUNS_CODE, SERVERS
from outbox_relay.settings.sink_tables import PythonSettings
from outbox_relay.settings.webhook import WebhookSettings

FOREIGN_BITS = stat.S_IRWXG | stat.S_IRWXO
"""The permissions of a file for its group and for others."""
_KEY_FILES = ("ssl.key.location", "ssl.keystore.location", "sasl.kerberos.keytab", ".key.file", ".assertion.file")


def warnings(settings: Settings) -> list[str]:
    """Return a line for each setting that is probably a mistake: no sink, a sink without a route, and the like."""
    if not settings.sinks:
        fix = 'add a table [sinks.NAME] with type = "kafka", "webhook" or "python", and a route to it in [routes]'
        return [settings.at((), f"there is no sink, so nothing is delivered: {fix}")]
    found: list[str] = []
    for name, sink in settings.sinks.items():
        if not settings.patterns_for(name):
            found.append(settings.at(("sinks", name), "no route leads to this sink; add it to a list in [routes]"))
        if isinstance(sink, WebhookSettings):
            found += (settings.at(("sinks", name, *problem.path), problem.text) for problem in _doubts(sink))
        elif isinstance(sink, PythonSettings) and sink.dsn is not None:
            found += (settings.at(("sinks", name, "dsn"), text) for text in _doubts_of_dsn(sink, settings))
    for name, schedule in settings.schedules.items():
        if not settings.routes.sinks_for(schedule.type):
            text = f"no route takes the type {schedule.type}, so no sink receives its events; add one to [routes]"
            found.append(settings.at(("schedules", name, "type"), text))
    return found


def _doubts(sink: WebhookSettings) -> Iterator[Problem]:
    for n, network in enumerate(sink.allow_networks):
        if kinds := opens(network):
            text = f"{network} allows {', '.join(kinds)} addresses too; list only the networks that are needed"
            yield Problem(("allow_networks", n), text)
    ends = [secret.until for secret in sink.secrets if secret.until is not None]
    if ends and len(ends) == len(sink.secrets):
        text = f"all secrets expire: nothing is sent after {max(ends).isoformat()}; add one without an end"
        yield Problem(("secrets",), text)


def _doubts_of_dsn(sink: PythonSettings, settings: Settings) -> Iterator[str]:
    if not sink.transaction:
        yield "is not used: set transaction = true, or remove it"
    elif sink.dsn == settings.database.dsn_text:
        yield "is the relay's own: a handler should have the application's role, with the rights that it needs"


def exposures(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each thing that is sent or kept less safely than it could be. Blocks while it looks at files.

    ``environ`` has what libpq falls back on.
    """
    problems: list[Problem] = []
    secrets: list[SettingPath] = []
    files: list[Path | None] = [settings.database.dsn_file]
    for path, text in _connection_strings(settings):
        fallback: Mapping[str, str] = environ if path[0] == "database" else {}
        problems += _of_connection(path, text, fallback)
        secrets += [path] if dsn.has_password(text) else []
        files += map(Path, dsn.secret_files(text, fallback))
    for name, sink in settings.sinks.items():
        at = ("sinks", name)
        for path, value in _secrets(at, sink):
            secrets += [path] if isinstance(value, SecretStr) or value.text is not None else []
            files += [value.file] if isinstance(value, Secret) else []
        found: Iterator[Problem] = iter(())
        if isinstance(sink, KafkaSettings):
            found = _of_kafka(sink)
            secrets += ((*at, "producer", name) for name in sink.plain_producer if holds_secret(name))
            keys = [Path(str(value)) for name, value in sink.plain_producer.items() if name.endswith(_KEY_FILES)]
            files += [*keys, sink.registry.client_key or sink.registry.client_certificate]
        elif isinstance(sink, WebhookSettings):
            found = _of_url(sink.url)
            files.append(sink.client_key or sink.client_certificate)
        problems += (Problem((*at, *each.path), each.text) for each in found)
    files += [settings.file] if any(map(settings.in_file, secrets)) else []
    modes = (_of_file(path) for path in dict.fromkeys(files) if path is not None)
    return [*(settings.at(each.path, each.text) for each in problems), *filter(None, modes)]


def _secrets(path: SettingPath, value: object) -> Iterator[tuple[SettingPath, Secret | SecretStr]]:
    """Yield the secrets in a table of settings, except connection strings."""
    if isinstance(value, Secret | SecretStr):
        yield from [] if path[-1] == "dsn" else [(path, value)]
    elif isinstance(value, tuple):
        for n, each in enumerate(cast("tuple[object, ...]", value)):
            yield from _secrets((*path, n), each)
    else:
        for name, each in (entries(value) or {}).items():
            yield from _secrets((*path, name), each)


def _is_remote(host: str) -> bool:
    return bool(host) and canonical_host(host) != LOOPBACK


def _connection_strings(settings: Settings) -> Iterator[tuple[SettingPath, str]]:
    database = settings.database
    with suppress(ConfigurationError):  # reported elsewhere
        yield ("database", "dsn" if database.dsn_file is None else "dsn_file"), database.dsn()
    if database.listen_dsn is not None:
        yield ("database", "listen_dsn"), database.listen_dsn.get_secret_value()
    for name, sink in settings.sinks.items():
        if isinstance(sink, PythonSettings) and sink.dsn is not None:
            yield ("sinks", name, "dsn"), sink.dsn.get_secret_value()


def dsn_faults(settings: Settings) -> list[str]:
    """Return a line for each connection string that cannot be one, which quotes nothing of it."""
    texts = _connection_strings(settings)
    return [settings.at(path, fault) for path, text in texts if (fault := dsn.fault(text)) is not None]


def _of_connection(path: SettingPath, text: str, environ: Mapping[str, str]) -> Iterator[Problem]:
    if dsn.fault(text) is not None:  # whose host may be a part of the password
        return
    hosts = [host for host, _ in dsn.endpoints(text, environ) if _is_remote(host)]
    if hosts and not dsn.encrypts(text, environ):
        exposed = f"the connection to {hosts[0]} may be in clear text, and the server is not verified"
        fix = "add sslmode=verify-full, and sslrootcert if its authority is not the system's"
        yield Problem(path, f"{exposed}: {fix}")


def _of_kafka(sink: KafkaSettings) -> Iterator[Problem]:
    texts = {name: str(value).strip().lower() for name, value in sink.plain_producer.items()}
    protocol = texts.get("security.protocol", "plaintext")
    brokers = ",".join(texts.get(name, "") for name in SERVERS).split(",")
    remote = [host for broker in brokers if _is_remote(host := _broker_host(broker))]
    if remote and protocol not in ("ssl", "sasl_ssl") and "security.protocol" not in sink.secret_producer:
        sasl = protocol.startswith("sasl")
        exposed, wanted = ("events and the password go", "SASL_SSL") if sasl else ("events go", "SSL")
        yield Problem(("producer",), f'{exposed} to {remote[0]} in clear text: set "security.protocol" = "{wanted}"')
    if texts.get(verification := "enable.ssl.certificate.verification") in ("false", "f", "0"):
        text = "the brokers' certificates are not verified: remove this, and set ssl.ca.location"
        yield Problem(("producer", verification), text)
    if texts.get(identification := "ssl.endpoint.identification.algorithm") == "none":
        text = "a certificate of any host is accepted from the brokers: remove this"
        yield Problem(("producer", identification), text)
    for name in RUNS_CODE & sink.producer.keys():
        yield Problem(("producer", name), "makes the relay run the code that it names: protect this file from changes")
    for url in filter(None, sink.registry.url.split(",")):
        parts = urlsplit(url.strip())
        if parts.scheme == "http" and _is_remote(parts.hostname or ""):
            exposed = "schemas and the password come and go" if sink.registry.user_info else "schemas come"
            yield Problem(
                ("registry", "url"), f"{exposed} over plain http, which anyone on the way can change: use https"
            )
    if (pair := sink.topic_template().ambiguous_fields) is not None:
        exposed = (
            f"different events can share a topic: the text between {{{pair[0]}}} and {{{pair[1]}}} may be in values"
        )
        yield Problem(("topic",), f"{exposed} too; where that must not be, use one field, or a sink for each value")


def _broker_host(broker: str) -> str:
    """Return the host of an entry of ``bootstrap.servers``: ``[PROTOCOL://]HOST[:PORT]``."""
    address = broker.strip().rpartition("://")[2]
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") <= 1 else address


def _of_url(url: str) -> Iterator[Problem]:
    parts = urlsplit(url)
    if parts.scheme == "http" and _is_remote(parts.hostname or ""):
        yield Problem(("url",), "events go over plain http, which anyone on the way can read and answer: use https")


def _of_file(path: Path) -> str | None:
    """Return a line if the file is open to others than its owner; None if not, or if it does not exist."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: the path holds a NUL character
        return None
    exposed = f"{path}: holds a secret and is open to group or others (mode {mode:04o}): chmod 600 {path}"
    return exposed if mode & FOREIGN_BITS else None
