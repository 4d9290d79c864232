"""The thread in which a relay looks at its log, on a blocking connection.

A relay looks hundreds of times a second. Through the event loop and the pool a look costs three times as much processor
time, and a look that shows nothing new wakes the loop twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, LiteralString, TypeVar

import psycopg

from outbox_relay.domain.errors import DatabaseUnavailable, RelayError, StatementFailed
from outbox_relay.postgres.connection import is_alive
from outbox_relay.postgres.errors import explain, explain_statement, is_starved
from outbox_relay.postgres.look_connection import LookConnection, LookConnector
from outbox_relay.postgres.looks import look_parameters, tick_of, window_of
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest

T = TypeVar("T")

PACE_SECONDS = 0.002
"""Time from one look to the next, from start to start."""
JOIN_SECONDS = 1.0
"""Longest wait for the end of the thread."""


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """Work for the thread, and the future of its result."""

    work: Callable[[LookConnection, _Job[T]], T]
    name: str
    seconds: float
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[T]
    cancelled: bool = False

    def cancel(self) -> None:
        """Make the thread skip the job, or end it after the present look."""
        self.cancelled = True

    def give_up(self) -> None:
        """Fail, in the event loop, since the thread has not answered."""
        self._settle(self.done.set_exception, DatabaseUnavailable("the database did not answer in time"))

    def answer(self, result: T) -> None:
        self._call(self.done.set_result, result)

    def fail(self, error: BaseException) -> None:
        self._call(self.done.set_exception, error)

    def _call(self, settle: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._settle, settle, value)

    def _settle(self, settle: Callable[[Any], None], value: object) -> None:
        if not self.done.done():
            settle(value)


class LookThread:
    """Runs jobs one after another on its connection.

    A job raises as the statements of ``Database`` do. ``seconds`` is the longest wait for an answer. Jobs are refused
    with ``StatementFailed`` while there is no connection, and with ``DatabaseUnavailable`` after ``close``.
    """

    def __init__(self, dsn: Callable[[], str], statements: dict[str, LiteralString], *, pooler: bool) -> None:
        self._dsn = dsn
        self._statements = statements
        self._pooler = pooler
        self._worker: _Worker | None = None
        self._known: str | None = None

    async def open(self) -> None:
        """Start the thread, and make the connection in the background."""
        await self.close()
        worker = _Worker(self._dsn, pooler=self._pooler)
        worker.start()
        self._worker = worker

    def prepare(self) -> bool:
        """Return True if there is a connection. If there is none, or if it is old, begin to make another."""
        return self._worker is not None and self._worker.prepare()

    @property
    def trouble(self) -> str | None:
        """Why no connection can be made, or None."""
        return None if self._worker is None else self._worker.connector.trouble

    async def look(
        self,
        request: WindowRequest | None,
        seconds: float,
        patience: float,
        is_news: Callable[[TickResult, float], bool],
    ) -> Look:
        """Look at least once, until a look is news or for ``patience`` seconds, and return the last look.

        A look has ``seconds`` to be answered. ``is_news`` is called in the thread with each tick and its duration.
        """
        statement, parameters, worker = self._statements["look"], {**look_parameters(request)}, self._open_worker()

        def work(connection: LookConnection, job: _Job[Look]) -> Look:
            cursor = connection.cursor(binary=True)
            give_up, took = time.monotonic() + patience, list[float]()
            while True:
                began = worker.wait_for_turn()
                parameters["known"] = self._known
                rows = cursor.execute(statement, parameters, prepare=not self._pooler).fetchall()
                at = time.monotonic()
                took.append(at - began)
                result = tick_of(rows[0])
                self._known = result.incarnation
                if is_news(result, at - began) or at >= give_up or job.cancelled:
                    return Look(result, window_of(rows, result.tick, request), at, took)

        return await worker.run("look", work, seconds)

    async def execute(self, name: str, seconds: float) -> None:
        """Run a statement without parameters."""

        def work(connection: LookConnection, _: _Job[None]) -> None:
            connection.execute(self._statements[name])

        await self._open_worker().run(name, work, seconds)

    def renew(self) -> None:
        """Use the present connection no more, and make another."""
        if self._worker is not None:
            self._worker.renew()

    async def close(self) -> None:
        """End the thread, after at most a second if it waits for an answer."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.end, JOIN_SECONDS)

    def _open_worker(self) -> _Worker:
        if self._worker is None:
            raise DatabaseUnavailable("there is no connection to the database")
        return self._worker


