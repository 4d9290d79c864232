"""The settings in effect as a flat mapping, in which secrets are hidden but can be compared.

Only values that cannot be secret are shown. Everything else is hidden: strings that a model marks with ``repr=False``,
producer settings that are not in a list, and texts of plug-ins that their models do not mark as ``SHOWN``. A hidden
value is compared by an HMAC under a key of the database.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from outbox_relay.domain.files import read_file
from outbox_relay.domain.redaction import holds_secret
from outbox_relay.domain.routing import Routes
from outbox_relay.fields import as_table, fields
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import SettingPath, dotted
from outbox_relay.settings.producer import SERVERS
from outbox_relay.settings.secrets import HeaderValue
from outbox_relay.settings.webhook import WebhookSettings
from outbox_relay.sinks.settings import SHOWN, PluginSettings

HIDDEN = "…"
"""The text in place of a hidden value."""
HASH = " hmac:"
"""The separator between the visible part of a hidden value and its hash in recorded settings."""
HASH_CHARS = 32
"""Number of hexadecimal characters of a hash."""
REFUSAL = "reload_refused"
"""The name of the reason of a refused reload among recorded settings."""
FILE_BYTES = 1 << 20
"""Maximum number of bytes of a file that its digest covers."""
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
class Hidden:
    """A value that may be secret, and the text that is shown for it."""

    secret: str = field(repr=False)
    shown: str = HIDDEN


def effective(settings: Settings) -> dict[str, Plain | Hidden]:
    """Return every setting by its dotted path."""
    return {dotted(path): value for path, value in _flat((), settings, None)}


def shown(settings: Settings) -> dict[str, Plain]:
    """Return every setting by its dotted path, for people."""
    return {name: value.shown if isinstance(value, Hidden) else value for name, value in effective(settings).items()}


def recorded(settings: Settings, key: bytes) -> dict[str, Plain]:
    """Return every setting that all processes share by its dotted path, with hashes of hidden values under ``key``."""
    return {
        name: _hashed(name, value, key) if isinstance(value, Hidden) else value
        for name, value in effective(settings).items()
        if name not in PER_PROCESS
    }


def named_files(settings: Settings) -> dict[str, Path]:
    """Return the file that each setting names, by the dotted path of the setting."""
    return {dotted(path): file for path, file in _files((), settings)}


def _files(path: SettingPath, value: object) -> Iterator[tuple[SettingPath, Path]]:
    match value:
        case Path():
            yield path, value
        case HeaderValue():
            yield from [] if value.file is None else [(path, value.file)]
        case BaseModel():
            for name in fields(type(value)):
                yield from _files((*path, name), _get(value, name))
        case dict():
            for name, each in as_table(cast("object", value)).items():
                yield from _files((*path, name), each)
        case tuple():
            for n, each in enumerate(_items(value)):
                yield from _files((*path, n), each)
        case _:
            return


class Fingerprint(NamedTuple):
    """A short digest of a value that may be secret, and the time of the last change of the file that holds it."""

    digest: str
    since: str | None

    def __str__(self) -> str:
        """Return both as a comment."""
        return self.digest + (f", since {self.since}" if self.since else "")


def fingerprints(settings: Settings, environ: Mapping[str, str]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each value that may be secret by the dotted path of its setting. Blocks.

    A value that cannot be read has none.
    """
    found: dict[str, Fingerprint] = {}
    for name, value in effective(settings).items():
        if isinstance(value, Hidden):
            found[name] = Fingerprint(_digest(name, value.secret.encode(errors="surrogatepass")), None)
    for sink, settings_of_sink in settings.sinks.items():
        for header, value in settings_of_sink.headers.items() if isinstance(settings_of_sink, WebhookSettings) else ():
            if value.env is not None and value.env in environ:
                name = dotted(("sinks", sink, "headers", header))
                found[name] = Fingerprint(_digest(name, environ[value.env].encode(errors="surrogateescape")), None)
    for name, file in named_files(settings).items():
        if not file.is_file():  # reading a pipe would take what the relay waits for
            continue
        with suppress(OSError):
            content, changed = read_file(file, FILE_BYTES), datetime.fromtimestamp(file.stat().st_mtime, UTC)
            found[name] = Fingerprint(_digest(name, content), changed.isoformat(timespec="seconds"))
    return found


