"""Level and format of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from outbox_relay.domain.errors import Misconfigured

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
Format: TypeAlias = Literal["json", "console"]


class LogSettings(NamedTuple):
    """Level and format of the log."""

    level: Level
    format: Format


def log_settings(environ: Mapping[str, str], *, terminal: bool) -> LogSettings:
    """Return level and format of the log, from ``OUTBOX_RELAY_LOG_LEVEL`` and ``OUTBOX_RELAY_LOG_FORMAT``.

    The defaults are info, and json unless stderr is a ``terminal``. Case and blanks are ignored. Raises Misconfigured
    if a value is not among the known ones.
    """
    level = _choice(environ, "OUTBOX_RELAY_LOG_LEVEL", get_args(Level), "info")
    lines = _choice(environ, "OUTBOX_RELAY_LOG_FORMAT", get_args(Format), "console" if terminal else "json")
    return LogSettings(cast("Level", level), cast("Format", lines))


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in choices:
        raise Misconfigured(f"{name}: should be one of {', '.join(choices)}")
    return value
