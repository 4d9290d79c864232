"""The receiver: a server in a thread with an event loop of its own, told by coroutine functions how to behave."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from weakref import WeakSet

from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.support.listening import cancel_others, refuse_more, settle
from tests.support.receiver.answers import Behaviour, say
from tests.support.receiver.request import HEAD_BYTES, Request, read_body, read_head
from tests.support.receiver.signatures import SECRET, problem

START_SECONDS = 10
BACKLOG = 1024
GONE = (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, TimeoutError)
"""The errors of a client that leaves early; any other is an error of the receiver itself."""


async def _go_on(_request: Request, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Do nothing."""


class Receiver:
    """An HTTP/1.1 server on the loopback address, for use with `with`.

    `answer` is asked for every request after its body, `at_head` between head and body, `at_accept` when the
    connection (with TLS: the handshake) is made. All three may be changed at any time. Requests are recorded in
    `requests` as they arrive, before they are answered; what does not verify against `secrets` says so in its
    `problem`. Without secrets nothing is verified.
    """

    def __init__(
        self,
        answer: Behaviour | None = None,
        *,
        at_accept: Behaviour = _go_on,
        at_head: Behaviour = _go_on,
        tls: ssl.SSLContext | None = None,
        secrets: Sequence[str] = (SECRET,),
        host: str = LOOPBACK,
        port: int = 0,
    ) -> None:
        self.answer: Behaviour = answer or say(200)
        self.at_accept = at_accept
        self.at_head = at_head
        self.secrets = tuple(secrets)
        self.requests: list[Request] = []
        self.connections = 0
        """Connections accepted so far; with TLS, those whose handshake succeeded."""
        self.host = host
        self.port = port
        self._tls = tls
        self._open: set[asyncio.Task[None]] = set()
        self._writers: WeakSet[asyncio.StreamWriter] = WeakSet()
        """Those that are not gone yet: over TLS, closing takes a while."""
        self._broken: list[BaseException] = []
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    @property
    def url(self) -> str:
        """The URL at which it listens, with a path."""
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}/hooks"

    def url_of(self, name: str) -> str:
        """Return the URL with another host name."""
        return self.url.replace(self.host, name)

    @property
    def uids(self) -> list[str]:
        """The webhook-id of every request so far, in order of arrival."""
        return [request.uid for request in list(self.requests)]

    @property
    def unverified(self) -> list[Request]:
        """The requests whose signature did not verify."""
        return [request for request in list(self.requests) if request.problem is not None]

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._open)

    def start(self) -> Self:
        """Listen."""
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise TimeoutError(f"the receiver did not start within {START_SECONDS} s")
        self._raise()
        return self

    def stop(self) -> None:
        """Close everything at once. Raises what went wrong inside the receiver itself."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(START_SECONDS)
        assert not self._thread.is_alive(), "the receiver did not end"
        self._raise()

    def _raise(self) -> None:
        if self._broken:
            raise self._broken[0]

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # raised again in the thread of the test
            self._broken.append(error)
        finally:
            self._loop.close()
            self._started.set()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accepted, self.host, self.port, ssl=self._tls, limit=HEAD_BYTES, backlog=BACKLOG
        )
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._ending.wait()
        await refuse_more(server)
        await cancel_others()
        for writer in list(self._writers):
            writer.transport.abort()
        await settle()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = self._loop.create_task(self._converse(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._exchanges(reader, writer)
        except GONE:
            pass
        except Exception as error:  # raised again in the thread of the test
            self._broken.append(error)
        finally:
            with contextlib.suppress(*GONE):
                writer.close()
                if self._ending.is_set():
                    writer.transport.abort()

    async def _exchanges(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number, turn = self.connections, 1
        request = Request(number, turn, peer=writer.get_extra_info("peercert") or {})
        await self.at_accept(request, reader, writer)
        while not writer.is_closing() and await read_head(reader, request):
            await self.at_head(request, reader, writer)
            if writer.is_closing():
                return
            await read_body(reader, request)
            request.problem = problem(request, self.secrets) if self.secrets else None
            self.requests.append(request)
            await self.answer(request, reader, writer)
            turn += 1
            request = Request(number, turn, peer=request.peer)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
