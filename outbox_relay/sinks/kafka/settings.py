"""The settings and the log of librdkafka's clients, and the tokens of SASL OAUTHBEARER."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer, ThrottleEvent

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.files import system_authorities
from outbox_relay.domain.redaction import may_hold_secret, without

Scalar: TypeAlias = str | int | float | bool

BATCH_BYTES = 990_000
"""Default ``batch.size``: fits the default ``max.message.bytes`` of a topic."""
LINGER_MS = 10
"""Default time that a record waits for others of its partition while more are handed over."""

DEFAULTS: Mapping[str, Scalar] = {
    # Places keys as Java clients do, and spreads records without a key. Plain murmur2 uses one partition for those.
    "partitioner": "murmur2_random",
    # Few large requests while more events follow. The last records do not wait (``RecordProducer.serve``).
    "linger.ms": LINGER_MS,
    "socket.keepalive.enable": True,
    # Load balancers forget idle connections without telling: common ones after 60 to 350 seconds, strict ones after 30.
    "connections.max.idle.ms": 20_000,
    # Detects within a second that a broker is back; librdkafka's default is up to ten seconds.
    "reconnect.backoff.max.ms": 1_000,
    # More than two calls of the sink hand over, and the most memory that they use before the sink waits for space.
    "queue.buffering.max.messages": 10_000,
    "queue.buffering.max.kbytes": 131_072,
    # The limit of the topic applies, not the client's. Below socket.request.max.bytes of brokers, which close a
    # connection that sends more.
    "message.max.bytes": 100_000_000,
}
"""The sink's defaults. The user's settings override them."""

GUARANTEES: Mapping[str, Scalar] = {
    "enable.idempotence": True,
    "acks": "all",
    # Without a timeout: a record that librdkafka gave up would be sent again after later records of its key.
    "message.timeout.ms": 0,
    # While a partition is being created, its first request may fail and be repeated. If a second request is in flight,
    # the broker takes that one for the first, and librdkafka then counts the first as delivered: it would be lost.
    "max.in.flight.requests.per.connection": 1,
    # A request that fails for good ends the producer. Otherwise librdkafka sends the next requests of the partition,
    # and they overtake the other records of the failed one.
    "enable.gapless.guarantee": True,
    "delivery.report.only.error": False,
    # Shows in time which brokers still owe an acknowledgement.
    "statistics.interval.ms": 1_000,
}
"""The settings that keep order, lose nothing and repeat nothing needlessly. They override all others."""

LINGERS = {"linger.ms", "queue.buffering.max.ms"}
"""The two names of the linger setting."""
ALIASES = ("request.required.acks", "delivery.timeout.ms", "max.in.flight")
"""Aliases of settings in ``GUARANTEES``. Removed, since otherwise the last of two names would win."""

ONE_AT_A_TIME: Mapping[str, Scalar] = {
    "batch.num.messages": 1,
    "linger.ms": 0,
    "max.in.flight.requests.per.connection": 1,
    # With one request in flight no record can overtake, so a refused record need not end the producer.
    "enable.gapless.guarantee": False,
}
"""Additional settings for records that are sent alone."""

_MIN_SECRET_CHARS = 3
_NO_SETTING = "no such setting"
_RANGE = re.compile(r"outside allowed range (-?[\d.]+?)\.\.(-?[\d.]+)")
MOST_CHARS = 500

EVERY_SECONDS = 60.0
"""Minimum time between two lines that differ only in numbers. A client that cannot connect writes several a second."""
MAX_KINDS = 200
"""Maximum number of different lines remembered."""
THROTTLED_SECONDS = 10.0
"""Time for which a sink counts as throttled after the brokers last said so."""
THROTTLED = "throttled: the brokers delay requests, because a quota is reached (producer_byte_rate, request_percentage)"

_NUMBERS = re.compile(r"\d+")
_NOISE = ("enable.gapless.guarantee is experimental", "failed: Local: Purged in flight")
_HANDLED = "unable to satisfy gap-less guarantee"

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
        except BaseException as error:  # SystemExit too
            raise TokenUnavailable(f'token_provider "{self._name}": {_described(error)}') from None
        match answer:
            case (str(token), int() | float() as lifetime) if token:
                now = time.time()
                # Many libraries return the time of the end instead of the lifetime.
                return token, lifetime if lifetime > now else now + lifetime
            case _:
                what = "should return the token, a text, and its lifetime in seconds"
                raise TokenUnavailable(f'token_provider "{self._name}" {what}')


def _described(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:MOST_CHARS]
    return "".join(each if each.isprintable() else " " for each in text)


class ClientSettings:
    """The settings of one sink's clients, from its table ``producer``.

    ``secrets`` return values of settings, and are called again for every client; they raise ValueError, with a reason.
    With ``creates`` the sink creates topics, so requests of its producers do not make a broker create one. Tokens of
    SASL OAUTHBEARER come from ``tokens``, if that is given.
    """

    def __init__(
        self,
        user: Mapping[str, Scalar],
        secrets: Mapping[str, Callable[[], str]] | None = None,
        *,
        creates: bool = False,
        tokens: TokenProvider | None = None,
    ) -> None:
        self._tokens = tokens
        self._creation: Mapping[str, Scalar] = {"allow.auto.create.topics": False} if creates else {}
        self._user = {name: value for name, value in user.items() if name not in ALIASES}
        self._secrets = dict(secrets or {})
        self._hidden = {
            name: text
            for name, value in user.items()
            if may_hold_secret(name) and len(text := str(value)) >= _MIN_SECRET_CHARS
        }

    @property
    def batch_bytes(self) -> int:
        """Return the maximum size of a batch in bytes."""
        return int(self._user.get("batch.size", BATCH_BYTES))

    @property
    def flushes_early(self) -> bool:
        """Return True if the last records may be sent at once, because the user has set no linger time."""
        return LINGERS.isdisjoint(self._user)

    @property
    def compresses(self) -> bool:
        """Return True if records are compressed."""
        codec = self._user.get("compression.type", self._user.get("compression.codec", "none"))
        return str(codec) != "none"

    @property
    def max_record_bytes(self) -> int | None:
        """Return the user's limit for records in bytes, or None if it is not set."""
        found = self._user.get("message.max.bytes")
        return None if found is None else int(found)

    def producer(self, batch_bytes: int, extra: Mapping[str, Scalar]) -> dict[str, object]:
        """Return the settings of a producer with batches of at most ``batch_bytes``.

        Raise ``ConfigurationError`` for a secret that cannot be read, and if there is no token.
        """
        return {**DEFAULTS, **self._creation, **self._of_user(), **GUARANTEES, "batch.size": batch_bytes, **extra}

    def admin(self, *, create_topics: bool) -> dict[str, object]:
        """Return the settings of an admin client, whose requests may create topics with ``create_topics``.

        Raise ``ConfigurationError`` as ``producer`` does.
        """
        own = {"enable.idempotence": False, "allow.auto.create.topics": create_topics}
        return {"socket.keepalive.enable": True, **self._of_user(), **own}

    def _of_user(self) -> dict[str, object]:
        found: dict[str, object] = dict(self._user)
        for name, read in self._secrets.items():
            try:
                found[name] = self._hidden[name] = read()
            except ValueError as reason:
                raise ConfigurationError(f'producer."{name}": {reason}') from None
        if "sasl.oauthbearer.token.endpoint.url" in found and "https.ca.pem" not in found:
            # The wheel's client looks for authorities where the machine that built it keeps them.
            found.setdefault("https.ca.location", system_authorities() or "")
        try:
            return found if self._tokens is None else {**found, "oauth_cb": self._tokens.callback()}
        except TokenUnavailable as reason:
            raise TokenUnavailable(self.redact(str(reason))) from None

    def redact(self, text: str) -> str:
        """Return ``text`` without the values of secret settings."""
        for secret in self._hidden.values():
            text = without(text, secret, "***", anywhere=True)
        return text

    def describe(self, error: KafkaError) -> str:
        """Return ``error`` as one line for people, without secrets."""
        return self.redact(f"{error.name()}: {error.str()}")


