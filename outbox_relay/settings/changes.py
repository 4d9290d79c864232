"""The settings that differ between two configurations, and those that a reload applies. No value appears here.

A reload applies routes, ``[notify]``, schedules, and the set of sinks with every setting of a sink but ``claim``. The
process itself and its connection to the database need a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.routing import Routes
from outbox_relay.fields import entries
from outbox_relay.settings.model import Settings, Sink
from outbox_relay.settings.problems import SettingPath, suggestion
from outbox_relay.sinks.settings import SinkSettings

KEPT_BY_SINKS = frozenset(["claim"])
"""Settings of a sink that need a restart: no relay may serve the sink while one of them changes."""


def differing(old: Settings, new: Settings) -> list[SettingPath]:
    """Return the paths of the settings whose values differ, in the order of the models."""
    return list(_differing((), old, new))


def merged(old: Settings, new: Settings) -> Settings:
    """Return the settings that are in effect after a reload from ``old`` to ``new``."""
    return new.model_copy(
        update={
            "database": old.database,
            "relay": old.relay,
            "http": old.http,
            "retention": old.retention,
            "sinks": {name: _merged_sink(old.sinks.get(name, sink), sink) for name, sink in new.sinks.items()},
        }
    )


def _merged_sink(old: Sink, new: Sink) -> Sink:
    return new.model_copy(update={name: getattr(old, name) for name in KEPT_BY_SINKS})


def serving(settings: Settings, names: Collection[str]) -> Settings:
    """Return the settings of a relay that serves only the sinks ``names``; without names, of all sinks.

    Raises ConfigurationError if there is no such sink.
    """
    for name in names:
        if name not in settings.sinks:
            raise ConfigurationError(f"--sinks: there is no sink {name}; {suggestion(name, settings.sinks)}")
    return settings.model_copy(update={"sinks": {name: settings.sinks[name] for name in names or settings.sinks}})


def _differing(path: SettingPath, old: object, new: object) -> Iterator[SettingPath]:
    olds, news = (None, None) if isinstance(old, Routes) else (entries(old), entries(new))
    if isinstance(old, SinkSettings) and type(old) is not type(new):
        yield (*path, "type")
    elif olds is None or news is None:
        yield from [path] if old != new else []
    else:
        for name in {**olds, **news}:
            if name in olds and name in news:
                yield from _differing((*path, name), olds[name], news[name])
            else:
                yield (*path, name)
