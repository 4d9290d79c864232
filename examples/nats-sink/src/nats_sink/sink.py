"""The sink: one event, one message, one acknowledgement of the stream, one verdict."""

# The types of nats-py are partially unknown.
# pyright: reportUnknownMemberType=false

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from nats_sink.message import Message, message
from nats_sink.settings import NatsSettings
from outbox_relay.sinks import (
    DELIVERED,
    Attempt,
    Failed,
    Refused,
    SinkContext,
    StoredEvent,
    Unavailable,
    Verdict,
    lease_clock,
)

CONNECT_SECONDS, CLOSE_SECONDS = 2.0, 1.0
PING_SECONDS = 10
TOO_LARGE = 10054
"""JetStream's error for a message above the `max_msg_size` of its stream."""


T = TypeVar("T")
UNKNOWN = "the connection was lost"
"""The reason until the client names another one."""


class Link:
    """A connection that is never mended: once it is lost, another one is made."""

    def __init__(self) -> None:
        self.client = Client()
        self.lost = asyncio.get_running_loop().create_future()
        self.reason = UNKNOWN

    async def open(self, settings: NatsSettings) -> None:
        """Connect. Raises OSError, TimeoutError or NatsError."""
        password = settings.password
        await self.client.connect(
            servers=[settings.server],
            user=settings.user,
            password=None if password is None else password.get_secret_value(),
            allow_reconnect=False,  # it would send later what it holds
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            ping_interval=PING_SECONDS,
            max_outstanding_pings=1,
            error_cb=self._note,
            closed_cb=self.lose,
        )

    @property
    def is_lost(self) -> bool:
        """True if nothing can be sent. The client says that it is closed before it has called `lose`."""
        return self.lost.done() or self.client.is_closed

    async def close(self) -> None:
        """Close the connection. Nothing is sent over it afterwards."""
        await self.lose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.client.close()

    async def _note(self, error: Exception) -> None:
        self.reason = said(error)

    async def lose(self) -> None:
        """Give up the requests that wait for an acknowledgement."""
        if not self.lost.done():
            self.lost.set_result(None)


class NatsSink:
    """Publishes events to a stream. The relay has at most one event of a key in flight, so keys stay in order.

    The relay calls it in threads, and the client runs in an event loop, in a thread of its own.
    """

    API_VERSION = 1
    Settings = NatsSettings
    keeps_order = False
    max_batch = 1

    def __init__(self, settings: NatsSettings, context: SinkContext) -> None:
        self.max_in_flight = settings.max_in_flight
        self._settings = settings
        self._context = context
        self._host = urlsplit(settings.server).netloc
        self._link: Link | None = None
        self._turn = asyncio.Lock()
        self._loop = asyncio.new_event_loop()

    def open(self) -> None:
        """Start the thread in which the client runs, which is asynchronous."""
        threading.Thread(target=self._loop.run_forever, name="nats", daemon=True).start()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(self._settings.timeout_seconds)

    def deliver(self, events: Sequence[StoredEvent], deadline: float, /) -> Sequence[Verdict]:
        """Publish the event, and wait for the acknowledgement."""
        return [self._run(self._one(event, deadline)) for event in events]

    async def _one(self, event: StoredEvent, deadline: float) -> Verdict:
        try:
            made = message(event, self._context.name, self._settings.subject, self._context.replay)
        except ValueError as error:
            return Refused(str(error))
        try:
            link = await self._linked()
        except (OSError, TimeoutError, NatsError) as error:
            return Unavailable(f"no connection to {self._host}: {said(error)}")
        if made.size > link.client.max_payload:
            return Refused(f"has {made.size} bytes, more than the {link.client.max_payload} that the server accepts")
        if lease_clock() >= deadline:
            return Unavailable("not delivered in time")
        began = time.monotonic()
        try:
            return await self._publish(link, made, 0.9 * self._settings.timeout_seconds)
        except TimeoutError:
            if link.lost.done() or not link.client.is_connected or link.reason != UNKNOWN:
                return Unavailable(f"no acknowledgement of the stream: {link.reason}")
            reason = f"no acknowledgement of the stream: {link.reason}" if link.reason else "no acknowledgement"
            return Failed(reason, attempt=Attempt("timeout", time.monotonic() - began))

    async def _publish(self, link: Link, made: Message, seconds: float) -> Verdict:
        stream = link.client.jetstream().publish(
            made.subject, made.payload, seconds, self._settings.stream, dict[str, Any](made.headers)
        )
        acknowledged = asyncio.ensure_future(stream)
        try:
            await asyncio.wait({acknowledged, link.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not acknowledged.done():
                return Unavailable(f"the connection to {self._host} was lost before the acknowledgement")
            acknowledged.result()
        except NoStreamResponseError:
            return Unavailable(f"no stream takes the subject {made.subject}", part=made.subject)
        except APIError as error:
            return self._judged(error, made.subject)
        except TimeoutError:
            raise
        except (NatsError, OSError) as error:
            return Unavailable(f"no connection to {self._host}: {said(error)}")
        finally:
            acknowledged.cancel()
        return DELIVERED

    def _judged(self, error: APIError, subject: str) -> Verdict:
        """Return the verdict for an error of JetStream."""
        text, status = f"JetStream says: {error.description}", error.code
        if error.err_code == TOO_LARGE:
            return Refused(text, status)
        if status is not None and status >= 500:  # the stream is full, or has no leader
            return Unavailable(text, status)
        return Unavailable(text, status, part=subject)

    async def _linked(self) -> Link:
        """Return the connection, made again if it was lost. Raises as `Link.open`, and TimeoutError."""
        async with self._turn:
            if self._link is None or self._link.is_lost:
                if self._link is not None:
                    await self._link.lose()
                self._link = None
                link = Link()
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        await link.open(self._settings)
                except BaseException:
                    await link.close()
                    raise
                self._link = link
            return self._link

    def check(self) -> str | None:
        """Return why the stream would not take messages, or None."""
        return self._run(self._check())

    async def _check(self) -> str | None:
        try:
            link = await self._linked()
            await link.client.jsm().stream_info(self._settings.stream)
        except NotFoundError:
            return f"there is no stream {self._settings.stream} at {self._host}"
        except (OSError, TimeoutError, NatsError) as error:
            return f"no connection to {self._host}: {said(error)}"
        return None

    def close(self) -> None:
        """Close the connection, and end the thread."""
        if self._link is not None:
            self._run(self._link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


def said(error: BaseException) -> str:
    """Return the text of an error of the client, which holds no secret, or its class."""
    return str(error).removeprefix("nats: ") or type(error).__name__
