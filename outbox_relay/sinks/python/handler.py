"""The handler that the settings name: its import, and verdicts from what it raises."""

from __future__ import annotations

import inspect
import math
import sys
from asyncio import CancelledError
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from outbox_relay.delivery import MOST_DELAY_SECONDS, Dead, Retry
from outbox_relay.domain.outcomes import Attempt, Failed, Refused, Verdict, printable
from outbox_relay.raised import raised

MOST_CHARS = 200
"""Maximum length of the text that is kept of an exception."""
TIMED_OUT = "the handler did not end in time"


class Unusable(Exception):
    """A handler that cannot be called. The message is the reason."""


class Handler(NamedTuple):
    """A handler, and whether it is asynchronous."""

    call: Callable[[Any], Any]
    is_async: bool


class HandlerMistake(Exception):
    """A mistake of a handler that the relay found. The message contains nothing of the event."""


# -- import -------------------------------------------------------------------------------------------------------


def load(name: str) -> Handler:
    """Import the handler ``MODULE:NAME``, if need be from the working directory. Raises ``Unusable``."""
    if (directory := str(Path.cwd())) not in sys.path:
        sys.path.append(directory)  # last, so that none of its modules replaces one of a library
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except BaseException as error:  # SystemExit too: the module is the application's
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            advice = "install it, or add its directory to PYTHONPATH"
            raise Unusable(f"handler: there is no module {missing}: {advice}") from None
        raise Unusable(f"handler: the import of {module} failed: {described(error)}") from None
    for step in path.split("."):
        try:
            found = getattr(found, step)
        except AttributeError:
            raise Unusable(f"handler {name}: the module {module} has no {path}") from None
        except BaseException as error:  # a module may compute its attributes
            raise Unusable(f"handler {name}: {path} cannot be read: {described(error)}") from None
    return _checked(name, found)


def _checked(name: str, found: Any) -> Handler:
    if not callable(found) or isinstance(found, type):
        raise Unusable(f"handler {name} is no function: name a function of one argument")
    function = found
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = function.__call__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise Unusable(f"handler {name} is a generator: it must return, and not yield")
    try:
        inspect.signature(found).bind(None)
    except TypeError:
        raise Unusable(f"handler {name} has a wrong signature: it is called with one argument, the delivery") from None
    except ValueError:  # a function of an extension, without a signature
        pass
    return Handler(found, inspect.iscoroutinefunction(function))


# -- outcomes -----------------------------------------------------------------------------------------------------


def check_result(result: object) -> None:
    """Raise ``HandlerMistake`` for a result that shows that the handler's work has not run."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise HandlerMistake("the handler returned a generator, which has not run: it must do its work, and not yield")
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()  # without a warning that it was never awaited
        raise HandlerMistake("the handler returned an awaitable, which has not run: await it in an async function")


def verdict_of(error: BaseException, seconds: float, *, cancelled: bool) -> Verdict:
    """Return the verdict of an event whose handler raised ``error``. ``cancelled``: its time was over.

    Attributes of the application's exceptions may raise anything.
    """
    try:
        return _verdict_of(_wish_of(error), seconds, cancelled=cancelled)
    except BaseException:
        return Failed("an exception that cannot be described", attempt=Attempt("exception", seconds))


def _verdict_of(error: BaseException, seconds: float, *, cancelled: bool) -> Verdict:
    match error:
        case Retry():
            text = _with_reason("the handler asked for a retry", error)
            return Failed(text, retry_after_seconds=_delay_of(error), attempt=Attempt("retry", seconds))
        case Dead():
            return Refused(_with_reason("the handler refused the event", error), attempt=Attempt("dead", seconds))
        case CancelledError() if cancelled:
            return Failed(TIMED_OUT, attempt=Attempt("timeout", seconds))
        case HandlerMistake():
            return Failed(str(error), attempt=Attempt("exception", seconds))
        case _:
            return Failed(_short(raised(error)), attempt=Attempt("exception", seconds, described(error)))


def _wish_of(error: BaseException) -> BaseException:
    """Return the first exception of a group of which all are ``Retry``, or all ``Dead``: tasks raised them."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    is_one_wish = any(group.split(kind)[1] is None for kind in (Retry, Dead))
    return _wish_of(group.exceptions[0]) if is_one_wish else group


def _with_reason(text: str, error: Retry | Dead) -> str:
    """Return the text and the reason of an exception, whose class may be a subclass of any shape."""
    reason: object = getattr(error, "reason", "")
    return f"{text}: {_short(reason)}" if isinstance(reason, str) and reason else text


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
    text = printable(text[: MOST_CHARS + 1])
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"
