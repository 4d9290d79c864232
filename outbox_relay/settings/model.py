"""The whole of the settings: the tables of the file as immutable models."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.routing import NOTICES, RESERVED, Routes
from outbox_relay.fields import (
    STRICTNESS,
    Count,
    Dsn,
    Number,
    Section,
    as_list,
    as_table,
    blank_is_none,
    checked_dsn,
    excludes,
    matching,
    read_text,
)
from outbox_relay.settings.problems import NAME_CHARS, InvalidSetting, Origins, Problem, SettingPath, suggestion
from outbox_relay.settings.schedules import SCHEDULES_MAX, ScheduleName, ScheduleSettings
from outbox_relay.settings.sink_tables import Sink

MAX_DAYS = 36_500
"""Largest number of days that can be set, 100 years."""
_ADDRESS = matching(
    r"|/[^\x00-\x1f\x7f]*|(s3|gs)://[^\s/@?#:]+(/[^\s@?#]*)?(\?[^\s@#]*)?",
    'should be the path of a directory, such as "/var/lib/archive", or "s3://BUCKET/PREFIX" or "gs://BUCKET/PREFIX", '
    "without credentials: those come from the environment",
)
NO_DSN = "no database is named: set dsn or dsn_file in [database], or DATABASE_URL, or pass --dsn"
"""The message if a command needs the database and none of the ways names it."""


class DatabaseSettings(Section):
    """The connection to the database."""

    dsn_text: Dsn | None = Field(default=None, alias="dsn")
    """Connection string, "postgresql://…" or "host=… dbname=…"."""
    dsn_file: Annotated[Path | None, excludes("dsn_text", "dsn")] = None
    """A file with the connection string, instead of dsn; read at each connection, so a new password is seen."""
    pooler: Literal["none", "transaction"] = "none"
    """The proxy before the database: "none", or "transaction" for one that pools transactions."""
    listen_dsn: Annotated[Dsn | None, BeforeValidator(blank_is_none)] = None
    """A direct connection for wake-ups if there is a pooler; empty or left out: none, the relay polls."""

    def require_dsn(self) -> None:
        """Raise ConfigurationError, with the ways to give one, unless a connection string is named. Reads no file."""
        if self.dsn_text is None and self.dsn_file is None:
            raise ConfigurationError(NO_DSN)

    def dsn(self) -> str:
        """Return the connection string, from ``dsn_file`` at each call if that is set.

        Blocks while a small file is read. Raises ConfigurationError, without any content, if there is none.
        """
        self.require_dsn()
        if self.dsn_text is not None:
            return self.dsn_text.get_secret_value()
        try:
            return checked_dsn(read_text(self.dsn_file or Path()))
        except ValueError as error:
            raise ConfigurationError(f"dsn_file {self.dsn_file}: {error}") from None

    def wakeup_dsn(self) -> str | None:
        """Return the connection string for LISTEN, or None behind a pooler without one. Raises as :meth:`dsn`."""
        if self.listen_dsn is not None:
            return self.listen_dsn.get_secret_value()
        return self.dsn() if self.pooler == "none" else None


class RelaySettings(Section):
    """This process among the relays."""

    name: Annotated[
        str, matching(r"[^\s\x00-\x1f\x7f]*", "should be a label for people, 1 to 200 characters without blanks")
    ] = Field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}", min_length=1, max_length=200)
    """A label for people, 1 to 200 characters without blanks; by default host name and process id."""
    lease_seconds: Number = Field(default=15.0, ge=1, le=600)
    """Time for which a relay owns its shards without renewing their leases, in seconds, 1 to 600."""
    stop_after_seconds: Number = Field(default=20.0, gt=0, le=3600)
    """Time to finish the events in flight after SIGTERM, in seconds, above 0 and at most 3600."""


class HttpSettings(Section):
    """The listener for health checks."""

    listen: Annotated[str | None, BeforeValidator(blank_is_none)] = None
    """The address to listen at, "HOST:PORT" or "[IPV6]:PORT", "[::]:PORT" for every address of IPv6 and IPv4.

    Port 0 is any free port; empty or left out: none.
    """

    @field_validator("listen")
    @classmethod
    def _is_listen(cls, value: str | None) -> str | None:
        host, _, port = (value or "h:0").rpartition(":")
        if not re.fullmatch(r"\[[^\s/@\[\]]*:[^\s/@\[\]]*\]|[^\s/@\[\]:]+", host):
            raise ValueError('should be "HOST:PORT", such as "127.0.0.1:8080", "0.0.0.0:8080" or "[::]:8080"')
        if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
            raise ValueError("should have a port of 0 to 65535 after the last colon")
        return value

    @property
    def address(self) -> tuple[str, int] | None:
        """Host, without brackets, and port to listen at; None without a listener."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class RetentionSettings(Section):
    """Retention: days that are past are archived, if an archive is named, and emptied."""

    enabled: bool = True
    """Let the relay do passes; false leaves them to the command ``retention run``."""
    keep_days: Count = Field(default=30, ge=0, le=MAX_DAYS)
    """Days for which events are kept in the log after their day has ended, 0 to 36500; 0: indefinitely."""
    keep_uids_days: Count = Field(default=30, ge=0, le=MAX_DAYS)
    """Days for which uids that callers chose and marks of the inbox are kept, 0 to 36500; 0: indefinitely."""
    keep_dead_days: Count = Field(default=0, ge=0, le=MAX_DAYS)
    """Days after which dead letters are discarded, 0 to 36500; 0: never."""
    keep_attempts_days: Count = Field(default=14, ge=0, le=MAX_DAYS)
    """Days for which recorded attempts are kept, 0 to 36500; 0: indefinitely."""
    archive: Annotated[str, _ADDRESS] = ""
    """Address of the archive, a directory or "s3://…" or "gs://…"; empty: days are emptied without an archive."""
    archive_format: Literal["jsonl.zst", "parquet"] = "jsonl.zst"
    """Format of archived events."""

    def stated(self) -> dict[str, Any]:
        """Return the values that all relays of a database must agree on."""
        names = ("keep_days", "keep_uids_days", "keep_dead_days", "keep_attempts_days")
        return {**{name: getattr(self, name) for name in names}, "archive": bool(self.archive)}


