"""The settings that differ between two configurations, and those that a reload applies. No value appears here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from pydantic import BaseModel

from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import SettingPath, dotted

# `start` has no effect on a sink that the database knows, also after a restart.
APPLIED_TO_SINKS = frozenset(
    ["start", "secrets", "secrets_file", "headers", "proxy_authorization_file", "producer", "producer_files"]
)
"""Settings of a sink that a reload applies, as it applies the routes."""


def differing(old: Settings, new: Settings) -> list[SettingPath]:
    """Return the paths of the settings whose values differ, in the order of the models."""
    return list(_differing((), old, new))


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Return a line, without its value, for each setting that differs and that a reload does not apply."""
    return [_line(old, new, path) for path in differing(old, new) if not _is_applied(path)]


def _is_applied(path: SettingPath) -> bool:
    return path[0] == "routes" or (path[0] == "sinks" and len(path) > 2 and path[2] in APPLIED_TO_SINKS)


def _line(old: Settings, new: Settings, path: SettingPath) -> str:
    match path:
        case ("sinks", name) if name not in new.sinks:
            return f"{dotted(path)}: was removed: needs a restart"
        case ("sinks", name) if name not in old.sinks:
            return new.at(path, "was added: needs a restart")
        case _:
            return new.at(path, "needs a restart")


def _differing(path: SettingPath, old: object, new: object) -> Iterator[SettingPath]:
    olds, news = _entries(old), _entries(new)
    if isinstance(old, BaseModel) and type(old) is not type(new):
        yield (*path, "type")
    elif olds is None or news is None:
        yield from [path] if old != new else []
    else:
        for name in {**olds, **news}:
            if name in olds and name in news:
                yield from _differing((*path, name), olds[name], news[name])
            else:
                yield (*path, name)


def _entries(value: object) -> Mapping[str, object] | None:
    """Return the settings in a table by their names in the file; None if ``value`` is not a table."""
    if isinstance(value, BaseModel):
        return {field.alias or name: getattr(value, name) for name, field in type(value).model_fields.items()}
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None
