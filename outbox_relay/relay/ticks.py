"""The looks of all loops of a process: their pace, what they share, and the wake-up of loops that rest.

A loop looks itself while events flow for it: a tick and the window up to it in one round trip. All loops together look
once in ``PACE_SECONDS``, so each of n busy sinks looks n times less often; each tick is published to all, and what one
has read is kept for those that stand at the same place. While every loop rests, a thread waits for a notification.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Histogram
from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RelayError
from outbox_relay.domain.event import StoredEvent, memory_bytes
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.window import nothing_new
from outbox_relay.postgres.log import TickResult
from outbox_relay.relay.measures import RelayMeasures

PACE_SECONDS = 0.002
"""Time from one look to the next, from start to start."""
SLEEP_SECONDS = 0.25
"""Maximum sleep, and so the cost of a wake-up that was missed."""
POLL_FIRST_SECONDS = 0.005
"""First sleep where no wake-up can come. It is doubled each time, up to ``SLEEP_SECONDS``."""
QUIET_SECONDS = 0.02
"""Time without a look of any loop after which the thread takes ticks for those that rest."""
SHARED_BYTES = 32 << 20
"""Maximum size of the reads that are kept for other loops."""
EVENT_BYTES = 500
"""Size in memory of an event without payload, key and headers."""
READ_SECONDS = 2.0
"""Maximum wait for the same read of another loop."""


class Listener(Protocol):
    """The connection on which emits wake an idle relay."""

    def begin_listening(self) -> bool:
        """Take the lock of idle relays. Return False if no notification can end the next ``sleep``."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Wait for a notification, for at most ``seconds``; return whether one arrived."""
        ...

    def stop_listening(self) -> None:
        """Give the lock back."""
        ...

    def close(self) -> None:
        """Close the connection, which gives the lock back, and make no other."""
        ...


class Ticks:
    """The looks of all loops of a process, and the ticks while they rest. ``tick`` takes one."""

    def __init__(
        self,
        tick: Callable[[], TickResult],
        listener: Listener,
        log: BoundLogger,
        clock: Callable[[], float] = time.monotonic,
        durations: Histogram | None = None,
        longest: float = float("inf"),
    ) -> None:
        self._tick = tick
        self._longest = longest
        """Seconds that a tick may take. A slower one may be of another server, which a pooling proxy has hidden."""
        self._clock = clock
        self._listener = listener
        self._log = RateLimitedLog(log)
        self._lock = threading.Lock()
        self._due = 0.0
        self._loops: dict[object, tuple[Callable[[], None], TickResult]] = {}
        """The loops that are to be told of a tick that shows more, with what wakes them and the last tick of each."""
        self._resting: set[object] = set()
        """Those of them that do not look themselves."""
        self._newest: TickResult | None = None
        self._rests = threading.Event()
        self._stopping = False
        self._durations = durations or RelayMeasures().tick
        self.reads = SharedReads()
        self._looked_at = float("-inf")
        self.seen_at = clock()
        """The time of the last tick of any thread."""

    def pace(self, now: float) -> float:
        """Return when the calling loop, which has just looked, may look again."""
        with self._lock:
            self._due = max(self._due, now) + PACE_SECONDS
            return self._due

    def newer(self, than: TickResult) -> TickResult | None:
        """Return the newest tick of any thread if it shows more than ``than``, of the same server.

        None if there is one loop: its own look costs no more than the read of a window that came without a tick.
        """
        return self._newest if len(self.reads.loops) > 1 and self._shows_more(than) else None

    def _shows_more(self, than: TickResult) -> bool:
        return self._newest is not None and _follows(self._newest, than) and _is_news(self._newest, than)

    def publish(self, result: TickResult, seconds: float) -> None:
        """Wake the loops for which ``result`` may have news, a tick of another loop that took ``seconds``."""
        self._durations.observe(seconds)
        self._looked_at = self._clock()
        self._tell(result)

    def _tell(self, result: TickResult) -> bool:
        """Wake the loops for which ``result`` may have news. Return True if there were any."""
        self.seen_at = self._clock()
        with self._lock:
            newest = self._newest
            if newest is None or result.incarnation != newest.incarnation or _follows(result, newest):
                self._newest = result
            news = [loop for loop, (_, before) in self._loops.items() if _is_news(result, before)]
            woken = [self._loops.pop(loop)[0] for loop in news]
            self._resting.difference_update(news)
            if woken:  # they take this tick, and the times of their next looks are set again
                self._due = 0.0
        for wake in woken:
            wake()
        return bool(woken)

    def expect(self, loop: object, wake: Callable[[], None], result: TickResult, *, rests: bool) -> None:
        """Call ``wake``, once, when a tick shows more than ``result``, the last one of ``loop``.

        A loop that ``rests`` does not look itself.
        """
        with self._lock:
            self.reads.loops.add(loop)
            is_there = self._shows_more(result)
            if not is_there:
                self._loops[loop] = (wake, result)
                (self._resting.add if rests else self._resting.discard)(loop)
        if is_there:
            wake()
        elif rests:
            self._rests.set()

    def forget(self, loop: object) -> None:
        """Wake ``loop`` no more, which has ended."""
        with self._lock:
            self._loops.pop(loop, None)
            self._resting.discard(loop)
            self.reads.loops.discard(loop)
        self.reads.clear()  # events may be erased before the next session of the loop reads them again

    def poll(self) -> bool:
        """Take a tick, and wake the loops for which it may have news. Return True if there were any."""
        began = self._clock()
        result = self._tick()
        seconds = self._clock() - began
        self._durations.observe(seconds)
        return seconds <= self._longest and self._tell(result)

    # -- the thread ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End ``run``."""
        self._stopping = True
        self._rests.set()

    def run(self) -> None:
        """Take ticks while loops rest and none looks, until ``stop``."""
        poll, listening = POLL_FIRST_SECONDS, False
        while not self._stopping:
            if not self._resting or self._clock() - self._looked_at < QUIET_SECONDS:
                if listening:  # emits would send notifications for nothing
                    self._listener.stop_listening()
                    listening = False
                self._rests.clear()
                self._rests.wait(QUIET_SECONDS if self._resting else SLEEP_SECONDS)
                poll = POLL_FIRST_SECONDS
                continue
            try:
                listening = self._listener.begin_listening()
                if self.poll():
                    continue
            except RelayError as error:
                self._log.warning("database.tick_failed", reason=str(error))
                listening = False
            if listening:
                self._listener.sleep(SLEEP_SECONDS)
            else:
                time.sleep(poll)
                poll = min(poll * 2, SLEEP_SECONDS)
        self._listener.close()


