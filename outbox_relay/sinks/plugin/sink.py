"""The sink of a plug-in: its class is called in threads, and its verdicts are checked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.raised import raised
from outbox_relay.sinks.plugin.redaction import of_event, own_texts, without
from outbox_relay.sinks.settings import PluginSettings
from outbox_relay.sinks.threads import LATE, Job, ThreadedSink

CODE = "plugin_error"
"""The code of attempts that failed because of the plug-in itself."""
BEHIND = Unavailable("an earlier event of its key was not delivered", behind=True)
CLOSE_SECONDS = 10.0
"""Maximum wait for a plug-in that closes."""
MOST_IN_FLIGHT, MOST_IN_BATCH = 4096, 10_000
"""Limits of what a plug-in may say of itself."""


class PluginClass(Protocol):
    """The class that an entry point names."""

    Settings: type[PluginSettings]

    def __call__(self, settings: Any, context: Any, /) -> Any:
        """Return a ``Plugin`` that has not waited for anything."""
        ...


class PluginSink(ThreadedSink):
    """A sink that calls a plug-in: with ``keeps_order`` one call at a time, otherwise an event in each of its threads.

    A call that raises, is not answered in time, or is answered with anything but verdicts is a failed attempt of its
    event, or, with several events, of none of them: then the relay sends one alone.

    With when_dead = "hold" the relay itself keeps the keys in order, and passes one event in each call.
    """

    def __init__(
        self, plugin_class: PluginClass, settings: PluginSettings, context: Any, plugin: str = "the plug-in"
    ) -> None:
        """Make the plug-in. Raises ValueError, without any secret, if its class raises or has odd properties."""
        super().__init__(context.name, 1, settings.timeout_seconds, of_replay=context.replay is not None)
        self._plugin_name = plugin
        self._texts = own_texts(settings)
        self._make = partial(plugin_class, settings, context)
        self._plugin: Any = self._made()
        keeps, batch, in_flight = self._properties()
        if keeps and not (settings.when_dead == "hold" and settings.order == "key"):
            self.keeps_order, self.max_batch = True, batch
        else:
            self.max_in_flight = in_flight if context.slots is None else min(in_flight, context.slots)
        self._opening = threading.Lock()
        self._opened: Any = None
        """The plug-in that was opened last. It may have been closed meanwhile."""

    def _made(self) -> Any:
        try:
            return self._make()
        except (Exception, SystemExit) as error:
            message = without(str(error), self._texts) if isinstance(error, ValueError) else ""
            text = f"{self._plugin_name} cannot be made: {raised(error)}{': ' if message else ''}{message}"
            raise ValueError(text) from None

    def _properties(self) -> tuple[bool, int, int]:
        """Return ``keeps_order``, ``max_batch`` and ``max_in_flight``. Raises ValueError if they are odd."""
        try:
            keeps, batch, in_flight = self._plugin.keeps_order, self._plugin.max_batch, self._plugin.max_in_flight
        except Exception as error:
            missing = "keeps_order, max_batch or max_in_flight"
            raise ValueError(f"{self._plugin_name} does not fit: {missing} raised {raised(error)}") from None
        if type(keeps) is not bool:
            raise ValueError(f"{self._plugin_name} does not fit: keeps_order is neither True nor False")
        for name, value, most in (("max_batch", batch, MOST_IN_BATCH), ("max_in_flight", in_flight, MOST_IN_FLIGHT)):
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{self._plugin_name} does not fit: {name} is no number of 1 to {most}")
        return keeps, batch, in_flight

    # -- deliveries -------------------------------------------------------------------------------------------

    def run(self, job: Job) -> Sequence[Verdict]:
        """Deliver the events of a call, and check the verdicts."""
        events = job.call.events
        if (problem := self._unopened()) is not None:
            return [Unavailable(problem)] * len(events)
        if lease_clock() >= min(job.call.until, job.ends_at):
            return [LATE] * len(events)
        try:
            answer = self._plugin.deliver(list(events), min(job.call.until, job.ends_at))
        except BaseException as error:  # SystemExit too
            return self._failed(job, f"{self._plugin_name} raised {raised(error)}", CODE)
        try:
            verdicts = self._read(answer, events)
        except Exception as error:  # odd values in odd verdicts
            verdicts = f"returned verdicts that cannot be read: {raised(error)}"
        if isinstance(verdicts, str):
            return self._failed(job, f"{self._plugin_name} {verdicts}", CODE)
        return _in_order(events, verdicts) if self.keeps_order else verdicts

    def _unopened(self) -> str | None:
        """Open the plug-in before its first call. Return why that failed, or None."""
        with self._opening:
            if not self._is_open:
                plugin = self._plugin
                try:
                    self._plugin = plugin = plugin or self._made()
                    getattr(plugin, "open", lambda: None)()
                except BaseException as error:
                    return f"{self._plugin_name} cannot be opened: {raised(error)}" if plugin else str(error)
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

    def _read(self, answer: object, events: Sequence[StoredEvent]) -> Sequence[Verdict] | str:
        """Return the verdicts in the answer, or what is wrong with it."""
        if not isinstance(answer, list | tuple):
            return f"returned {_named(answer)} in place of a list of verdicts"
        verdicts = cast("Sequence[object]", answer)
        if len(verdicts) != len(events):
            return f"returned {len(verdicts)} verdicts for {len(events)} {'event' if len(events) == 1 else 'events'}"
        found: list[Verdict] = []
        for event, verdict in zip(events, verdicts, strict=True):
            if not isinstance(verdict, Delivered | Failed | Refused | Unavailable):
                return f"returned {_named(verdict)} in place of a verdict"
            hide = partial(without, hidden=self._texts, personal=of_event(event))
            found.append(DELIVERED if verdict is DELIVERED else _storable(verdict, hide))
        return found

    # -- the rest ---------------------------------------------------------------------------------------------

    def check(self) -> str | None:
        """Return what the plug-in finds, or why it finds nothing."""
        if (problem := self._unopened()) is not None or not hasattr(self._plugin, "check"):
            return problem
        try:
            found: object = self._plugin.check()
        except BaseException as error:
            return f"{self._plugin_name} raised {raised(error)} in check"
        if found is None:
            return None
        if not isinstance(found, str):
            return f"{self._plugin_name} returned neither a text nor None from check"
        return without(found, self._texts) or f"{self._plugin_name} found a problem without a name"

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


def _named(value: object) -> str:
    return "None" if value is None else f"a value of the class {type(value).__name__}"


def _storable(verdict: Verdict, hide: Callable[[str], str]) -> Verdict:
    """Return the verdict without secrets, and without numbers that cannot be stored. Raises if a text is none."""
    status = verdict.status if type(verdict.status) is int and 0 <= verdict.status <= 999 else None  # as in HTTP
    if isinstance(verdict, Delivered):
        detail = {
            hide(name): value if type(value) is int else hide(str(value))
            for name, value in (verdict.detail or {}).items()
        }
        return Delivered(status, _seconds(verdict.seconds), detail or None)
    tried = verdict.attempt
    attempt = tried and Attempt(hide(tried.code), _seconds(tried.seconds), tried.answer and hide(tried.answer))
    match verdict:
        case Failed():
            return Failed(hide(verdict.reason), status, _seconds(verdict.retry_after_seconds), attempt)
        case Refused():
            return Refused(hide(verdict.reason), status, attempt)
        case Unavailable():
            return replace(
                verdict,
                reason=hide(verdict.reason),
                status=status,
                retry_after_seconds=_seconds(verdict.retry_after_seconds),
                attempt=attempt,
                part=verdict.part and hide(verdict.part),
            )


def _seconds(value: float | None) -> float | None:
    return value if value is not None and 0 <= value < 1e9 else None
