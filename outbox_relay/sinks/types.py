"""The types of sinks: those of the relay itself, and plug-ins, which are entry points of ``outbox_relay.sinks``.

A type is imported when a file names it. No package can replace a type of the relay.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Final, TypeAlias, cast

from outbox_relay.domain.outcomes import clip
from outbox_relay.raised import raised
from outbox_relay.sinks import API_VERSION, PluginSettings, Sink, SinkContext, SinkSettings
from outbox_relay.sinks.plugin import PluginClass, PluginSink

GROUP: Final = "outbox_relay.sinks"
"""The group of entry points. The name of an entry point is the type that a file names."""
BUILTIN: Final[Mapping[str, tuple[str, str]]] = {
    "kafka": ("outbox_relay.settings:KafkaSettings", "outbox_relay.service.builtin_sinks:kafka"),
    "webhook": ("outbox_relay.settings:WebhookSettings", "outbox_relay.service.builtin_sinks:webhook"),
    "python": ("outbox_relay.settings:PythonSettings", "outbox_relay.sinks.python.sink:python"),
}
"""The types of the relay itself: the model of the settings, and the maker, which is imported when a sink is made."""

MakeSink: TypeAlias = Callable[[Any, Any], Sink]
"""Returns a sink, not yet open, for (its settings, its ``SinkContext``). Raises ValueError, without any secret."""


class TypeRefused(ValueError):
    """A type that is registered and cannot be used. The message is a sentence about the plug-in."""


@dataclass(frozen=True, slots=True)
class SinkType:
    """A type of sink: the model of its table, and the function that makes its sinks."""

    name: str
    settings: type[SinkSettings]
    make: MakeSink
    plugin: str | None = None
    """The name of a plug-in with its package, for messages. None for a type of the relay itself."""


_loaded: dict[str, SinkType] = {}
_refused: dict[str, TypeRefused] = {}


def forget_refusals() -> None:
    """Look again for types that were refused. To be called before each reading of the settings."""
    if _refused:
        _refused.clear()
        importlib.invalidate_caches()


def sink_type(name: str) -> SinkType | None:
    """Return the type ``name``, or None if no package registers it. Imports its module at the first call.

    Raises ``TypeRefused`` if it cannot be used.
    """
    if name in _refused:
        raise _refused[name]
    if name not in _loaded:
        try:
            found = _builtin(name) if name in BUILTIN else _plugin(name)
        except TypeRefused as error:
            _refused[name] = error
            raise
        if found is None:
            return None
        _loaded[name] = found
    return _loaded[name]


def plugins() -> dict[str, str]:
    """Return the installed plug-ins: the packages that register them, by their types."""
    found: dict[str, list[str]] = {}
    for entry_point in entry_points(group=GROUP):
        if entry_point.name not in BUILTIN:
            found.setdefault(entry_point.name, []).append(_package(entry_point))
    return {name: " and ".join(sorted(set(found[name]))) for name in sorted(found)}


def _builtin(name: str) -> SinkType:
    model, maker = BUILTIN[name]

    def make(settings: SinkSettings, context: SinkContext) -> Sink:
        return resolve_name(maker)(settings, context)

    return SinkType(name, resolve_name(model), make)


def _plugin(name: str) -> SinkType | None:
    registered = list(entry_points(group=GROUP, name=name))
    if not registered:
        return None
    packages = sorted({_package(each) for each in registered})
    if len({each.value for each in registered}) > 1:
        raise TypeRefused(f'several packages have a plug-in "{name}": {" and ".join(packages)}; uninstall all but one')
    plugin = f'the plug-in "{name}" of {packages[0]}'
    found = _import(registered[0], plugin)
    return SinkType(name, *_fitting(found, plugin), plugin)


def _package(entry_point: EntryPoint) -> str:
    """Return name and version of the package that registers a type."""
    if entry_point.dist is None:
        return "an unnamed package"
    return f"{entry_point.dist.name} {entry_point.dist.version}"


def _import(entry_point: EntryPoint, plugin: str) -> object:
    """Return what the entry point names. A module that prints does so to stderr: stdout is for data."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return entry_point.load()
    except (Exception, SystemExit) as error:
        message = str(error) if isinstance(error, ImportError | AttributeError) else ""
        text = f"{raised(error)}{': ' if message else ''}{clip(message)}"
        raise TypeRefused(f"{plugin} cannot be imported: {entry_point.value} raised {text}") from None


def _fitting(found: object, plugin: str) -> tuple[type[SinkSettings], MakeSink]:
    """Return the model and the maker of a plug-in's class. Raises ``TypeRefused`` if the class does not fit."""
    if not isinstance(found, type):
        raise TypeRefused(f"{plugin} does not fit: its entry point names no class")
    try:
        problem = _version_problem(found) or _model_problem(found)
    except Exception as error:
        problem = f"does not fit: its class {found.__name__} raised {raised(error)}"
    if problem:
        raise TypeRefused(f"{plugin} {problem}")
    plugin_class = cast("PluginClass", found)

    def make(settings: PluginSettings, context: SinkContext) -> Sink:
        return PluginSink(plugin_class, settings, SinkContext(context.name, context.replay, context.slots), plugin)

    return plugin_class.Settings, make


def _version_problem(found: type) -> str | None:
    version: object = getattr(found, "API_VERSION", None)
    if type(version) is not int:
        return f"does not fit: its class {found.__name__} has no API_VERSION, a number; this relay has {API_VERSION}"
    if version == API_VERSION:
        return None
    fix = "upgrade outbox-relay, or install an older version of" if version > API_VERSION else "upgrade"
    return f"was written for version {version} of the interface, and this relay has {API_VERSION}: {fix} the plug-in"


def _model_problem(found: type) -> str | None:
    model: object = getattr(found, "Settings", None)
    if isinstance(model, type) and issubclass(model, PluginSettings):
        return None
    return f"does not fit: {found.__name__}.Settings is no model that extends PluginSettings"