def _routes(value: Any) -> Routes:
    """Return the routes in a pair: the table, and the names of all sinks, right or wrong."""
    if isinstance(value, Routes):
        return value
    table, known = value
    if as_table(table) is not table:
        raise ValueError('should be a table of lists: "PATTERN" = ["SINK", …]')
    if wrong := [problem for pattern in table for problem in _route_problems(pattern, table[pattern], known)]:
        raise InvalidSetting(wrong)
    return Routes({pattern: tuple(sinks) for pattern, sinks in table.items()})


RouteTable: TypeAlias = Annotated[Routes, PlainValidator(_routes, json_schema_input_type=dict[str, list[str]])]


def _route_problems(pattern: str, row: object, known: Collection[str]) -> Iterator[Problem]:
    sinks = as_list(row)
    try:
        Routes({pattern: ()})
    except ValueError as error:
        yield Problem((pattern,), str(error))
    if pattern.startswith(RESERVED):
        fix = "set sink in [notify] to receive them"
        yield Problem((pattern,), f'types that begin with "{RESERVED}" are notices: {fix}')
    if not sinks or not all(isinstance(name, str) for name in sinks):
        yield Problem((pattern,), 'should be a list of one or more names of sinks: ["SINK", …]')
        return
    for n, name in enumerate(sinks):
        if name not in known:
            shown = name if name.isprintable() and len(name) <= NAME_CHARS else "of this name"
            yield Problem((pattern, n), f"there is no sink {shown}; {suggestion(name, known)}")


class NotifySettings(Section):
    """The relay's own events, called notices."""

    sink: Annotated[str | None, BeforeValidator(blank_is_none)] = None
    """The sink that receives notices; empty or left out: none are made."""

    @property
    def limit(self) -> float | None:
        """The age of the oldest waiting event from which a sink lags; None if no sink receives notices."""
        return None if self.sink is None else LAGGING_SECONDS


LAGGING_SECONDS = 300.0
"""Age of the oldest event that waits for a sink from which the sink lags."""

_NO_NAME = "a sink's name is 1 to 40 of a-z, 0-9 and _, begins with a letter and holds no __"
SinkName: TypeAlias = Annotated[str, matching(r"(?!.*__)[a-z][a-z0-9_]{0,39}", _NO_NAME)]
"""A name that is part of variables' names, in which ``__`` separates."""


class Settings(BaseSettings):
    """Everything that a relay can be told. Made by :func:`outbox_relay.settings.load`."""

    model_config = SettingsConfigDict(**STRICTNESS, env_prefix="OUTBOX_RELAY_", env_nested_delimiter="__")

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    relay: RelaySettings = Field(default_factory=RelaySettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    notify: NotifySettings = Field(default_factory=NotifySettings)
    sinks: dict[SinkName, Sink] = Field(default_factory=dict)
    routes: RouteTable = Field(default_factory=lambda: Routes({}))
    """Event type or pattern → names of sinks; an event goes to the union of all that match."""
    schedules: dict[ScheduleName, ScheduleSettings] = Field(default_factory=dict, max_length=SCHEDULES_MAX)

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic-settings'
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the argument ``sources``, the first of which wins; the process's own environment is not read."""
        return init_settings()["sources"]

    @model_validator(mode="before")
    @classmethod
    def _routes_know_sinks(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data | {"routes": (data.get("routes", {}), as_table(data.get("sinks")))}

    def stated_retention(self) -> dict[str, Any] | None:
        """Return the values of ``[retention]``, or None if neither the file nor a variable has that table."""
        return self.retention.stated() if "retention" in self.model_fields_set else None

    def registered_schedules(self) -> list[dict[str, Any]]:
        """Return the schedules as the database registers them."""
        return [schedule.registration(name) for name, schedule in self.schedules.items()]

    def patterns_for(self, sink: str) -> tuple[str, ...]:
        """Return the sorted patterns of a sink, with that of notices if it receives them."""
        return tuple(sorted((*self.routes.patterns_for(sink), *([NOTICES] if sink == self.notify.sink else []))))

    def remember(self, origins: Origins) -> None:
        """Keep where each setting was given, for :meth:`at`."""
        self._origins = origins

    @property
    def file(self) -> Path | None:
        """The file that the settings came from; None without one."""
        return Path(self._origins.file) if self._origins.file else None

    def in_file(self, path: SettingPath) -> bool:
        """Return whether the setting at ``path`` is in the file and no variable replaces it."""
        return self._origins.where(path).startswith(f"{self._origins.file}:")

    def at(self, path: SettingPath, text: str) -> str:
        """Return a line for people about the setting at ``path``, such as ``relay.toml:12: sinks.crm: …``."""
        return self._origins.at(path, text)
