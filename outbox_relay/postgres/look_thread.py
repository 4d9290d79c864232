"""The connection on which a relay looks at its log: a blocking one, in a thread of its own.

A relay looks hundreds of times a second. Through the event loop and the pool a look costs three times as much processor
time, and a look that shows nothing new wakes the loop twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, LiteralString, TypeVar, cast

import psycopg
from psycopg.waiting import Ready, Wait

from outbox_relay.domain.errors import DatabaseUnavailable, RelayError
from outbox_relay.domain.file_reading import CONNECTION_FILES
from outbox_relay.postgres.connection import CONNECT_SECONDS, CONNECTION_DEFAULTS, direct, is_alive, settings_to_fix
from outbox_relay.postgres.errors import explain, explain_statement
from outbox_relay.postgres.looks import look_parameters, tick_of, window_of
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest

T = TypeVar("T")

PACE_SECONDS = 0.002
"""Time from one look to the next, from start to start."""
LIFETIME_SECONDS = 3600.0
"""Age from which on a connection is replaced, so that the relay follows changes of addresses and passwords."""
STATEMENT_TIMEOUT: LiteralString = "set statement_timeout = '3s'"
"""Ends a look that takes long before the relay gives up its connection."""
MORE_SECONDS = 2 * CONNECT_SECONDS
"""Longest time in which a job waits for a connection."""
JOIN_SECONDS = 1.0
"""Longest wait for the end of the thread."""


class LookConnection(psycopg.Connection[Any]):
    """A connection that gives up a statement after ``seconds``, with ``TimeoutError``. Then it is of no further use."""

    seconds = 5.0

    def wait(self, gen: Generator[Wait, Ready | int, T], *args: Any, **kwargs: Any) -> T:
        """Run ``gen``, as the method that this overrides."""
        return super().wait(_limited(gen, time.monotonic() + self.seconds), *args, **kwargs)


def _limited(gen: Generator[Wait, Ready | int, T], until: float) -> Generator[Wait, Ready | int, T]:
    """Wrap ``gen`` so that it ends after ``until``. The driver resumes it ten times a second while nothing arrives."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                raise TimeoutError
            wanted = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """Work for the thread, and the future of its result."""

    work: Callable[[LookConnection, _Job[T]], T]
    name: str
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
    """Runs jobs one after another on its connection, which it makes when it needs one.

    A job raises as the statements of ``Database`` do. ``seconds`` is the longest wait for an answer.
    """

    def __init__(self, dsn: Callable[[], str], statements: dict[str, LiteralString], *, pooler: bool) -> None:
        self._dsn = dsn
        self._statements = statements
        self._pooler = pooler
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: LookConnection | None = None
        self._connected_at = 0.0
        self._outdated = False
        self._due = 0.0

    # -- called in the event loop -------------------------------------------------------------------------------

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
        statement, parameters = self._statements["look"], look_parameters(request)

        def work(connection: LookConnection, job: _Job[Look]) -> Look:
            cursor = connection.cursor(binary=True)
            give_up, took = time.monotonic() + patience, list[float]()
            while True:
                began = self._wait_for_turn()
                rows = cursor.execute(statement, parameters, prepare=not self._pooler).fetchall()
                at = time.monotonic()
                took.append(at - began)
                result = tick_of(rows[0])
                if is_news(result, at - began) or at >= give_up or job.cancelled:
                    return Look(result, window_of(rows, result.tick, request), at, took)

        return await self._run("look", work, seconds)

    async def execute(self, name: str, seconds: float) -> None:
        """Run a statement without parameters."""

        def work(connection: LookConnection, _: _Job[None]) -> None:
            connection.execute(self._statements[name])

        await self._run(name, work, seconds)

    def renew(self) -> None:
        """Make a new connection for the next job."""
        self._outdated = True

    async def close(self) -> None:
        """End the thread, after at most a second if it waits for an answer."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join, JOIN_SECONDS)

    async def _run(self, name: str, work: Callable[[LookConnection, _Job[T]], T], seconds: float) -> T:
        loop = asyncio.get_running_loop()

        def limited(connection: LookConnection, job: _Job[T]) -> T:
            connection.seconds = seconds
            return work(connection, job)

        job = _Job(limited, name, loop, loop.create_future())
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, args=(self._jobs,), name="looks", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        giving_up = loop.call_later(seconds + MORE_SECONDS, job.give_up)
        try:
            return await job.done
        finally:
            giving_up.cancel()
            job.cancel()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _serve(self, jobs: queue.SimpleQueue[_Job[Any] | None]) -> None:
        while (job := jobs.get()) is not None:
            if job.cancelled:
                continue
            try:
                result = self._work(job)
            except BaseException as error:
                job.fail(error)
            else:
                job.answer(result)
        self._disconnect()

    def _work(self, job: _Job[T]) -> T:
        try:
            return job.work(self._connect(), job)
        except TimeoutError:
            self._disconnect()
            raise DatabaseUnavailable("the database did not answer in time") from None
        except psycopg.Error as error:
            raise self._explain(error, job.name) from None
        except (MemoryError, ValueError, ArithmeticError) as error:  # a value that cannot be loaded
            raise explain_statement(error, job.name) from None

    def _explain(self, error: psycopg.Error, name: str) -> RelayError:
        if self._connection is not None and is_alive(self._connection):
            return explain_statement(error, name)
        self._disconnect()
        return explain(error)

    def _wait_for_turn(self) -> float:
        """Wait until the next look is due, and return the time."""
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
            now = time.monotonic()
        self._due = max(self._due, now - PACE_SECONDS) + PACE_SECONDS
        return now

    def _connect(self) -> LookConnection:
        if self._connection is not None and (
            self._outdated or time.monotonic() - self._connected_at > LIFETIME_SECONDS
        ):
            self._disconnect()
        if self._connection is None:
            self._outdated = False
            self._connection = self._connected()
            self._connected_at = time.monotonic()
        return self._connection

    def _connected(self) -> LookConnection:
        dsn = CONNECTION_FILES.call(self._dsn)
        conninfo = dsn if self._pooler else direct(dsn)
        connection = LookConnection.connect(conninfo, autocommit=True, **cast(Any, CONNECTION_DEFAULTS))
        connection.prepare_threshold = None if self._pooler else 2
        try:
            if not self._pooler:
                for statement in (*settings_to_fix(connection), STATEMENT_TIMEOUT):
                    connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