class ClientLog:
    """Passes librdkafka's log lines to the logger ``outbox_relay.kafka``, and keeps its last error.

    Each line has the name of the ``sink``. Repeated lines are suppressed.
    """

    def __init__(self, settings: ClientSettings, sink: str = "") -> None:
        self.settings = settings
        self._logger = logging.getLogger("outbox_relay.kafka")
        self._extra = {"sink": sink} if sink else {}
        self._lines: dict[str, float] = {}
        self.last_error: str | None = None
        self.trouble: str | None = None
        """Why no broker is reachable, or None. One that differs only in numbers does not replace it."""
        self.throttled_until = -math.inf
        """The ``time.monotonic()`` value until which a broker answers no request, because a quota is reached."""

    def throttled(self, event: ThrottleEvent) -> None:
        """Record that a broker answers no request for a while. Producers call this."""
        self.throttled_until = max(self.throttled_until, time.monotonic() + event.throttle_time)

    @property
    def throttle(self) -> str | None:
        """Return that the brokers throttle, or None."""
        return THROTTLED if time.monotonic() < self.throttled_until + THROTTLED_SECONDS else None

    def log(self, level: int, message: str, *args: object) -> None:
        """Log a line of the client, which calls this like a logger. Lines about the sink's own purges are dropped."""
        line = self.settings.redact(message % args)
        if _HANDLED in line:
            # Fatal for that producer only: the sink sends the records again with another one.
            level = min(level, logging.WARNING)
        if any(noise in line for noise in _NOISE) or not self._logger.isEnabledFor(level):
            return
        kind, now = _kind(line), time.monotonic()
        if now < self._lines.get(kind, -math.inf) + EVERY_SECONDS:
            return
        if len(self._lines) >= MAX_KINDS:
            self._lines.clear()
        self._lines[kind] = now
        self._logger.log(level, "%s", line, extra=self._extra)

    def failed(self, error: KafkaError) -> None:
        """Keep ``error``, which the client reports for a connection or another cause without a record."""
        # "All brokers down" is reported after the reason for it, such as a refused password.
        if self.last_error is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last_error = self.settings.describe(error)

    def unreachable(self, error: KafkaError) -> None:
        """Keep ``error`` and show it as trouble. Producers call this until they reach a broker."""
        self.failed(error)
        # After a fatal error the sink replaces the producer.
        if not error.fatal() and _kind(self.trouble or "") != _kind(self.last_error or ""):
            self.trouble = self.last_error

    def clear(self) -> None:
        """Clear the last error and the trouble, because records are acknowledged."""
        self.last_error = self.trouble = None

    def explain(self, reason: str) -> str:
        """Return ``reason`` with the client's last error, unless that is included."""
        if self.last_error is None or self.last_error in reason:
            return reason
        return f"{reason}; the client's last error: {self.last_error}"


def _kind(line: str) -> str:
    return _NUMBERS.sub("#", line)


def is_property(name: str) -> bool:
    """Return whether librdkafka has a setting of this name. No client is made and nothing is connected.

    Settings are read in order, so the unknown one after it keeps a producer from being made.
    """
    try:
        Producer({name: "", _NO_SETTING: ""})
    except (KafkaException, TypeError, ValueError) as error:
        return f'No such configuration property: "{name}"' not in str(error)
    return True


def value_fault(name: str, value: str | float) -> str | None:
    """Return why librdkafka refuses the value of a setting, without the value, or None. No client is made."""
    try:
        Producer({name: value, _NO_SETTING: ""})
    except (KafkaException, TypeError, ValueError) as error:
        text = str(error)
        if f'"{_NO_SETTING}"' in text:
            return None
        if found := _RANGE.search(text):
            return f"should be a number from {found[1]} to {found[2]}"
        return "should be true or false" if "Expected bool" in text else "is a value that librdkafka does not accept"
    return None
