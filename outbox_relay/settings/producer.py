"""Settings of the Kafka producer: names that librdkafka does not know, and values that would undo our guarantees.

Everything else is passed to librdkafka unchanged. Values never appear in a message: any of them may be a secret.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from outbox_relay.fields import is_place
from outbox_relay.settings.problems import Problem, suggestion

Scalar: TypeAlias = str | int | float | bool

SERVERS = ("bootstrap.servers", "metadata.broker.list")
"""The two names of the list of brokers, of which one is required."""
RUNS_CODE = frozenset(("plugin.library.paths", "sasl.kerberos.kinit.cmd", "ssl.engine.location", "ssl.providers"))
"""Settings that name a library to load or a command to run."""
FROM_FILE_ONLY = RUNS_CODE | {"sasl.kerberos.keytab", "sasl.kerberos.principal", "sasl.kerberos.service.name"}
"""Settings that no variable may set: what runs code, and what librdkafka puts into a command line unquoted."""

WHOLE_NUMBERS = frozenset(("batch.size", "message.max.bytes"))
"""Settings that the relay itself reads as whole numbers."""

_LIBRDKAFKA = tomllib.loads(Path(__file__).with_name("librdkafka.toml").read_text(encoding="utf-8"))
PROPERTIES = frozenset[str](_LIBRDKAFKA["properties"]["names"])
"""The names of librdkafka's settings, except those of functions."""
_RULES: dict[str, dict[str, Any]] = {name: rule for rule in _LIBRDKAFKA["restricted"] for name in rule["names"]}


def producer_problems(producer: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the settings in ``producer`` that are refused, and the lack of brokers."""
    for name, value in producer.items():
        rule = _rule(name)
        if is_place(value):
            if rule is not None or name in (*SERVERS, *WHOLE_NUMBERS):
                yield Problem((name,), "is no secret: write its value here")
            yield from _unknown(name)
        elif not isinstance(value, Scalar):
            text = f'should be text, a number, true or false, or a secret; a name with dots needs quotes: "{name}.…"'
            yield Problem((name,), text)
        elif rule is None:
            yield from _unknown(name)
        elif str(value).strip().lower() not in rule["accepted"]:
            yield Problem((name,), rule["reason"])
        if name in WHOLE_NUMBERS and isinstance(value, Scalar) and not _is_whole(value):
            yield Problem((name,), "should be a whole number")
    if not any(str(producer.get(name, "")).strip() for name in SERVERS):
        yield Problem((), f'needs "{SERVERS[0]}" = "HOST:PORT,…"')


def has_rule(name: str) -> bool:
    """Return True if :func:`producer_problems` checks the value of the setting. The relay sets most of these itself."""
    return _rule(name) is not None


def _is_whole(value: Scalar) -> bool:
    try:
        int(value)
    except (ValueError, OverflowError):
        return False
    return True


def _rule(name: str) -> dict[str, Any] | None:
    return _RULES.get("on_delivery" if name.endswith("_cb") else name)


def _unknown(name: str) -> Iterator[Problem]:
    if name not in PROPERTIES and _rule(name) is None:
        from outbox_relay.sinks.kafka.settings import is_property

        if not is_property(name):
            yield Problem((name,), f"librdkafka has no such setting; {suggestion(name, PROPERTIES)}")
