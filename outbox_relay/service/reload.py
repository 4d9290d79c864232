"""A reload: read the settings again, and apply what can change without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.service.build import build_specs
from outbox_relay.service.kafka import read_producers
from outbox_relay.service.relays import SinkRelays
from outbox_relay.service.webhooks import Renewal, Webhooks
from outbox_relay.settings import Settings, restart_needed
from outbox_relay.sinks import Sink
from outbox_relay.sinks.kafka import ClientSettings, KafkaSink


class NewConfiguration(NamedTuple):
    """A configuration that was read, and passed every check that does not need the database."""

    settings: Settings
    specs: Mapping[str, SinkSpec]
    webhooks: Renewal
    producers: list[tuple[KafkaSink, ClientSettings]]


class Reload:
    """Reads and applies new settings. ``read_settings`` returns those of file and environment; it may block."""

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        sinks: Mapping[str, Sink],
        webhooks: Webhooks,
        relays: SinkRelays,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._sinks = sinks
        self._webhooks = webhooks
        self._relays = relays

    async def read(self) -> NewConfiguration:
        """Read the settings and every file that they name. Apply none of them.

        Raises ``ConfigurationError`` for a wrong setting, and for a change that needs a restart.
        """
        return await asyncio.to_thread(self._read)

    def _read(self) -> NewConfiguration:
        settings = self._read_settings()
        if refused := restart_needed(self._settings, settings):
            raise ConfigurationError("; ".join(refused))
        return NewConfiguration(
            settings, build_specs(settings), self._webhooks.read(settings), read_producers(self._sinks, settings)
        )

    async def apply(self, new: NewConfiguration) -> str | None:
        """Apply ``new``, in the database first: no event may be read by routes that the database does not have.

        Return the reason for refusing it, or None. The steps after the database read no file and cannot fail.
        Otherwise this relay would stop serving its sinks in favour of a configuration that it does not have.

        Raises as ``SinkRelays.reload``; repeat the call with the same ``new``.
        """
        if refusal := await self._relays.reload(new.specs):
            return refusal
        self._webhooks.renew(new.webhooks)
        for sink, producer in new.producers:
            sink.use_settings(producer)
        self._settings = new.settings
        return None
