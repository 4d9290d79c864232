"""From the settings of each sink to the rules of its delivery and its client."""

from __future__ import annotations

from collections.abc import Callable, Collection

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.relay.sink_spec import SinkSpec
from outbox_relay.service.builtin_sinks import RelayContext
from outbox_relay.service.own_addresses import Address
from outbox_relay.service.tracing import Trace, untraced
from outbox_relay.service.webhooks import Webhooks
from outbox_relay.settings import Settings
from outbox_relay.sinks import Sink
from outbox_relay.sinks.types import sink_type


class Clients:
    """Makes clients of sinks with one version of the settings. ``trace`` is applied to each."""

    def __init__(
        self, settings: Settings, own_addresses: Callable[[], Collection[Address]], trace: Trace = untraced
    ) -> None:
        self._settings = settings
        self._own_addresses = own_addresses
        self._trace = trace
        self._webhooks = Webhooks(settings, own_addresses)

    def with_settings(self, settings: Settings) -> Clients:
        """Return one that makes clients with other settings."""
        return Clients(settings, self._own_addresses, self._trace)

    def make(self, name: str, replay: int | None = None, slots: int | None = None) -> Sink:
        """Return a client of the sink ``name``, or one for a ``replay`` with ``slots`` calls at once, not yet open.

        Blocks while small files are read. Raises ``ConfigurationError`` if a file or variable named by the settings of
        the sink cannot be used.
        """
        sink = self._settings.sinks[name]
        try:
            found = sink_type(sink.type)
            if found is None:
                raise ConfigurationError(self._settings.at(("sinks", name, "type"), "is not installed any more"))
            context = RelayContext(name, replay, slots, settings=self._settings, webhooks=self._webhooks)
            return self._trace(name, found.make(sink, context))
        except ValueError as error:
            raise ConfigurationError(self._settings.at(("sinks", name), str(error))) from None


def build_specs(settings: Settings) -> dict[str, SinkSpec]:
    """Return the specification of every sink by its name."""
    return {name: SinkSpec(name, settings.patterns_for(name), sink) for name, sink in settings.sinks.items()}
