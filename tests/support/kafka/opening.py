"""Kafka sinks that a test opens and that are closed at its end."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.kafka import KafkaSink

S = TypeVar("S", bound=KafkaSink)


@contextlib.asynccontextmanager
async def opening(kind: type[S], stall_seconds: float) -> AsyncGenerator[Callable[..., Awaitable[S]]]:
    """Yield a function that opens a sink, given a topic template and settings of the producer.

    Further arguments by name go to `kind`. The sinks are closed at the end.
    """
    async with contextlib.AsyncExitStack() as opened:

        async def open_sink(template: str, producer: Mapping[str, str | int], **more: Any) -> S:
            sink = kind("events", TopicTemplate.parse(template), producer, stall_seconds, **more)
            await sink.open()
            opened.push_async_callback(sink.close)
            return sink

        yield open_sink
