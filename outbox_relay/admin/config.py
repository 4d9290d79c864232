"""The differences between the settings of a file and those that live relays run with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from outbox_relay.admin.alive import ALIVE_SECONDS
from outbox_relay.postgres.store import Store
from outbox_relay.settings import Settings
from outbox_relay.settings.effective import REFUSAL, Plain, recorded, without_hash


class Differences(NamedTuple):
    """The differences, for ``config diff --json``, the live relays, and those whose settings are not known."""

    differences: list[dict[str, Any]]
    relays: list[str]
    unknown: list[str]


async def diff(store: Store, settings: Settings) -> Differences:
    """Compare ``settings`` with those that the live relays run with.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    relays = await store.action("relay_configs", {"seconds": ALIVE_SECONDS})
    [key] = await store.action("config_key", {})
    file = recorded(settings, bytes(key.config_key))
    known = [(relay.name, relay.config) for relay in relays if is_known(relay.config)]
    unknown = [relay.name for relay in relays if not is_known(relay.config)]
    return Differences(differences(file, known), [relay.name for relay in relays], unknown)


def differences(file: Mapping[str, Plain], running: list[tuple[str, Mapping[str, Plain]]]) -> list[dict[str, Any]]:
    """Return an entry for each setting and each other value of it with which relays run.

    A sink that is in one of the two only is one entry, with its type.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for relay, config in running:
        for setting in _settings_of(file, config):
            ours, theirs = file.get(setting), config.get(setting)
            if ours != theirs:
                name = setting.removesuffix(".type") if setting == f"sinks.{_sink_of(setting)}.type" else setting
                entry = {"setting": name, "file": without_hash(ours), "running": without_hash(theirs), "relays": []}
                found.setdefault((name, repr(theirs)), entry)["relays"].append(relay)
    return list(found.values())


def is_known(config: Mapping[str, Plain] | None) -> bool:
    """Return whether a relay has recorded its settings: not one of an earlier version, nor one with too many."""
    return bool(config) and "too_large" not in config


def _settings_of(file: Mapping[str, Plain], config: Mapping[str, Plain]) -> list[str]:
    """Return the settings to compare. Of a sink that is in one of the two only, this is its type."""
    alone = _sinks(file) ^ _sinks(config)
    return [
        setting
        for setting in dict.fromkeys((*file, *config))
        if setting != REFUSAL
        if _sink_of(setting) not in alone or setting == f"sinks.{_sink_of(setting)}.type"
    ]


def _sinks(settings: Mapping[str, Plain]) -> set[str]:
    return {_sink_of(setting) for setting in settings if setting.startswith("sinks.")}


def _sink_of(setting: str) -> str:
    return setting.split(".")[1] if setting.startswith("sinks.") else ""
