"""The settings in effect as a flat mapping, in which secrets are hidden but can be compared.

Only values that cannot be secret are shown. Everything else is hidden: strings that a model marks with ``repr=False``,
texts of producer settings that are not in a list, and texts of plug-ins that their models do not mark as ``SHOWN``.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from outbox_relay.domain.routing import Routes
from outbox_relay.domain.secret_names import holds_secret
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


def _flat(path: SettingPath, value: Any, info: FieldInfo | None = None) -> Iterator[_Setting]:
    if isinstance(value, Secret):
        yield path, _Hidden(value)
    elif isinstance(value, Routes):
        yield from (((*path, pattern), list(sinks)) for pattern, sinks in value.table.items())
    elif isinstance(value, tuple) and any(isinstance(each, BaseModel) for each in cast("tuple[object, ...]", value)):
        for n, each in enumerate(cast("tuple[object, ...]", value)):
            yield from _flat((*path, n), each)
    elif (table := entries(value)) is not None:
        infos = {each.alias or name: each for name, each in _fields(cast("object", value)).items()}
        for name, each in table.items():
            at = (*path, name)
            if isinstance(value, PluginSettings) and name not in PluginSettings.model_fields:
                yield from _flat_of_plugin(at, each, infos[name])
            elif path[-1:] == ("producer",) and not isinstance(each, Secret):
                visible = not holds_secret(name) and (name in SHOWN_TEXT or not isinstance(each, str))
                yield at, each if visible else _Hidden(each)
            else:
                yield from _flat(at, each, infos.get(name))
    else:
        yield path, _leaf(value, hidden=info is not None and not info.repr)


def _fields(value: object) -> Mapping[str, FieldInfo]:
    return type(value).model_fields if isinstance(value, BaseModel) else {}


def _flat_of_plugin(path: SettingPath, value: Any, info: FieldInfo) -> Iterator[_Setting]:
    if isinstance(value, BaseModel):
        for name, each in _fields(value).items():
            yield from _flat_of_plugin((*path, each.alias or name), getattr(value, name), each)
    elif value is None or isinstance(value, bool | int | float):
        yield path, value
    elif SHOWN in info.metadata or get_origin(info.annotation) is Literal:
        yield path, _leaf(value, hidden=False)
    else:
        yield path, _Hidden(value, _origin(value) if isinstance(value, str) else HIDDEN)


def _leaf(value: Any, *, hidden: bool) -> Plain | _Hidden:
    match value:
        case None | bool() | int() | float():
            return value
        case SecretStr():
            return _Hidden(value)
        case str() if hidden:
            return _Hidden(value, _origin(value))
        case tuple():
            return [each if isinstance(each, int) else str(each) for each in cast("tuple[object, ...]", value)]
        case _:
            return str(value)


def _origin(text: str) -> str:
    """Return scheme, host and port of a URL, whose other parts may be secret."""
    try:
        parts = urlsplit(text)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return HIDDEN
    return f"{parts.scheme}://{parts.hostname}{port}/{HIDDEN}" if parts.scheme and parts.hostname else HIDDEN