@dataclass(slots=True)
class _Read:
    """A read of one loop, which others wait for. ``events`` is None until it has succeeded."""

    events: Sequence[StoredEvent] | None = None
    size: int = 0
    over: threading.Event = field(default_factory=threading.Event)


class SharedReads:
    """The last reads of all loops. A loop that asks for the same part of the same window gets the same events.

    What a window has between two ticks never changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: OrderedDict[Hashable, _Read] = OrderedDict()
        self._size = 0
        self.loops: set[object] = set()
        """The loops that read. While there is one, nothing is kept."""

    def get(self, key: Hashable, ask: Callable[[], list[StoredEvent]]) -> list[StoredEvent]:
        """Return the events of the read ``key``, those of another loop or the answer of ``ask``. Raises as ``ask``."""
        if len(self.loops) < 2:
            return ask()
        with self._lock:
            read, is_mine = self._reads.get(key), False
            if read is None:
                read = self._reads[key] = _Read()
                is_mine = True
            else:
                self._reads.move_to_end(key)
        if not is_mine and read.over.wait(READ_SECONDS) and read.events is not None:
            return list(read.events)
        try:
            events = ask()
            if is_mine:
                self._keep(key, read, tuple(events))
        except BaseException:
            if is_mine:
                with self._lock:
                    if self._reads.get(key) is read:
                        del self._reads[key]
            raise
        finally:
            if is_mine:
                read.over.set()
        return events

    def put(self, key: Hashable, events: Sequence[StoredEvent]) -> None:
        """Keep the events of the read ``key`` for other loops."""
        if len(self.loops) > 1:
            read = _Read()
            read.over.set()
            with self._lock:
                is_first = self._reads.setdefault(key, read) is read
            if is_first:
                self._keep(key, read, tuple(events))

    def find(self, key: Hashable) -> list[StoredEvent] | None:
        """Return the events of the read ``key`` if another loop has made it."""
        read = self._reads.get(key)
        return None if read is None or read.events is None else list(read.events)

    def clear(self) -> None:
        """Forget all reads."""
        with self._lock:
            self._reads.clear()
            self._size = 0

    def _keep(self, key: Hashable, read: _Read, events: Sequence[StoredEvent]) -> None:
        size = memory_bytes(events) + EVENT_BYTES * (1 + len(events))
        with self._lock:
            read.events = events
            if self._reads.get(key) is not read:
                return
            read.size = size
            self._size += size
            while self._size > SHARED_BYTES:
                _, oldest = self._reads.popitem(last=False)
                self._size -= oldest.size


def _is_news(result: TickResult, before: TickResult) -> bool:
    return (
        result.config_versions != before.config_versions
        or result.incarnation != before.incarnation
        or not nothing_new(before.tick, result.tick)
    )


def _follows(result: TickResult, before: TickResult) -> bool:
    """Return True if ``result`` is a tick of the same server that is not older."""
    return (
        result.incarnation == before.incarnation
        and result.tick.seq >= before.tick.seq
        and result.tick.next_xid >= before.tick.next_xid
    )
