"""The whole of the settings: the tables of the file as immutable models."""

from __future__ import annotations

import os
import socket
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.domain.routing import Routes
from outbox_relay.settings import raw
from outbox_relay.settings.fields import STRICTNESS, Number, Section
from outbox_relay.settings.places import Sources
from outbox_relay.settings.problems import Path as Place
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.sinks import Sink, check_sink_name

NO_DSN = (
    "no database is named: set dsn or dsn_file in [database], or the variable OUTBOX_RELAY_DATABASE__DSN, or pass --dsn"
)
"""What is said when a command needs the database and none of the three ways names it."""


def _check_dsn(text: str) -> str:
    """``text`` without blanks around it. Raises ValueError, without the text, when it cannot be a connection string."""
    dsn = text.strip()
    if not dsn:
        raise ValueError("is empty")
    if not dsn.isprintable():
        raise ValueError("holds a line break or a control character")
    if not dsn.startswith(("postgresql://", "postgres://")) and "=" not in dsn:
        raise ValueError(
            'should be "postgresql://USER@HOST:PORT/DATABASE" or pairs such as "host=HOST dbname=DATABASE"'
        )
    return dsn


class DatabaseSettings(Section):
    """How the database is reached."""

    dsn_text: SecretStr | None = Field(default=None, alias="dsn")
    """Connection string, "postgresql://…" or "host=… dbname=…"."""
    dsn_file: Path | None = None
    """A file with the connection string, instead of dsn; read at each connection, so a new password is seen."""
    pooler: Literal["none", "transaction"] = "none"
    """What stands before the database: nothing ("none"), or a proxy that pools transactions ("transaction"): no
    prepared statements, nothing of a session."""
    listen_dsn: SecretStr | None = None
    """A direct connection for wake-ups when there is a pooler; empty or left out: none, the relay polls."""

    @field_validator("dsn_text")
    @classmethod
    def _is_dsn(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else SecretStr(_check_dsn(value.get_secret_value()))

    @field_validator("dsn_file")
    @classmethod
    def _one_source(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("dsn_text") is not None:
            raise ValueError("excludes dsn: give one of the two")
        return value

    @field_validator("listen_dsn")
    @classmethod
    def _is_listen_dsn(cls, value: SecretStr | None) -> SecretStr | None:
        text = "" if value is None else value.get_secret_value().strip()
        return SecretStr(_check_dsn(text)) if text else None

    def require_dsn(self) -> None:
        """Raise Misconfigured, naming the ways to give one, unless a connection string is named. Reads no file."""
        if self.dsn_text is None and self.dsn_file is None:
            raise Misconfigured(NO_DSN)

    def dsn(self) -> str:
        """The connection string, read from ``dsn_file`` at each call if that is set.

        Blocks for as long as reading a small file takes. Raises Misconfigured, without any of its content, when none is
        named or the file cannot be read or holds none.
        """
        self.require_dsn()
        if self.dsn_text is not None:
            return self.dsn_text.get_secret_value()
        try:
            return _check_dsn((self.dsn_file or Path()).read_text(encoding="utf-8"))
        except OSError as error:
            raise Misconfigured(f"dsn_file {self.dsn_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise Misconfigured(f"dsn_file {self.dsn_file}: is not UTF-8") from None
        except ValueError as error:
            raise Misconfigured(f"dsn_file {self.dsn_file}: {error}") from None

    def wakeup_dsn(self) -> str | None:
        """The connection string for LISTEN: ``listen_dsn``, else without a pooler that of the database, else none.

        Raises Misconfigured as :meth:`dsn` does.
        """
        if self.listen_dsn is not None:
            return self.listen_dsn.get_secret_value()
        return self.dsn() if self.pooler == "none" else None


def _own_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


class RelaySettings(Section):
    """How this process behaves among the relays."""

    name: str = Field(default_factory=_own_name, min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f\x7f]+$")
    """A label for people, 1 to 200 characters without blanks; by default host name and process id."""
    lease_seconds: Number = Field(default=15.0, ge=1, le=600)
    """How long a relay owns its shards without renewing, in seconds, 1 to 600. It renews every third of that; when it
    dies, others take over after at most this time."""
    park_after_seconds: Number = Field(default=1.0, gt=0, le=60)
    """How long a position waits for one event in flight until that is parked, in seconds, above 0 and at most 60."""
    stop_after_seconds: Number = Field(default=20.0, gt=0, le=3600)
    """Time to finish what is in hand after SIGTERM, in seconds, above 0 and at most 3600."""


class HttpSettings(Section):
    """The listener for health, metrics and the admin page."""

    listen: str | None = None
    """Where to listen, "HOST:PORT", "[IPV6]:PORT"; port 0 is any free one; empty or left out: no listener."""

    @field_validator("listen")
    @classmethod
    def _is_listen(cls, value: str | None) -> str | None:
        if not value:
            return None
        host, colon, port = value.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not bare or (":" in bare) != (bare != host) or any(c.isspace() or c in "/@[]" for c in bare):
            raise ValueError('should be "HOST:PORT", such as "127.0.0.1:8080", "0.0.0.0:8080" or "[::]:8080"')
        if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
            raise ValueError("should have a port of 0 to 65535 after the last colon")
        return value

    @property
    def address(self) -> tuple[str, int] | None:
        """Host, without brackets, and port to listen at; nothing when there is no listener."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


def _routes(value: object) -> Routes:
    """The table ``[routes]``, checked by itself; whether its sinks exist is checked beside the sinks."""
    if isinstance(value, Routes):
        return value
    rows = raw.table(value)
    if rows is None:
        raise ValueError('should be a table of lists: "PATTERN" = ["SINK", …]')
    table: dict[str, tuple[str, ...]] = {}
    wrong: list[Problem] = []
    for pattern, sinks in rows.items():
        try:
            table[pattern] = _sink_names(sinks)
            Routes({pattern: ()})
        except ValueError as error:
            wrong.append(Problem((pattern,), str(error)))
    if wrong:
        raise Wrong(wrong)
    return Routes(table)


def _sink_names(value: object) -> tuple[str, ...]:
    entries = raw.items(value) or []
    names = tuple(entry for entry in entries if isinstance(entry, str))
    if not names or len(names) != len(entries):
        raise ValueError('should be a list of one or more names of sinks: ["SINK", …]')
    return names


SinkName = Annotated[str, BeforeValidator(check_sink_name)]

_layers: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("layers", default=())


class Settings(BaseSettings):
    """Everything that a relay can be told. Made by :func:`outbox_relay.settings.load`."""

    model_config = SettingsConfigDict(**STRICTNESS, case_sensitive=True)

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    relay: RelaySettings = Field(default_factory=RelaySettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    sinks: dict[SinkName, Sink] = Field(default_factory=dict)
    routes: Annotated[Routes, PlainValidator(_routes)] = Field(default_factory=lambda: Routes({}))
    """Event type or pattern → names of sinks; an event goes to the union of all that match."""

    _sources: Sources = PrivateAttr(default_factory=Sources)

    @classmethod
    def layered(cls, *layers: dict[str, Any]) -> Settings:
        """The settings in ``layers`` of raw values, the first of which wins. Raises pydantic's ValidationError."""
        token = _layers.set(layers)
        try:
            return cls()
        finally:
            _layers.reset(token)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic-settings'
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is passed, and the layers: variables have names and rules of their own here."""
        return (init_settings, *(InitSettingsSource(settings_cls, layer) for layer in _layers.get()))

    def remember(self, sources: Sources) -> None:
        """Keep where each setting was given, for :meth:`at`."""
        self._sources = sources

    @property
    def file(self) -> Path | None:
        """The file that the settings came from; None without one."""
        return Path(self._sources.file) if self._sources.file else None

    def in_file(self, path: Place) -> bool:
        """Whether the setting at ``path``, or a part of it, stands in the file and holds."""
        taken = any(path[: len(given)] == given for given in self._sources.given)
        return not taken and any(at[: len(path)] == path for at in self._sources.lines)

    def at(self, path: Place, text: str) -> str:
        """A line for people about the setting at ``path``, such as ``relay.toml:12: sinks.crm: …``."""
        return self._sources.at(path, text)