class _Worker:
    """One thread, its queue and its connection, which no other thread uses."""

    def __init__(self, dsn: Callable[[], str], *, pooler: bool) -> None:
        self.connector = LookConnector(dsn, self._receive, pooler=pooler)
        self._jobs: queue.SimpleQueue[_Job[Any] | LookConnection | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="looks", daemon=True)
        self._connection: LookConnection | None = None
        self._given_up: LookConnection | None = None
        self._ending = threading.Lock()
        self._ended = False
        self._due = 0.0

    # -- called in the event loop -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and the connecting."""
        self._thread.start()
        self.connector.connect()

    def prepare(self) -> bool:
        """Return True if there is a connection to be used. Otherwise, or if it is old, begin to make another."""
        connection = self._connection
        usable = connection is not None and connection is not self._given_up
        if not usable or self.connector.is_outdated:
            self.connector.connect()
        return usable

    def renew(self) -> None:
        """Use the present connection no more, nor one that is being made: it may lead to the same server."""
        self._given_up = self._connection
        self.connector.discard()

    def end(self, seconds: float) -> None:
        """End the thread, and wait for that at most for ``seconds``. Blocks."""
        self._jobs.put(None)
        self._thread.join(seconds)

    async def run(self, name: str, work: Callable[[LookConnection, _Job[T]], T], seconds: float) -> T:
        """Run a job. It is given up after twice its time: an earlier one may be under way."""
        loop = asyncio.get_running_loop()
        job = _Job(work, name, seconds, loop, loop.create_future())
        self._jobs.put(job)
        giving_up = loop.call_later(2 * seconds, job.give_up)
        try:
            return await job.done
        finally:
            giving_up.cancel()
            job.cancel()

    # -- the connecting thread ----------------------------------------------------------------------------------

    def _receive(self, connection: LookConnection) -> None:
        """Pass a new connection to the thread, or close it if that has ended."""
        with self._ending:
            if not self._ended:
                self._jobs.put(connection)
                return
        connection.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def wait_for_turn(self) -> float:
        """Wait until the next look is due, and return the time."""
        now = time.monotonic()
        if now < self._due:
            # Not time.sleep(): it fails where a library shifts the clock of the process.
            select.select((), (), (), self._due - now)
            now = time.monotonic()
        self._due = max(self._due, now - PACE_SECONDS) + PACE_SECONDS
        return now

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._take(job)
        with self._ending:
            self._ended = True
        while not self._jobs.empty():
            if isinstance(left := self._jobs.get(), LookConnection):
                left.close()
        self._disconnect()

    def _take(self, job: _Job[Any] | LookConnection) -> None:
        if isinstance(job, LookConnection):
            self._disconnect()
            self._connection = job
            self.connector.adopted()
        elif not job.cancelled:
            try:
                result = self._work(job)
            except BaseException as error:
                job.fail(error)
            else:
                job.answer(result)

    def _work(self, job: _Job[T]) -> T:
        connection = self._connection
        if connection is None:
            raise StatementFailed(f"there is no connection for statement {job.name}", StatementFailed.NO_CONNECTION)
        connection.seconds = job.seconds
        try:
            return job.work(connection, job)
        except OSError as error:  # also of the socket
            self._disconnect()
            late = isinstance(error, TimeoutError)
            said = "did not answer in time" if late else f"could not be asked ({error.strerror})"
            raise DatabaseUnavailable(f"the database {said}") from None
        except psycopg.Error as error:
            raise self._explain(connection, error, job.name) from None
        except (MemoryError, ValueError, ArithmeticError) as error:  # a value that cannot be loaded
            raise explain_statement(error, job.name) from None

    def _explain(self, connection: LookConnection, error: psycopg.Error, name: str) -> RelayError:
        if is_alive(connection):
            return explain_statement(error, name)
        self._disconnect()
        return explain_statement(error, name) if is_starved(error) else explain(error)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