def _digest(name: str, secret: bytes) -> str:
    """Return a digest that tells two values apart. It is slow and short, so that no secret can be guessed by it."""
    return hashlib.scrypt(secret, salt=name.encode(), n=2**11, r=8, p=1, dklen=4).hex()


def _hashed(name: str, value: Hidden, key: bytes) -> str:
    digest = hmac.new(key, f"{name}\0{value.secret}".encode(), "sha256").hexdigest()
    return f"{value.shown}{HASH}{digest[:HASH_CHARS]}"


def _flat(path: SettingPath, value: Any, info: FieldInfo | None) -> Iterator[tuple[SettingPath, Plain | Hidden]]:
    match value:
        case HeaderValue():
            yield path, Hidden(_header(value))
        case PluginSettings():
            for name, each in fields(type(value)).items():
                flat = _flat if name in PluginSettings.model_fields else _flat_of_plugin
                yield from flat((*path, name), _get(value, name), each)
        case BaseModel():
            for name, each in fields(type(value)).items():
                yield from _flat((*path, name), _get(value, name), each)
        case Routes():
            yield from (((*path, pattern), _leaf(sinks, hidden=False)) for pattern, sinks in value.table.items())
        case dict():
            yield from _table(path, as_table(cast("object", value)))
        case tuple() if any(isinstance(each, BaseModel) for each in _items(value)):
            for n, each in enumerate(_items(value)):
                yield from _flat((*path, n), each, None)
        case _:
            yield path, _leaf(value, hidden=info is not None and not info.repr)


def _flat_of_plugin(path: SettingPath, value: Any, info: FieldInfo) -> Iterator[tuple[SettingPath, Plain | Hidden]]:
    if isinstance(value, BaseModel):
        for name, each in fields(type(value)).items():
            yield from _flat_of_plugin((*path, name), _get(value, name), each)
    elif value is None or isinstance(value, bool | int | float):
        yield path, value
    elif SHOWN in info.metadata or get_origin(info.annotation) is Literal:
        yield path, _leaf(value, hidden=False)
    else:
        yield path, Hidden(json.dumps(_comparable(value)), _origin(value) if isinstance(value, str) else HIDDEN)


def _comparable(value: Any) -> Any:
    """Return a value of a plug-in, with its secrets, as JSON that is the same in every process."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case SecretStr() | SecretBytes():
            return str(value.get_secret_value())
        case BaseModel():
            return _comparable(dict(value))
        case Mapping():
            pairs = cast("Mapping[object, object]", value).items()
            return sorted([str(name), json.dumps(_comparable(each))] for name, each in pairs)
        case list() | tuple():
            return [_comparable(each) for each in cast("Sequence[object]", value)]
        case set() | frozenset():
            return sorted(json.dumps(_comparable(each)) for each in cast("Set[object]", value))
        case _:
            return str(value)


def _get(model: BaseModel, name: str) -> object:
    return next(getattr(model, own) for own, info in type(model).model_fields.items() if name in (own, info.alias))


def _header(value: HeaderValue) -> str:
    text = None if value.text is None else value.text.get_secret_value()
    return json.dumps([text, value.env, None if value.file is None else str(value.file)])


def _table(path: SettingPath, values: Mapping[str, Any]) -> Iterator[tuple[SettingPath, Plain | Hidden]]:
    for name, value in values.items():
        if path[-1:] == ("producer",):
            visible = not holds_secret(name) and (name in SHOWN_TEXT or not isinstance(value, str))
            yield (*path, name), value if visible else Hidden(str(value))
        else:
            yield from _flat((*path, name), value, None)


def _items(value: Any) -> tuple[object, ...]:
    return cast("tuple[object, ...]", value)


def _leaf(value: Any, *, hidden: bool) -> Plain | Hidden:
    match value:
        case SecretStr():
            return Hidden(value.get_secret_value())
        case None | bool() | int() | float():
            return value
        case str() if hidden:
            return Hidden(value, _origin(value))
        case tuple() if hidden:
            return Hidden(json.dumps([str(each) for each in _items(value)]))
        case tuple():
            return [each if isinstance(each, int) else str(each) for each in _items(value)]
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
