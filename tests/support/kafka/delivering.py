"""Events that a test hands to a Kafka sink, whose calls it takes as a loop does."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.calls import Call, Sink
from outbox_relay.sinks.contract.handing import hand_over_all, soon
from outbox_relay.sinks.kafka import KafkaSink

S = TypeVar("S", bound=KafkaSink)

SECONDS = 60.0


def submit(sink: Sink, events: Sequence[StoredEvent], until: float | None = None, attempt: int = 0) -> Call:
    """Begin a call."""
    call = Call(events, soon() if until is None else until, attempt)
    sink.submit(call)
    return call


def finish(sink: Sink, *calls: Call, seconds: float = SECONDS) -> list[list[Any]]:
    """Take `calls`, which are all that are open, and return the verdicts of each. They end in their order."""
    ended, deadline = list[Call](), time.monotonic() + seconds
    while len(ended) < len(calls):
        assert time.monotonic() < deadline, f"{len(calls) - len(ended)} calls have not ended"
        ended += sink.completed(0.2)
    assert ended == list(calls)
    return [[DELIVERED] * len(call.events) if call.verdicts is None else list(call.verdicts) for call in calls]


def deliver(
    sink: Sink, events: Sequence[StoredEvent], until: float | None = None, attempt: int = 0, seconds: float = SECONDS
) -> list[Any]:
    """Deliver events with one call, and return their verdicts."""
    return finish(sink, submit(sink, events, until, attempt), seconds=seconds)[0]


@contextlib.contextmanager
def relaying(sink: Sink, events: Sequence[StoredEvent]) -> Generator[None]:
    """Deliver all events in a thread, as often as it needs, and wait for its end."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(hand_over_all, sink, events, 1_000)
        yield
        done.result(3 * SECONDS)


@contextlib.contextmanager
def opening(stall_seconds: float, kind: type[S]) -> Generator[Callable[..., S]]:
    """Yield a function that opens a sink, given a topic template and settings of the producer.

    Further arguments by name go to the sink. The sinks are closed at the end.
    """
    with contextlib.ExitStack() as opened:

        def open_sink(template: str, producer: Mapping[str, str | int], **more: Any) -> S:
            sink = kind("events", TopicTemplate.parse(template), producer, stall_seconds, **more)
            sink.open()
            opened.callback(sink.close)
            return sink

        yield open_sink
