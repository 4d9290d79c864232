"""Python sinks without a relay."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks import Call
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.posting import EventLoopThread
from outbox_relay.sinks.python import PythonSink
from tests.support.wait import until

SECONDS = 30.0


@dataclass
class RunningSink:
    """An open sink, and the calls that have ended."""

    sink: PythonSink
    _ended: set[Call] = field(default_factory=set[Call])

    def begin(self, event: StoredEvent | str, *, seconds: float = 60.0) -> Call:
        """Hand an event over, or a new one with this payload."""
        event = an_event(None, event.encode()) if isinstance(event, str) else event
        self.sink.submit(call := Call([event], lease_clock() + seconds))
        return call

    def end(self, *calls: Call) -> list[Verdict]:
        """Return the verdicts of calls, once they have ended."""

        def ended() -> bool:
            self._ended.update(self.sink.completed(0.0 if self._ended.issuperset(calls) else 1.0))
            return self._ended.issuperset(calls)

        until(ended, seconds=SECONDS, what="the calls end")
        return [DELIVERED if call.verdicts is None else call.verdicts[0] for call in calls]

    def deliver(self, event: StoredEvent | str, *, seconds: float = 60.0) -> Verdict:
        """Return the verdict of an event, or of a new one with this payload."""
        return self.end(self.begin(event, seconds=seconds))[0]

    def redeliver(self, event: StoredEvent) -> Verdict:
        """Deliver an event repeatedly, while no attempt is counted."""
        while isinstance(verdict := self.deliver(event), Unavailable):
            pass
        return verdict


@contextmanager
def python_sink(handler: str, **options: Any) -> Generator[RunningSink]:
    """Open a sink for a handler of ``tests.support.odd_handlers``, and close it after the block."""
    options = {"max_in_flight": 8, "timeout_seconds": 10.0, "posting": EventLoopThread(), **options}
    name = handler if ":" in handler else f"tests.support.odd_handlers:{handler}"
    running = RunningSink(PythonSink("test", name, **options))
    running.sink.open()
    try:
        yield running
    finally:
        with suppress(SessionReset):
            running.sink.withdraw()
        running.sink.close()
        options["posting"].stop()
