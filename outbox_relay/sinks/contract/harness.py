"""The interface between the suite and a sink: the harness, which its author writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from outbox_relay.domain.event import StoredEvent
from outbox_relay.sinks import Sink, SinkContext
from outbox_relay.sinks.types import SinkType, sink_type


class Received(NamedTuple):
    """A record that arrived at a destination, in the terms of the event."""

    key: str | None
    uid: str
    payload: bytes
    type: str
    content_type: str
    headers: Mapping[str, str]


class SinkHarness(ABC):
    """A sink and a destination of its own, which is empty and up at first."""

    @abstractmethod
    def make_sink(self) -> Sink:
        """Return a new sink for the destination, not yet open."""

    @abstractmethod
    def received(self) -> Sequence[Received]:
        """Return all that the destination has received, repeated deliveries too; events of one key in their order."""

    @abstractmethod
    def break_destination(self) -> None:
        """Make the destination go down. Events on their way to it are lost."""

    @abstractmethod
    def mend_destination(self) -> None:
        """Bring the destination back, with all that it had received. Called when it is up, too."""

    @abstractmethod
    def poison(self, event: StoredEvent) -> StoredEvent:
        """Return ``event``, changed so that the destination refuses it for good."""


class PluginHarness(SinkHarness):
    """A harness of a plug-in, which is found and guarded as in a relay: install it first, for example with `pip -e`."""

    type: ClassVar[str]
    """The type of the sink: the name of the entry point."""

    @abstractmethod
    def settings(self) -> Mapping[str, object]:
        """Return the table of the sink in the file, without its type."""

    def found(self) -> SinkType:
        """Return the type. Raises ``TypeRefused`` if it does not fit."""
        found = sink_type(self.type)
        assert found is not None, f'no installed package has an entry point "{self.type}" of outbox_relay.sinks'
        return found

    def make_sink(self, replay: int | None = None) -> Sink:
        """Return a new sink for the destination, not yet open; with ``replay`` its client for that."""
        found, slots = self.found(), None if replay is None else 1
        table = {"type": self.type, **self.settings()}
        return found.make(found.settings.model_validate(table), SinkContext("contract", replay, slots))
