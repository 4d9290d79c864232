"""Tokens of SASL OAUTHBEARER that a function of the application returns, as for AWS MSK with IAM."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

from outbox_relay.domain.errors import ConfigurationError

MOST_CHARS = 500

TokenCallback: TypeAlias = Callable[[object], tuple[str, float]]
"""Returns a token and the time of its end, in seconds since 1970, as ``oauth_cb`` of confluent-kafka does."""


class TokenUnavailable(ConfigurationError):
    """The function returns no token now. The message is the reason."""


class TokenProvider:
    """The function ``PACKAGE:FUNCTION``, imported here. Raise ``ConfigurationError`` if there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        module, _, path = name.partition(":")
        try:
            self._function: Callable[[], Any] = attrgetter(path)(import_module(module))
        except Exception as error:
            advice = "; install it, or add its directory to PYTHONPATH" if isinstance(error, ImportError) else ""
            raise ConfigurationError(f'token_provider "{name}": {_described(error)}{advice}') from None
        if not callable(self._function):
            raise ConfigurationError(f'token_provider "{name}" is not a function')

    def callback(self) -> TokenCallback:
        """Return a callback for one client.

        Its first token is requested here, since a client that has none blocks for ten seconds. Raise
        ``TokenUnavailable`` if the function returns none.
        """
        tokens = [self._token()]
        return lambda _config: tokens.pop() if tokens else self._token()

    def _token(self) -> tuple[str, float]:
        try:
            answer = self._function()
        except Exception as error:
            raise TokenUnavailable(f'token_provider "{self._name}": {_described(error)}') from None
        match answer:
            case (str(token), int() | float() as lifetime) if token:
                now = time.time()
                # Many libraries return the time of the end instead of the lifetime.
                return token, lifetime if lifetime > now else now + lifetime
            case _:
                what = "should return the token, a text, and its lifetime in seconds"
                raise TokenUnavailable(f'token_provider "{self._name}" {what}')


def _described(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"[:MOST_CHARS]
    return "".join(each if each.isprintable() else " " for each in text)
