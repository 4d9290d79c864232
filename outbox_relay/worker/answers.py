"""The answer to a call, from what the handler returned or raised. Nothing of an exception can make this fail."""

from __future__ import annotations

import inspect
import math
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from outbox_relay.delivery import MOST_DELAY_SECONDS, Dead, Retry
from outbox_relay.raised import raised

MOST_CHARS = 200
"""Maximum length of the text that is kept of an exception."""
NOT_ENTERED = "dsn: the handler's database did not answer in time"
NO_THREAD = "the worker process can start no thread"


class DatabaseDown(Exception):
    """The handler's database cannot be used: the handler was not called."""


class TooLate(Exception):
    """The handler was not called: another relay may own the shard of the event by now."""


class HandlerMistake(Exception):
    """A mistake of a handler that the worker found. The message is the worker's, and contains nothing of the event."""


class WorkNotRun(HandlerMistake, TypeError):
    """The handler returned something that shows that its work has not run."""


class HandlerAnswer(NamedTuple):
    """The outcome of a call, its reason, the delay that was asked for, and the message of an exception."""

    outcome: str
    reason: str = ""
    after: float | None = None
    message: str = ""


DONE = HandlerAnswer("done")


def answer_to(error: BaseException, *, expired: bool, entered: bool) -> HandlerAnswer:
    """Return the answer to a call that raised ``error``. ``entered``: the handler was called."""
    try:
        return _answer_to(error, expired=expired, entered=entered)
    except BaseException:  # attributes of the application's exceptions may raise anything
        return HandlerAnswer("failed", "an exception that cannot be described")


def _answer_to(error: BaseException, *, expired: bool, entered: bool) -> HandlerAnswer:
    if expired and not entered:
        return HandlerAnswer("unavailable", NOT_ENTERED)
    match _wanted(error):
        case Retry() as wish:
            return HandlerAnswer("retry", _text_of(wish), _delay_of(wish))
        case Dead() as wish:
            return HandlerAnswer("dead", _text_of(wish))
        case CancelledError() if expired:
            return HandlerAnswer("timeout")
        case TooLate():
            return HandlerAnswer("unsent")
        case DatabaseDown() as down:
            return HandlerAnswer("unavailable", _short(str(down)))
        case HandlerMistake() as mistake:
            return HandlerAnswer("failed", _short(str(mistake)))
        case _:
            return HandlerAnswer("failed", _short(raised(error)), None, described(error))


def _wanted(error: BaseException) -> BaseException:
    """Return the first exception of a group of which all are ``Retry``, or all ``Dead``: tasks raised them."""
    leaves, parts = list[BaseException](), [error]
    while parts:
        part = parts.pop()
        if isinstance(part, BaseExceptionGroup):
            parts += reversed(cast("BaseExceptionGroup[BaseException]", part).exceptions)
        else:
            leaves.append(part)
    is_one_wish = any(all(isinstance(leaf, kind) for leaf in leaves) for kind in (Retry, Dead))
    return leaves[0] if is_one_wish else error


def _text_of(error: Retry | Dead) -> str:
    """Return the reason of an exception whose class may be a subclass of any shape."""
    reason: object = getattr(error, "reason", "")
    return _short(reason if isinstance(reason, str) else "")


def _delay_of(error: Retry) -> float | None:
    after: object = getattr(error, "after", None)
    if not isinstance(after, int | float) or isinstance(after, bool):
        return None
    return min(float(after), MOST_DELAY_SECONDS) if math.isfinite(after) and after >= 0 else None


def described(error: BaseException) -> str:
    """Return class and message of an exception, in at most ``MOST_CHARS`` printable characters."""
    try:
        message = str(error)
    except BaseException:  # the exception is the application's
        message = ""
    return _short(f"{type(error).__name__}: {message[: 2 * MOST_CHARS]}" if message else type(error).__name__)


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in text[: MOST_CHARS + 1])
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"


def check_result(result: object) -> None:
    """Raise ``WorkNotRun`` for a result that shows that the handler's work has not run."""
    if result is None:
        return
    close: Callable[[], Any] | None = getattr(result, "close", None)
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise WorkNotRun("the handler returned a generator, which has not run: it must do its work, and not yield")
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result) and close is not None:
            close()  # without a warning that it was never awaited
        raise WorkNotRun("the handler returned an awaitable, which has not run: await it in an async function")
