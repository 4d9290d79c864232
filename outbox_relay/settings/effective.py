"""The settings in effect as a flat mapping, in which secrets are hidden but can be compared.

Only values that cannot be secret are shown. Everything else is hidden: strings that a model marks with ``repr=False``,
texts of producer settings that are not in a list, and texts of plug-ins that their models do not mark as ``SHOWN``.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretBytes, SecretStr

from outbox_relay.domain.redaction import holds_secret
from outbox_relay.domain.routing import Routes
from outbox_relay.fields import Secret, entries
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import SettingPath, dotted
from outbox_relay.settings.producer import SERVERS
from outbox_relay.sinks.settings import SHOWN, PluginSettings

HIDDEN = "…"
"""The text in place of a hidden value."""
HASH_CHARS = 32
"""Number of hexadecimal characters of a hash."""
REFUSAL = "reload_refused"
"""The name of the reason of a refused reload among recorded settings."""
PER_PROCESS = frozenset({"relay.name", "http.listen"})
"""Settings that differ between the processes of one deployment."""
SHOWN_TEXT = frozenset(
    (
        *SERVERS,
        *("acks", "client.id", "client.rack", "compression.codec", "compression.type", "partitioner"),
        *("sasl.mechanism", "sasl.mechanisms", "security.protocol", "ssl.endpoint.identification.algorithm"),
        *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location"),
    )
)
"""Producer settings whose text is shown."""

Plain: TypeAlias = str | int | float | bool | list[str | int] | None


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A value that may be secret, and the text that is shown for it."""

    secret: object = field(repr=False)
    shown: str = HIDDEN


_Setting: TypeAlias = tuple[SettingPath, Plain | _Hidden]


def shown(settings: Settings) -> dict[str, Plain]:
    """Return every setting by its dotted path, for people."""
    return {dotted(path): value.shown if isinstance(value, _Hidden) else value for path, value in _flat((), settings)}


def recorded(settings: Settings, key: bytes) -> dict[str, Plain]:
    """Return every setting that all processes share by its dotted path, with hashes of hidden values under ``key``."""
    found: dict[str, Plain] = {}
    for path, value in _flat((), settings):
        if (name := dotted(path)) not in PER_PROCESS:
            found[name] = _hash(name, value, key) if isinstance(value, _Hidden) else value
    return found


def named_files(settings: Settings) -> dict[str, Path]:
    """Return the file that each setting names, by the dotted path of the setting."""
    return {dotted(path): file for path, file in _files((), settings)}


def _files(path: SettingPath, value: object) -> Iterator[tuple[SettingPath, Path]]:
    if isinstance(value, Path):
        yield path, value
    elif isinstance(value, Secret):
        yield from [] if value.file is None else [(path, value.file)]
    elif isinstance(value, tuple):
        for n, each in enumerate(cast("tuple[object, ...]", value)):
            yield from _files((*path, n), each)
    else:
        for name, each in (entries(value) or {}).items():
            yield from _files((*path, name), each)


def _hash(name: str, value: _Hidden, key: bytes) -> str:
    secret = json.dumps([name, value.secret], default=_revealed, sort_keys=True)
    return f"{value.shown} hmac:{hmac.new(key, secret.encode(), 'sha256').hexdigest()[:HASH_CHARS]}"


def _revealed(value: object) -> object:
    """Return what JSON does not know as JSON that is the same in every process."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case SecretBytes():
            return str(value.get_secret_value())
        case set() | frozenset():
            return sorted(json.dumps(each, default=_revealed) for each in cast("set[object]", value))
        case _:
            return str(value) if (table := entries(value)) is None else {**table}


def _flat(path: SettingPath, value: object, *, hidden: bool = False, plugin: bool = False) -> Iterator[_Setting]:
    """Yield the settings in ``value``, which is a part of a plug-in's own settings with ``plugin``."""
    if isinstance(value, Secret | SecretStr | SecretBytes) or (hidden and value is not None):
        yield path, _Hidden(value, _origin(value) if isinstance(value, str) else HIDDEN)
    elif isinstance(value, Routes):
        for pattern, sinks in value.table.items():
            yield (*path, pattern), [*sinks]
    elif isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        if any(isinstance(each, BaseModel) for each in items):
            for n, each in enumerate(items):
                yield from _flat((*path, n), each)
        else:
            yield path, [each if isinstance(each, int) else str(each) for each in items]
    elif (table := entries(value)) is not None:
        own = plugin or isinstance(value, PluginSettings)
        for name, each in table.items():
            of_plugin = own and name not in PluginSettings.model_fields
            is_hidden = _is_hidden(value, name, each, plugin=of_plugin)
            yield from _flat((*path, name), each, hidden=is_hidden, plugin=of_plugin)
    else:
        yield path, value if value is None or isinstance(value, bool | int | float) else str(value)


def _is_hidden(table: object, name: str, value: object, *, plugin: bool) -> bool:
    """Return True if a setting may be secret."""
    if not isinstance(table, BaseModel):  # of a producer, as far as there are texts in such tables
        return holds_secret(name) or (isinstance(value, str) and name not in SHOWN_TEXT)
    info = next(info for own, info in type(table).model_fields.items() if name in (own, info.alias))
    if not plugin or isinstance(value, BaseModel | bool | int | float):
        return not info.repr and not isinstance(value, dict)  # whose texts are judged one by one
    return SHOWN not in info.metadata and get_origin(info.annotation) is not Literal


def _origin(text: str) -> str:
    """Return scheme, host and port of a URL, whose other parts may be secret."""
    try:
        parts = urlsplit(text)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return HIDDEN
    return f"{parts.scheme}://{parts.hostname}{port}/{HIDDEN}" if parts.scheme and parts.hostname else HIDDEN
