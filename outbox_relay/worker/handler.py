"""Import the handler that the settings name, and check it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from outbox_relay.worker.answers import described


class Unusable(Exception):
    """A handler that cannot be called, with the reason in a sentence."""


class Handler(NamedTuple):
    """A handler, and whether it is asynchronous."""

    call: Callable[[Any], Any]
    is_async: bool


def load(name: str) -> Handler:
    """Return the handler ``MODULE:NAME``. Raises ``Unusable``."""
    module_name, _, path = name.partition(":")
    found: Any = _module(module_name)
    for step in path.split("."):
        try:
            found = getattr(found, step)
        except AttributeError:
            raise Unusable(f"handler {name}: the module {module_name} has no {path}") from None
        except BaseException as error:  # a module or a class may compute its attributes
            raise Unusable(f"handler {name}: {path} cannot be read: {described(error)}") from None
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
    except Exception:  # noqa: S110 - a function of an extension without a signature, or one that is made up
        pass
    return Handler(found, inspect.iscoroutinefunction(function))
