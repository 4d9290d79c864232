"""The sink of a plug-in: its class is called in threads of the sink."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.raised import raised
from outbox_relay.sinks.settings import PluginSettings
from outbox_relay.sinks.threads import LATE, Job, ThreadedSink

CODE = "plugin_error"
"""The code of attempts that failed because of the plug-in itself."""
BEHIND = Unavailable("an earlier event of its key was not delivered", behind=True)
CLOSE_SECONDS = 10.0
"""Maximum wait for a plug-in that closes."""


class PluginClass(Protocol):
    """The class that an entry point names."""

    Settings: type[PluginSettings]

    def __call__(self, settings: Any, context: Any, /) -> Any:
        """Return a ``Plugin`` that has not waited for anything."""
        ...


class PluginSink(ThreadedSink[Job]):
    """A sink that calls a plug-in: with ``keeps_order`` one call at a time, otherwise an event in each of its threads.

    A call that raises, is not answered in time, or is answered with anything but verdicts is a failed attempt of its
    event, or, with several events, of none of them: then the relay sends one alone.

    With when_dead = "hold" the relay itself keeps the keys in order, and passes one event in each call.
    """

    job_type = Job

    def __init__(
        self, plugin_class: PluginClass, settings: PluginSettings, context: Any, plugin: str = "the plug-in"
    ) -> None:
        """Make the plug-in. Raises ValueError, without any message of its class, if that raises."""
        super().__init__(context.name, 1, settings.timeout_seconds, of_replay=context.replay is not None)
        self._plugin_name = plugin
        self._make = partial(plugin_class, settings, context)
        try:
            self._plugin: Any = self._make()
            keeps, batch, in_flight = self._plugin.keeps_order, self._plugin.max_batch, self._plugin.max_in_flight
        except (Exception, SystemExit) as error:
            raise ValueError(f"{plugin} cannot be made: {raised(error)}") from None
        if keeps and not (settings.when_dead == "hold" and settings.order == "key"):
            self.keeps_order, self.max_batch = True, batch
        else:
            self.max_in_flight = in_flight if context.slots is None else min(in_flight, context.slots)
        self._opening = threading.Lock()
        self._opened: Any = None
        """The plug-in that was opened last. It may have been closed meanwhile."""

    def run(self, job: Job) -> Sequence[Verdict]:
        """Deliver the events of a call."""
        events, until = job.call.events, min(job.call.until, job.ends_at)
        if (problem := self._unopened()) is not None:
            return [Unavailable(problem)] * len(events)
        if lease_clock() >= until:
            return [LATE] * len(events)
        try:
            verdicts = self._plugin.deliver(list(events), until)
            kinds = Delivered | Failed | Refused | Unavailable
            if len(verdicts) != len(events) or not all(isinstance(each, kinds) for each in verdicts):
                return self._failed(job, f"{self._plugin_name} did not return a verdict for each event", CODE)
        except BaseException as error:  # SystemExit too
            return self._failed(job, f"{self._plugin_name} raised {raised(error)}", CODE)
        return _in_order(events, verdicts) if self.keeps_order else verdicts

    def _unopened(self) -> str | None:
        """Open the plug-in before its first call. Return why that failed, or None."""
        with self._opening:
            if not self._is_open:
                try:
                    self._plugin = plugin = self._plugin or self._make()
                    getattr(plugin, "open", lambda: None)()
                except BaseException as error:
                    return f"{self._plugin_name} cannot be opened: {raised(error)}"
                self._opened = plugin
        return None

    @property
    def _is_open(self) -> bool:
        return self._plugin is not None and self._opened is self._plugin

    def timed_out(self, job: Job) -> Sequence[Verdict]:
        """Return the verdicts of a call that was not answered in time. It may be waiting for the plug-in to open."""
        if not self._is_open:
            return [Unavailable(f"{self._plugin_name} is still being opened")] * len(job.call.events)
        return self._failed(job, f"{self._plugin_name} did not answer within {self.timeout_seconds:g} s", "timeout")

    def _failed(self, job: Job, reason: str, code: str) -> Sequence[Verdict]:
        attempt = Attempt(code, lease_clock() - job.began_at)
        if len(job.call.events) == 1:
            return [Failed(reason, attempt=attempt)]
        return [Unavailable(reason, attempt=attempt)] * len(job.call.events)

    def check(self) -> str | None:
        """Return what the plug-in finds, or why it finds nothing."""
        if (problem := self._unopened()) is not None:
            return problem
        try:
            return getattr(self._plugin, "check", lambda: None)()
        except BaseException as error:
            return f"{self._plugin_name} raised {raised(error)} in check"

    def close(self) -> None:
        """End the threads, and close the plug-in. Another one is made if the sink is used again."""
        super().close()
        plugin, self._plugin, self._opened = self._plugin, None, None

        def close() -> None:
            with contextlib.suppress(BaseException):  # nothing of it is used any more
                getattr(plugin, "close", lambda: None)()

        closing = threading.Thread(target=close, name=f"close {self._name}", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _in_order(events: Sequence[StoredEvent], verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
    """Count no event as delivered behind an undelivered one of its key: it is sent again behind that one."""
    found, stopped = list(verdicts), set[str]()
    for index, (event, verdict) in enumerate(zip(events, verdicts, strict=True)):
        if event.key in stopped and isinstance(verdict, Delivered):
            found[index] = BEHIND
        elif event.key is not None and isinstance(verdict, Failed | Unavailable):
            stopped.add(event.key)
    return found
