"""The events that the code under test has emitted, and the assertions on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable, iscoroutine
from typing import Any, NoReturn, Self

from outbox_relay.testing.matching import ANY, differences, listed
from outbox_relay.testing.reading import (
    NEWEST,
    OF_TRANSACTION,
    SINCE,
    EmittedEvent,
    async_reader,
    events_of,
    is_missing_right,
    reader,
)

NEEDED = (
    "events that were committed are read from the log, which this role may not do: run outbox-relay migrate "
    "--grant-read ROLE --grant-payloads ROLE, or leave out the `with` block and ask inside the transaction"
)


class OutboxEvents:
    """The events that were emitted over ``conn``: in its present transaction, as far as they are not rolled back.

    ``conn`` is a connection of psycopg or asyncpg, a session or connection of SQLAlchemy, or a database alias of
    Django. Every question raises RuntimeError if no transaction is open.

    With a ``with`` or ``async with`` block, these are the events of all sessions whose ids were taken since the block
    began, if they are committed or of the present transaction. The role needs the grants ``read`` and ``payloads``.
    """

    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self._since: int | None = None

    def __enter__(self) -> Self:
        [[self._since]] = self._ask(NEWEST)
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the starting point, so that events can be queried after the block."""

    async def __aenter__(self) -> Self:
        [[self._since]] = await self._aask(NEWEST)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Keep the starting point, as ``__exit__`` does."""

    # -- synchronous ----------------------------------------------------------------------------------------------

    def emitted(self, type: str | None = None) -> list[EmittedEvent]:  # noqa: A002 - as for outbox.emit
        """Return the events in the order in which they were emitted, of one type if it is given."""
        return _of_type(events_of(self._ask(self._query)), type)

    def assert_emitted(
        self,
        type: str,  # noqa: A002 - as for outbox.emit
        *,
        key: str | None = ANY,
        payload: Any = ANY,
        headers: Any = ANY,
        times: int = 1,
    ) -> list[EmittedEvent]:
        """Assert that exactly ``times`` events match, and return them.

        ``payload`` and ``headers`` are a part: members of an object that are not named may have any value. The
        elements of a list must all be there.
        """
        __tracebackhide__ = True
        return _asserted(self.emitted(), (type, key, payload, headers), times)

    def refute_emitted(
        self,
        type: str,  # noqa: A002 - as for outbox.emit
        *,
        key: str | None = ANY,
        payload: Any = ANY,
        headers: Any = ANY,
    ) -> None:
        """Assert that no event matches."""
        __tracebackhide__ = True
        _asserted(self.emitted(), (type, key, payload, headers), 0)

    def deliver(self, handler: Callable[[EmittedEvent], object], type: str | None = None) -> int:  # noqa: A002
        """Call a consumer with each event in order, of one type if it is given, and return their number.

        Raises TypeError for an asynchronous one.
        """
        events = self.emitted(type)
        for event in events:
            if isawaitable(result := handler(event)):
                if iscoroutine(result):
                    result.close()
                raise TypeError(f"deliver calls plain functions, and {_name_of(handler)} is asynchronous: use adeliver")
        return len(events)

    # -- asynchronous ---------------------------------------------------------------------------------------------

    async def aemitted(self, type: str | None = None) -> list[EmittedEvent]:  # noqa: A002 - as for outbox.emit
        """Return the events over an asynchronous connection, as ``emitted`` does."""
        return _of_type(events_of(await self._aask(self._query)), type)

    async def aassert_emitted(
        self,
        type: str,  # noqa: A002 - as for outbox.emit
        *,
        key: str | None = ANY,
        payload: Any = ANY,
        headers: Any = ANY,
        times: int = 1,
    ) -> list[EmittedEvent]:
        """Assert over an asynchronous connection, as ``assert_emitted`` does."""
        __tracebackhide__ = True
        return _asserted(await self.aemitted(), (type, key, payload, headers), times)

    async def arefute_emitted(
        self,
        type: str,  # noqa: A002 - as for outbox.emit
        *,
        key: str | None = ANY,
        payload: Any = ANY,
        headers: Any = ANY,
    ) -> None:
        """Assert over an asynchronous connection, as ``refute_emitted`` does."""
        __tracebackhide__ = True
        _asserted(await self.aemitted(), (type, key, payload, headers), 0)

    async def adeliver(
        self,
        handler: Callable[[EmittedEvent], Awaitable[object]],
        type: str | None = None,  # noqa: A002 - as for outbox.emit
    ) -> int:
        """Await a consumer for each event in order, as ``deliver`` does. Raises TypeError for a plain one."""
        events = await self.aemitted(type)
        for event in events:
            result: object = handler(event)
            if not isawaitable(result):
                raise TypeError(f"adeliver awaits its handler, and {_name_of(handler)} is plain: make it asynchronous")
            await result
        return len(events)

    # -- the database ---------------------------------------------------------------------------------------------

    @property
    def _query(self) -> str:
        return OF_TRANSACTION if self._since is None else SINCE.format(self._since)

    def _ask(self, query: str) -> Sequence[Sequence[Any]]:
        try:
            return reader(self._conn)(query)
        except Exception as error:
            _explain(error, query)

    async def _aask(self, query: str) -> Sequence[Sequence[Any]]:
        try:
            return await async_reader(self._conn)(query)
        except Exception as error:
            _explain(error, query)


def _explain(error: Exception, query: str) -> NoReturn:
    """Raise PermissionError, which says what to grant, or the error itself."""
    if query != OF_TRANSACTION and is_missing_right(error):
        raise PermissionError(NEEDED) from error
    raise error


def _name_of(handler: object) -> str:
    return getattr(handler, "__name__", type(handler).__name__)


def _of_type(events: list[EmittedEvent], wanted: str | None) -> list[EmittedEvent]:
    return [event for event in events if wanted is None or event.type == wanted]


def _asserted(events: list[EmittedEvent], wanted: tuple[str, Any, Any, Any], times: int) -> list[EmittedEvent]:
    """Return the events that match. Raises AssertionError, which shows all events, if they are not ``times``."""
    __tracebackhide__ = True
    reasons = [differences(event, *wanted) for event in events]
    matching = [event for event, reason in zip(events, reasons, strict=True) if not reason]
    if len(matching) != times:
        count = "no event" if not times else "1 event" if times == 1 else f"{times} events"
        said = f"wanted {count} of type {wanted[0]!r} that match, found {len(matching)}"
        raise AssertionError(f"{said}; {listed(events, reasons)}")
    return matching
