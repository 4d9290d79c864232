"""The guard around a plug-in: the `Sink` that the relay sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, cast

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.file_reading import while_reading
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Delivered, Unavailable, Verdict
from outbox_relay.raised import raised
from outbox_relay.sinks import Plugin, PluginSettings, SinkContext
from outbox_relay.sinks.plugin.answers import CODE, failed, in_order, read_verdicts, with_details
from outbox_relay.sinks.plugin.loop_thread import LoopThread, PluginCall, Raised, Returned
from outbox_relay.sinks.plugin.redaction import own_texts, without

CHECK_SECONDS = 15.0
"""Longest wait for ``check``."""
CANCEL_SECONDS = 1.0
"""Longest wait for the end of a call that was cancelled."""
RESET_SECONDS, CLOSE_SECONDS = 5.0, 5.0
"""Longest waits for ``reset`` and for ``close``."""
MOST_IN_FLIGHT, MOST_IN_BATCH = 4096, 10_000
"""Limits of what a plug-in may say of itself."""


class PluginClass(Protocol):
    """The class that an entry point names."""

    Settings: type[PluginSettings]

    def __call__(self, settings: Any, context: SinkContext, /) -> Plugin:
        """Return a sink that has not waited for anything."""
        ...


class PluginSink:
    """A sink that calls a plug-in in a thread of its own, with a limit for every wait.

    A call that raises, is not answered in time, or is answered with anything but verdicts is a failure of its event,
    or, with several events, of none of them: then the relay sends one alone. While a call does not end although it was
    cancelled, nothing is sent: it would run beside its own repetition.

    With when_dead = "hold" the relay itself keeps the keys in order, and passes one event in each call.
    """

    def __init__(
        self, plugin_class: PluginClass, settings: PluginSettings, context: SinkContext, plugin: str = "the plug-in"
    ) -> None:
        """Make the plug-in. Raises ValueError, without any secret, if its class raises or has odd properties."""
        self.timeout_seconds = settings.timeout_seconds
        self._name = context.name
        self._plugin_name = plugin
        self._texts = own_texts(settings)
        self._make = partial(plugin_class, settings, context)
        self._details = settings.record_attempts == "all"
        self._ordered = settings.order == "key"
        self._plugin: Plugin | None = self._made()
        self.keeps_order, self.max_batch, self.max_in_flight = self._properties(self._plugin)
        if not self.keeps_order or (settings.when_dead == "hold" and self._ordered):
            self.keeps_order, self.max_batch = False, 1
        if context.slots is not None and not self.keeps_order:
            self.max_in_flight = min(self.max_in_flight, context.slots)
        self._thread: LoopThread | None = None
        self._opening: PluginCall | None = None
        self._calls: set[PluginCall] = set()
        self._abandoned: set[PluginCall] = set()
        self._resets = 0
        self._closed = True
        self._problem: str | None = None
        self._begin_lock = asyncio.Lock()
        """Makes calls begin in order: one that finds the plug-in open must not overtake one that waited for it."""

    def __repr__(self) -> str:
        return f"PluginSink({self._name!r})"

    @property
    def trouble(self) -> str | None:
        """Return why the plug-in cannot be called, or None."""
        return self._problem or self._stuck()

    # -- its life ---------------------------------------------------------------------------------------------

    def _made(self) -> Plugin:
        try:
            with while_reading(self._plugin_name):
                return self._make()
        except (Exception, SystemExit) as error:
            said = without(str(error), self._texts) if isinstance(error, ValueError) else ""
            text = f"{self._plugin_name} cannot be made: {raised(error)}{': ' if said else ''}{said}"
            raise ValueError(text) from None

    def _properties(self, plugin: Plugin) -> tuple[bool, int, int]:
        """Return ``keeps_order``, ``max_batch`` and ``max_in_flight``. Raises ValueError if they are odd."""
        try:
            keeps, batch, in_flight = plugin.keeps_order, plugin.max_batch, plugin.max_in_flight
        except Exception as error:
            missing = "keeps_order, max_batch or max_in_flight"
            raise ValueError(f"{self._plugin_name} does not fit: {missing} raised {raised(error)}") from None
        if type(keeps) is not bool:
            raise ValueError(f"{self._plugin_name} does not fit: keeps_order is neither True nor False")
        for name, value, most in (("max_batch", batch, MOST_IN_BATCH), ("max_in_flight", in_flight, MOST_IN_FLIGHT)):
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{self._plugin_name} does not fit: {name} is no number of 1 to {most}")
        return keeps, batch, in_flight

    async def open(self) -> None:
        """Start the thread, and begin to open the plug-in. Waits for nothing and never raises."""
        self._closed = False
        self._start()

    def _start(self) -> PluginCall | None:
        """Return the call that opens the plug-in, begun if need be, or None with the ``_problem``."""
        try:
            plugin = self._plugin = self._plugin or self._made()
            self._thread = self._thread or LoopThread(f"plug-in {self._name}")
        except ValueError as error:
            self._problem = str(error)
        except (RuntimeError, OSError) as error:  # no thread, or no descriptors for its loop
            self._problem = f"{self._plugin_name} has no thread: {type(error).__name__}"
        else:
            self._opening = self._opening or self._thread.call(getattr(plugin, "open", _no_opening))
            return self._opening
        return None

    async def _unopened(self, seconds: float) -> str | None:
        """Wait until the plug-in is open. Return why it is not after ``seconds``, or None."""
        if self._closed:
            return "the sink is closed"
        if (opening := self._start()) is None:
            return self._problem
        match opening.ended.result() if opening.ended.done() else await opening.wait(seconds):
            case Returned():
                self._problem = None
                return None
            case Raised(text):
                self._problem = f"{self._plugin_name} cannot be opened: {text}"
            case None:
                await self._abandon(opening)
                self._problem = f"{self._plugin_name} was not opened within {seconds:.3g} s"
        if self._opening is opening:
            self._opening = None
        return self._problem

    async def _abandon(self, call: PluginCall) -> Raised | Returned | None:
        """Cancel the call. Return its ending, or None if it does not end: then nothing is sent until it does."""
        call.cancel()
        try:
            return await call.wait(CANCEL_SECONDS)
        finally:
            if not call.ended.done():
                self._abandoned.add(call)

    # -- deliveries -------------------------------------------------------------------------------------------

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver as ``Sink.deliver`` specifies, whatever the plug-in does."""
        if not batch:
            return []
        latest = min(lease_clock() + self.timeout_seconds, until)
        async with self._begin_lock if self.keeps_order else nullcontext():
            call = await self._begun(batch, latest, until, attempt)
        if isinstance(call, str):
            return [Unavailable(call)] * len(batch)
        return await self._answer(call, batch, attempt)

    async def _begun(self, batch: Sequence[StoredEvent], latest: float, until: float, attempt: int) -> PluginCall | str:
        """Return the call that delivers ``batch``, begun before ``latest`` and ``until``, or why it is not."""
        late = "not delivered in time"
        left = latest - lease_clock()
        reason = self._stuck() or (late if left <= 0 else await self._unopened(left))
        if reason is None and lease_clock() >= until:
            reason = late
        plugin, thread = self._plugin, self._thread
        if reason is not None or plugin is None or thread is None:
            return reason or "the sink is closed"
        return thread.call(lambda: plugin.deliver(list(batch), until, attempt))

    async def _answer(self, call: PluginCall, batch: Sequence[StoredEvent], attempt: int) -> Sequence[Verdict]:
        resets, began = self._resets, time.monotonic()
        self._calls.add(call)
        try:
            ending = await call.wait(self.timeout_seconds)
            if ending is None:
                verdicts = await self._timed_out(call, batch)
            else:
                verdicts = self._verdicts(ending, batch, time.monotonic() - began)
        finally:
            if not call.ended.done():
                call.cancel()
                self._abandoned.add(call)
            self._calls.discard(call)
        if resets != self._resets:
            reset = Unavailable("the sink was reset")
            verdicts = [verdict if isinstance(verdict, Delivered) else reset for verdict in verdicts]
        if self._ordered and self.keeps_order:
            verdicts = in_order(batch, verdicts)
        if self._details or attempt:
            return [with_details(verdict, time.monotonic() - began) for verdict in verdicts]
        return verdicts

    def _verdicts(self, ending: Raised | Returned, batch: Sequence[StoredEvent], seconds: float) -> list[Verdict]:
        if isinstance(ending, Raised):
            return failed(batch, f"{self._plugin_name} raised {ending.text}", CODE, seconds)
        try:
            verdicts = read_verdicts(ending.value, batch, self._texts)
        except Exception as error:  # odd values in odd verdicts
            verdicts = f"returned verdicts that cannot be read: {raised(error)}"
        if isinstance(verdicts, str):
            return failed(batch, f"{self._plugin_name} {verdicts}", CODE, seconds)
        return verdicts

    async def _timed_out(self, call: PluginCall, batch: Sequence[StoredEvent]) -> list[Verdict]:
        """Cancel the call. It counts as an attempt, unless another call of this sink keeps the thread busy."""
        guilty = next((each for each in self._calls if each.runs_now), None)
        ending, seconds = await self._abandon(call), time.monotonic() - call.began
        if isinstance(ending, Returned):
            return self._verdicts(ending, batch, seconds)
        if guilty is not None and guilty is not call:
            reason = f"{self._plugin_name} was blocked by the delivery of another event"
            return [Unavailable(reason, behind=len(batch) == 1)] * len(batch)
        reason = f"{self._plugin_name} did not answer within {self.timeout_seconds:g} s"
        return failed(batch, reason, "timeout", seconds)

    def _stuck(self) -> str | None:
        """Return why nothing may be sent, while a call does not end although it was cancelled."""
        self._abandoned = {call for call in self._abandoned if not call.ended.done()}
        if not self._abandoned:
            return None
        seconds = time.monotonic() - min(call.began for call in self._abandoned)
        return f"{self._plugin_name} does not end a call that began {seconds:.0f} s ago and was cancelled"

    async def reset(self) -> None:
        """End all calls, and reset the plug-in. Calls that do not end keep the sink from sending."""
        self._resets += 1
        await self._end_calls()
        if self._thread is not None and self._plugin is not None:
            await self._bounded(self._plugin.reset, RESET_SECONDS)

    async def _end_calls(self) -> None:
        calls = [*self._calls, *self._abandoned]
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.gather(*(call.wait(CANCEL_SECONDS) for call in calls))

    async def _bounded(self, function: Callable[[], Awaitable[object]], seconds: float) -> Raised | Returned | None:
        """Call ``function`` in the thread, and return its ending, or None if it has none in time."""
        if self._thread is None:
            return None
        call = self._thread.call(function)
        try:
            ending = await call.wait(seconds)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if ending is None:
            await self._abandon(call)
        return ending

    async def check(self) -> str | None:
        """Return what the plug-in finds, or why it finds nothing."""
        if (reason := self._stuck() or await self._unopened(CHECK_SECONDS)) is not None:
            return reason
        match await self._bounded(cast("Plugin", self._plugin).check, CHECK_SECONDS):
            case None:
                return f"{self._plugin_name} did not check its destination within {CHECK_SECONDS:g} s"
            case Raised(text):
                return f"{self._plugin_name} raised {text} in check"
            case Returned(None):
                return None
            case Returned(str(text)):
                return without(text, self._texts) or f"{self._plugin_name} found a problem without a name"
            case Returned():
                return f"{self._plugin_name} returned neither a text nor None from check"

    async def close(self) -> None:
        """Close the plug-in and end its thread. A thread that does not end is left, and ends with the process."""
        self._resets += 1
        self._closed = True
        thread, plugin = self._thread, self._plugin
        self._opening = self._thread = self._plugin = None
        if thread is None:
            return
        await self._end_calls()
        if plugin is not None:
            call = thread.call(plugin.close)
            await call.wait(CLOSE_SECONDS)
        if await thread.stop():
            self._abandoned.clear()


async def _no_opening() -> None:
    """Open a plug-in that has no method for it."""
