"""A reload: read the settings again, and apply what can change without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from outbox_relay.domain.errors import ConfigurationError, RestartNeeded
from outbox_relay.domain.file_reading import FILES, contents_read, sink_files
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.relay.lag_watch import LagWatch
from outbox_relay.relay.schedules import Schedules
from outbox_relay.service.build import ReplayClients, build_sink, build_specs
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.recorded_config import RecordedConfig
from outbox_relay.service.relays import REMOVED, SinkRelays
from outbox_relay.service.replays import ReplayRelays
from outbox_relay.service.webhooks import Renewal, Webhooks
from outbox_relay.settings import (
    KafkaSettings,
    PythonSettings,
    Settings,
    applied,
    merged,
    not_applied,
    remade_sinks,
    restart_needed,
)
from outbox_relay.settings.effective import named_files
from outbox_relay.settings.problems import dotted
from outbox_relay.sinks import Sink

if TYPE_CHECKING:
    from outbox_relay.sinks.kafka import ClientSettings, KafkaSink
    from outbox_relay.sinks.python import PythonSink

IMPORT_SECONDS = 10.0
"""Longest wait of a reload for the imports of its handlers. The files that it reads have as long."""


class NewConfiguration(NamedTuple):
    """A configuration that was read, and passed every check that does not need the database."""

    settings: Settings
    """The settings after the reload: those that need a restart are as before."""
    applied: list[str]
    needs_restart: list[str]
    specs: Mapping[str, SinkSpec]
    renewal: Renewal
    remade: Mapping[str, Sink]
    """The sinks that are made again, which are open."""
    webhooks: Webhooks
    """The maker of those that are webhooks."""
    producers: list[tuple[KafkaSink, ClientSettings]]
    contents: Mapping[Path, int]
    """The result of ``contents_read`` after every file was read."""


async def _check_handlers(new: NewConfiguration) -> None:
    """Raise ``ConfigurationError`` if a handler cannot be imported: nothing would replace the workers in use."""
    workers = {
        name: cast("PythonSink", sink)
        for name, sink in new.remade.items()
        if isinstance(new.settings.sinks[name], PythonSettings)
    }
    faults = await asyncio.gather(*(sink.import_fault(IMPORT_SECONDS) for sink in workers.values()))
    for name, fault in zip(workers, faults, strict=True):
        if fault is not None:
            raise ConfigurationError(f"{dotted(('sinks', name))}: {fault}")


async def _read_producers(sinks: Mapping[str, Sink], settings: Settings) -> list[tuple[KafkaSink, ClientSettings]]:
    """Do what ``read_producers`` does. Without a Kafka sink its client, which would block, is not loaded."""
    if not any(isinstance(settings.sinks[name], KafkaSettings) for name in sinks):
        return []
    from outbox_relay.service.kafka import read_producers

    return await read_producers(sinks, settings)


async def _close(sinks: list[Sink]) -> None:
    while sinks:
        await sinks.pop().close()


def _is_of(setting: str, sinks: Collection[str]) -> bool:
    return any(setting.startswith(f"{dotted(('sinks', name))}.") for name in sinks)


class Reload:
    """Reads and applies new settings. ``read_settings`` returns those of file and environment; it may block."""

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        sinks: MutableMapping[str, Sink],
        webhooks: Webhooks,
        own_addresses: OwnAddresses,
        relays: SinkRelays,
        recorded_config: RecordedConfig,
        lag_watch: LagWatch,
        schedules: Schedules,
        replays: ReplayRelays,
        replay_clients: ReplayClients,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._sinks = sinks
        self._webhooks = webhooks
        self._own_addresses = own_addresses
        self._relays = relays
        self._recorded_config = recorded_config
        self._lag_watch = lag_watch
        self._schedules = schedules
        self._replays = replays
        self._replay_clients = replay_clients
        self._contents: dict[Path, int] = {}
        self._unused: list[Sink] = []
        self._missing: list[str] = []

    def describe(self, new: NewConfiguration) -> dict[str, object]:
        """Return, for the log, the settings of ``new`` that were applied just now, and the others with the reason."""
        removed = [f"{dotted(('sinks', name))}: {REMOVED}" for name in self._missing]
        return {
            "applied": [setting for setting in new.applied if not _is_of(setting, self._missing)],
            "needs_restart": new.needs_restart,
            **({"not_applied": removed} if removed else {}),
        }

    async def read(self) -> NewConfiguration:
        """Read the settings and every file that they name, and make the sinks that change. Apply none of it.

        Raises ``ConfigurationError`` for a wrong setting, for a handler that cannot be imported, and as
        ``RestartNeeded`` if every change needs a restart.
        """
        new = await self._read(await FILES.acall(self._read_settings))
        remade = list(new.remade.values())
        try:
            for sink in remade:
                await sink.open()
            await _check_handlers(new)
        except BaseException:  # also if the relay stops meanwhile
            await _close(remade)
            raise
        unused = len(self._unused)
        self._unused += remade
        for _ in range(unused):
            await self._unused.pop(0).close()
        return new

    async def close(self) -> None:
        """Close the sinks that were made for a configuration that is not applied."""
        await _close(self._unused)

    async def _read(self, wanted: Settings) -> NewConfiguration:
        old = self._settings
        self._contents = {**contents_read(), **self._contents}
        taken = [dotted(path) for path in applied(old, wanted)]
        left = [dotted(path) for path in not_applied(old, wanted)]
        if left and not taken:
            raise RestartNeeded("; ".join(restart_needed(old, wanted)))
        settings = merged(old, wanted)
        webhooks = Webhooks(settings, self._own_addresses)
        remade = {
            name: await sink_files(name).acall(partial(build_sink, name, settings, webhooks))
            for name in remade_sinks(old, wanted)
        }
        kept = {name: sink for name, sink in self._sinks.items() if name not in remade}
        renewal, producers = await self._webhooks.read(settings), await _read_producers(kept, settings)
        contents = contents_read()
        taken += [each for each in self._with_other_contents(settings, contents) if each not in taken]
        return NewConfiguration(
            settings, taken, left, build_specs(settings), renewal, remade, webhooks, producers, contents
        )  # fmt: skip

    def _with_other_contents(self, settings: Settings, contents: Mapping[Path, int]) -> Iterator[str]:
        """Yield the settings of sinks whose files have other contents than at the start or the last reload."""
        for name, file in named_files(settings).items():
            if name.startswith("sinks.") and contents.get(file) != self._contents.get(file):
                yield name

    async def apply(self, new: NewConfiguration) -> str | None:
        """Apply ``new``, in the database first: no event may be read by routes that the database does not have.

        Sinks that are missing from the database keep their settings. If every sink is missing, return this reason for
        refusing ``new``, otherwise None. The steps after the database read no file and cannot fail, or else this relay
        would stop serving its sinks in favour of a configuration that it does not have.

        Raises as ``SinkRelays.reload``; repeat the call with the same ``new``.
        """
        self._missing = await self._relays.reload(new.specs, new.remade)
        taken = {name: sink for name, sink in new.remade.items() if name not in self._missing}
        self._unused = [sink for sink in self._unused if sink not in taken.values()]
        if len(self._missing) < len(new.specs):
            self._take(new, taken)
        if len(self._missing) == len(new.specs):
            return "; ".join(f"{dotted(('sinks', name))}: {REMOVED}" for name in self._missing)
        return None

    def _take(self, new: NewConfiguration, remade: Mapping[str, Sink]) -> None:
        """Use the settings of ``new``, and the sinks ``remade``, except for sinks that are missing."""
        kept = {name: self._settings.sinks[name] for name in self._missing}
        self._sinks.update(remade)
        self._webhooks.replace(new.webhooks, self._missing)
        self._webhooks.renew(new.renewal, self._missing)
        for sink, producer in new.producers:
            if all(self._sinks[name] is not sink for name in self._missing):
                sink.use_settings(producer)
        self._contents.update(new.contents)
        self._settings = new.settings.model_copy(update={"sinks": {**new.settings.sinks, **kept}})
        self._recorded_config.use(self._settings)
        self._lag_watch.use(self._settings.notify.limit)
        self._schedules.use(self._settings.registered_schedules())
        self._replay_clients.use(self._settings)
        self._replays.reloaded()
