"""The settings that differ between two configurations, and those that a reload applies. No value appears here.

A reload applies routes, ``[notify]``, schedules, and the set of sinks with every setting of a sink but ``claim``. The
process itself and its connection to the database need a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from pydantic import BaseModel

from outbox_relay.settings.model import Settings, Sink
from outbox_relay.settings.problems import SettingPath

KEPT_BY_SINKS = frozenset(["claim"])
"""Settings of a sink that need a restart: no relay may serve the sink while one of them changes."""
APPLIED_TO_RELAY = frozenset(["park_after_seconds"])
"""Settings of the process that a reload applies."""


def differing(old: Settings, new: Settings) -> list[SettingPath]:
    """Return the paths of the settings whose values differ, in the order of the models."""
    return list(_differing((), old, new))


def merged(old: Settings, new: Settings) -> Settings:
    """Return the settings that are in effect after a reload from ``old`` to ``new``."""
    kept = {name: getattr(new.relay, name) for name in APPLIED_TO_RELAY}
    return new.model_copy(
        update={
            "database": old.database,
            "relay": old.relay.model_copy(update=kept),
            "http": old.http,
            "retention": old.retention,
            "sinks": {name: _merged_sink(old.sinks.get(name, sink), sink) for name, sink in new.sinks.items()},
        }
    )


def _merged_sink(old: Sink, new: Sink) -> Sink:
    return new.model_copy(update={name: getattr(old, name) for name in KEPT_BY_SINKS})


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
