"""The settings that differ between two configurations, and those that a reload applies. No value appears here.

A reload applies routes, ``[notify]``, schedules and every setting of a sink but ``claim``. The process itself, its
connection to the database and its set of sinks need a restart. Routes and ``[notify]`` are applied only with the same
set of sinks: events that another sink is to receive must not be passed by before this exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.routing import Routes
from outbox_relay.fields import entries
from outbox_relay.settings.model import Settings, Sink
from outbox_relay.settings.problems import SettingPath, dotted, suggestion
from outbox_relay.sinks.settings import SinkSettings

KEPT_BY_SINKS = frozenset(["claim"])
"""Settings of a sink that need a restart: no relay may serve the sink while one of them changes."""


def differing(old: Settings, new: Settings) -> list[SettingPath]:
    """Return the paths of the settings whose values differ, in the order of the models."""
    return list(_differing((), old, new))


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Return a line, without its value, for each setting that differs and that a reload does not apply."""
    return [_line(old, new, path) for path in not_applied(old, new)]


def applied(old: Settings, new: Settings) -> list[SettingPath]:
    """Return the paths of the settings that differ and that a reload applies."""
    same_sinks = old.sinks.keys() == new.sinks.keys()
    return [path for path in differing(old, new) if _is_applied(path, same_sinks=same_sinks)]


def not_applied(old: Settings, new: Settings) -> list[SettingPath]:
    """Return the paths of the settings that differ and that need a restart."""
    same_sinks = old.sinks.keys() == new.sinks.keys()
    return [path for path in differing(old, new) if not _is_applied(path, same_sinks=same_sinks)]


def _is_applied(path: SettingPath, *, same_sinks: bool) -> bool:
    match path:
        case ("routes" | "notify", *_):
            return same_sinks
        case ("sinks", _, *rest):
            return bool(rest) and rest[0] not in KEPT_BY_SINKS
        case ("schedules", *_):
            return True
        case _:
            return False


def merged(old: Settings, new: Settings) -> Settings:
    """Return the settings that are in effect after a reload from ``old`` to ``new``."""
    same_sinks = old.sinks.keys() == new.sinks.keys()
    return new.model_copy(
        update={
            "database": old.database,
            "relay": old.relay,
            "http": old.http,
            "retention": old.retention,
            "sinks": {name: _merged_sink(sink, new.sinks.get(name, sink)) for name, sink in old.sinks.items()},
            "notify": new.notify if same_sinks else old.notify,
            "routes": new.routes if same_sinks else old.routes,
        }
    )


def _merged_sink(old: Sink, new: Sink) -> Sink:
    return new.model_copy(update={name: getattr(old, name) for name in KEPT_BY_SINKS})


def _line(old: Settings, new: Settings, path: SettingPath) -> str:
    match path:
        case ("sinks", name) if name not in new.sinks:
            return f"{dotted(path)}: was removed: needs a restart"
        case ("sinks", name) if name not in old.sinks:
            return new.at(path, "was added: needs a restart")
        case _:
            return new.at(path, "needs a restart")


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


def serving(settings: Settings, names: Collection[str]) -> Settings:
    """Return the settings of a relay that serves only the sinks ``names``; without names, of all sinks.

    Raises ConfigurationError if there is no such sink.
    """
    for name in names:
        if name not in settings.sinks:
            raise ConfigurationError(f"--sinks: there is no sink {name}; {suggestion(name, settings.sinks)}")
    if not names:
        return settings
    return settings.model_copy(update={"sinks": {name: settings.sinks[name] for name in names}})
