"""Settings of the Kafka producer that the relay refuses, because they would undo its guarantees.

Everything else goes to librdkafka as it stands. Values never stand in a message: any of them may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from outbox_relay.settings.problems import Problem

Scalar: TypeAlias = str | int | float | bool

SERVERS = ("bootstrap.servers", "metadata.broker.list")
"""The two names of the list of brokers, of which one is required."""
MAX_IN_FLIGHT = 1
"""Requests under way at once on a connection, at most: with more, the first of a partition can be lost."""


def _is_true(value: str) -> bool:
    return value in ("true", "t", "1")


def _is_false(value: str) -> bool:
    return value in ("false", "f", "0")


def _is_zero(value: str) -> bool:
    try:
        return float(value) == 0
    except ValueError:
        return False


def _few(value: str) -> bool:
    try:
        return 1 <= int(value) <= MAX_IN_FLIGHT
    except ValueError:
        return False


def _never(_: str) -> bool:
    return False


RUNS_CODE = frozenset(("plugin.library.paths", "sasl.kerberos.kinit.cmd", "ssl.engine.location", "ssl.providers"))
"""Settings that name a library to load or a command to run."""
SHELL_READ = frozenset(("sasl.kerberos.keytab", "sasl.kerberos.principal", "sasl.kerberos.service.name"))
"""Settings that librdkafka puts into the command line of ``sasl.kerberos.kinit.cmd`` as they stand."""
_PLAIN = re.compile(r"[A-Za-z0-9@._/:+=-]*")
_SECRET = ("password", "secret", "pem", "jaas", "token", "private", "passphrase", "sasl.oauthbearer.config", "ssl.key")
_NO_SECRET = (".location", ".url", "ca.pem", "certificate.pem")
_FROM_THE_ENVIRONMENT = "makes the relay run code: it is taken from the file only, not from the environment"
_FOR_A_SHELL = "holds a character that a shell reads, and becomes part of a command: it is taken from the file only"


def holds_secret(name: str) -> bool:
    """Whether the value of the setting ``name`` is one that must not be seen."""
    return any(part in name for part in _SECRET) and not name.endswith(_NO_SECRET)


def refused_from_environment(table: Mapping[str, object]) -> dict[str, str]:
    """Return the settings in ``table``, by name, that may not come from the environment, each with the reason.

    Whoever sets variables of the relay, in a deployment's description, say, must not thereby run code in it.
    """
    found: dict[str, str] = {}
    for name, value in table.items():
        plain = name.strip().lower()
        if plain in RUNS_CODE:
            found[name] = _FROM_THE_ENVIRONMENT
        elif plain in SHELL_READ and not _PLAIN.fullmatch(str(value)):
            found[name] = _FOR_A_SHELL
    return found


_IDEMPOTENCE = "should be true or left out: without it a retry overtakes later records of the same key"
_GAPLESS = "should be true or left out: without it records overtake those of a request that was refused"
_ACKS = 'should be "all" or left out: otherwise an acknowledged event can be lost with its broker'
_TIMEOUT = (
    "should be 0 or left out: a record that times out inside librdkafka is sent again behind later ones of its key"
)
_IN_FLIGHT = (
    f"should be {MAX_IN_FLIGHT} or left out: with more, the first records of a partition can be lost when it is made"
)
_RETRIES = (
    "should be left out: librdkafka tries again by itself for as long as order needs it, the relay decides the rest"
)
_TRANSACTIONS = "should be left out: the relay does not produce in Kafka transactions"
_PARTITIONER = (
    "should be a partitioner that keeps a key in one partition, such as murmur2_random: order is per partition"
)
_REPORTS = "should be left out: the relay needs a report for every record, delivered or not"
_STRATEGY = 'should be "fifo" or left out: records are sent in order'
_CALLBACK = "should be left out: it is a function in the program, not a setting in a file"

_RULES: dict[str, tuple[Callable[[str], bool], str]] = {
    "enable.idempotence": (_is_true, _IDEMPOTENCE),
    "enable.gapless.guarantee": (_is_true, _GAPLESS),
    "acks": (frozenset(("all", "-1")).__contains__, _ACKS),
    "request.required.acks": (frozenset(("all", "-1")).__contains__, _ACKS),
    "message.timeout.ms": (_is_zero, _TIMEOUT),
    "delivery.timeout.ms": (_is_zero, _TIMEOUT),
    "max.in.flight": (_few, _IN_FLIGHT),
    "max.in.flight.requests.per.connection": (_few, _IN_FLIGHT),
    "retries": (_never, _RETRIES),
    "message.send.max.retries": (_never, _RETRIES),
    "transactional.id": (_never, _TRANSACTIONS),
    "partitioner": (lambda value: value != "random", _PARTITIONER),
    "delivery.report.only.error": (_is_false, _REPORTS),
    "queuing.strategy": (frozenset(("fifo",)).__contains__, _STRATEGY),
    "on_delivery": (_never, _CALLBACK),
    "logger": (_never, _CALLBACK),
    "opaque": (_never, _CALLBACK),
}


def refusals(producer: Mapping[str, Scalar]) -> list[Problem]:
    """What the relay refuses in ``producer``, each by its name and with the reason; also that no brokers are named."""
    found = [
        Problem((name,), reason) for name, value in producer.items() if (reason := _refusal(name, value)) is not None
    ]
    if not any(str(producer.get(name, "")).strip() for name in SERVERS):
        near = next(
            iter(get_close_matches(SERVERS[0], [name for name in producer if name not in SERVERS], 1, 0.8)), None
        )
        hint = f"; did you mean it with {near}?" if near else ""
        found.append(Problem((), f'needs "{SERVERS[0]}" = "HOST:PORT,…"{hint}'))
    return found


def refusals_of_files(files: Mapping[str, Path], producer: Mapping[str, Scalar]) -> list[Problem]:
    """What the relay refuses among the settings in ``files``, beside those in ``producer``."""
    found: list[Problem] = []
    for name, path in files.items():
        if "/" not in str(path):
            # Whoever writes the secret itself here must not read it in an error.
            found.append(Problem((name,), 'should be the path of a file, with a "/" in it'))
        if name in producer:
            found.append(Problem((name,), "stands in producer too: give one of the two"))
        elif name in _RULES or name in SERVERS or name.endswith("_cb"):
            found.append(Problem((name,), "should not stand in a file; what may be said of it belongs in producer"))
    return found


def _refusal(name: str, value: Scalar) -> str | None:
    if name.endswith("_cb"):
        return _CALLBACK
    accepts, reason = _RULES.get(name, (None, ""))
    if accepts is None or accepts(str(value).strip().lower()):
        return None
    return reason
