"""Import the handler that the settings name, and check it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

MOST_CHARS = 200
"""Maximum length of the text that is kept of an exception."""


class Unusable(Exception):
    """A handler that cannot be called, with the reason in a sentence."""


class Handler(NamedTuple):
    """A handler, and whether it is asynchronous."""

    call: Callable[[Any], Any]
    is_async: bool


def described(error: BaseException) -> str:
    """Return class and message of an exception, in at most ``MOST_CHARS`` printable characters."""
    try:
        message = str(error)
    except Exception:  # the exception is the application's
        message = ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    text = "".join(c if c.isprintable() else " " for c in text[: MOST_CHARS + 1])
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"


def load(name: str) -> Handler:
    """Return the handler ``MODULE:NAME``. Raises ``Unusable``."""
    module_name, _, path = name.partition(":")
    found: Any = _module(module_name)
    for step in path.split("."):
        try:
            found = getattr(found, step)
        except AttributeError:
            raise Unusable(f"handler {name}: the module {module_name} has no {path}") from None
    return _checked(name, found)


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            advice = "install it, or add its directory to PYTHONPATH"
            raise Unusable(f"handler: there is no module {error.name}: {advice}") from None
        raise Unusable(f"handler: the import of {name} failed: {described(error)}") from None
    except BaseException as error:  # also SystemExit: the module is the application's
        raise Unusable(f"handler: the import of {name} failed: {described(error)}") from None


def _checked(name: str, found: Any) -> Handler:
    if not callable(found):
        raise Unusable(f"handler {name} is not callable: it is of type {type(found).__name__}")
    if isinstance(found, type):
        raise Unusable(f"handler {name} is a class: name a function of one argument")
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
    except ValueError:  # a function of an extension without a signature
        pass
    return Handler(found, inspect.iscoroutinefunction(function))
