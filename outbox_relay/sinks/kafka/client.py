"""Settings and log of librdkafka's clients."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from confluent_kafka import KafkaError, KafkaException, ThrottleEvent

from outbox_relay.domain.authorities import system_authorities
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import FileReader, is_stream, probe, read_file, while_reading
from outbox_relay.domain.hidden_values import without
from outbox_relay.domain.secret_names import may_hold_secret
from outbox_relay.sinks.kafka.certificate_errors import with_certificate_error
from outbox_relay.sinks.kafka.repeat_filter import RepeatFilter
from outbox_relay.sinks.kafka.tokens import TokenProvider, TokenUnavailable

Scalar: TypeAlias = str | int | float | bool

BATCH_BYTES = 990_000
"""Default ``batch.size``: fits the default ``max.message.bytes`` of a topic."""
LINGER_MS = 10
"""Default time that a record waits for others of its partition while more are handed over."""
MAX_FILE_BYTES = 65_536
"""Maximum size of a file that contains a setting."""

DEFAULTS: Mapping[str, Scalar] = {
    # Places keys as Java clients do, and spreads records without a key. Plain murmur2 uses one partition for those.
    "partitioner": "murmur2_random",
    # Few large requests while more events follow. The last records do not wait (``RecordProducer.flush_for``).
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

THROTTLED_SECONDS = 10.0
"""Time for which a sink counts as throttled after the brokers last said so."""
THROTTLED = "throttled: the brokers delay requests, because a quota is reached (producer_byte_rate, request_percentage)"

_MIN_SECRET_CHARS = 3
_NOISE = ("enable.gapless.guarantee is experimental", "failed: Local: Purged in flight")
_HANDLED = "unable to satisfy gap-less guarantee"


class ClientSettings:
    """The settings of one sink's clients, from its table ``producer``.

    ``files`` contain values of settings and are read again for every client. With ``creates`` the sink creates topics,
    so requests of its producers do not make a broker create one. Every client is made by ``reader``, since it opens
    files. Tokens of SASL OAUTHBEARER come from ``tokens``, if that is given.
    """

    def __init__(
        self,
        user: Mapping[str, Scalar],
        files: Mapping[str, Path] | None = None,
        *,
        creates: bool = False,
        reader: FileReader | None = None,
        tokens: TokenProvider | None = None,
    ) -> None:
        self.reader = reader or FileReader()
        self._tokens = tokens
        self._creation: Mapping[str, Scalar] = {"allow.auto.create.topics": False} if creates else {}
        self._user = {name: value for name, value in user.items() if name not in ALIASES}
        self._files = dict(files or {})
        self._file_values: dict[str, str] = {}
        self._secrets = [
            text
            for name, value in user.items()
            if may_hold_secret(name) and len(text := str(value)) >= _MIN_SECRET_CHARS
        ]
        self._former_secrets: Sequence[str] = ()

    def adopt(self, newer: ClientSettings) -> None:
        """Take over the settings of ``newer``.

        The previous secrets are still redacted, because clients that use them are still open.
        """
        self._former_secrets = (*self._secrets, *self._file_values.values())
        self._creation, self._user, self._files = newer._creation, newer._user, newer._files
        self._tokens = newer._tokens
        self._secrets, self._file_values = newer._secrets, newer._file_values

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
    def authorities(self) -> str | None:
        """Return the path of the certificate authorities, or None if it is not set."""
        found = self._user.get("ssl.ca.location")
        return None if found is None else str(found)

    @property
    def max_record_bytes(self) -> int | None:
        """Return the user's limit for records in bytes, or None if it is not set."""
        found = self._user.get("message.max.bytes")
        return None if found is None else int(found)

    def producer(self, batch_bytes: int, extra: Mapping[str, Scalar]) -> dict[str, object]:
        """Return the settings of a producer with batches of at most ``batch_bytes``.

        Raise ``ConfigurationError`` for a file that cannot be used, and if there is no token.
        """
        return {
            **DEFAULTS,
            **self._token_authorities(),
            **self._creation,
            **self._user,
            **self._read_files(),
            **self._token_callback(),
            **GUARANTEES,
            "batch.size": batch_bytes,
            **extra,
        }

    def admin(self, *, create_topics: bool) -> dict[str, object]:
        """Return the settings of an admin client, whose requests may create topics with ``create_topics``.

        Raise ``ConfigurationError`` for a file that cannot be used.
        """
        own = {"enable.idempotence": False, "allow.auto.create.topics": create_topics}
        return {
            "socket.keepalive.enable": True,
            **self._token_authorities(),
            **self._user,
            **self._read_files(),
            **self._token_callback(),
            **own,
        }

    def _token_authorities(self) -> dict[str, str]:
        """Return the setting for the system's authorities, which a token endpoint's certificate is checked with.

        The wheel's client looks for them where the machine that built it keeps them.
        """
        given = self._user.keys() | self._files.keys()
        if "sasl.oauthbearer.token.endpoint.url" not in given or "https.ca.pem" in given:
            return {}
        file = system_authorities()
        return {} if file is None else {"https.ca.location": file}

    def _token_callback(self) -> dict[str, object]:
        """Return the setting for tokens. Raise ``TokenUnavailable``, without secrets, if there is no token."""
        try:
            return {} if self._tokens is None else {"oauth_cb": self._tokens.callback()}
        except TokenUnavailable as reason:
            raise TokenUnavailable(self.redact(str(reason))) from None

    def _read_files(self) -> dict[str, str]:
        """Return the contents of the files, without the final line break."""
        self._check_locations()
        found: dict[str, str] = {}
        for name, path in self._files.items():
            try:
                with while_reading(f'producer_files."{name}"'):
                    content = read_file(path, MAX_FILE_BYTES)
                if len(content) > MAX_FILE_BYTES:
                    raise ConfigurationError(f'producer_files."{name}": {path} is larger than {MAX_FILE_BYTES} bytes')
                found[name] = content.decode().removesuffix("\n").removesuffix("\r")
            except OSError as error:
                raise ConfigurationError(f'producer_files."{name}": {path}: {error.strerror}') from None
            except UnicodeDecodeError:
                raise ConfigurationError(f'producer_files."{name}": {path} is not text in UTF-8') from None
            if not found[name]:
                raise ConfigurationError(f'producer_files."{name}": {path} is empty')
        self._file_values = found
        return found

    def _check_locations(self) -> None:
        """Raise ``ConfigurationError`` for a file of librdkafka's that it would wait for."""
        for name, value in self._user.items():
            if not name.endswith(".location"):
                continue
            with while_reading(f'producer."{name}"'):
                if is_stream(path := Path(str(value))):
                    raise ConfigurationError(f'producer."{name}": {value} is neither a regular file nor a directory')
                probe(path)

    def redact(self, text: str) -> str:
        """Return ``text`` without the values of secret settings."""
        for secret in (*self._secrets, *self._file_values.values(), *self._former_secrets):
            text = without(text, secret, "***", anywhere=True)
        return text

    def describe(self, error: KafkaError) -> str:
        """Return ``error`` as one line for people, without secrets."""
        return self.redact(f"{error.name()}: {error.str()}")


class ClientLog:
    """Passes librdkafka's log lines to the logger ``outbox_relay.kafka``, and keeps its last error.

    Each line has the name of the ``sink``. Repeated lines are suppressed and counted.
    """

    def __init__(self, settings: ClientSettings, sink: str = "") -> None:
        self.settings = settings
        self._logger = logging.getLogger("outbox_relay.kafka")
        self._extra = {"sink": sink} if sink else {}
        self._lines = RepeatFilter()
        self._troubles = RepeatFilter()
        self.last_error: str | None = None
        self.trouble: str | None = None
        """Why no broker is reachable, or None. Rewordings replace it as rarely as log lines repeat."""
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
        if (shown := self._lines.filter(line, time.monotonic())) is not None:
            self._logger.log(level, "%s", shown, extra=self._extra)

    def failed(self, error: KafkaError) -> None:
        """Keep ``error``, which the client reports for a connection or another cause without a record."""
        # "All brokers down" is reported after the reason for it, such as a refused password.
        if self.last_error is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last_error = self.settings.describe(error)

    def unreachable(self, error: KafkaError) -> None:
        """Keep ``error`` and show it as trouble. Producers call this until they reach a broker."""
        self.failed(error)
        # After a fatal error the sink replaces the producer.
        if not error.fatal() and self._troubles.filter(self.last_error or "", time.monotonic()) is not None:
            self.trouble = self.last_error

    def clear(self) -> None:
        """Clear the last error and the trouble, because records are acknowledged."""
        self.last_error = None
        self.clear_trouble()

    def clear_trouble(self) -> None:
        """Clear the trouble, because a broker is connected or no client is left that could find out."""
        if self.trouble is not None:
            self.trouble, self._troubles = None, RepeatFilter()

    def callbacks(self) -> dict[str, Callable[[KafkaError], None]]:
        """Return the settings by which a client reports its errors here."""
        return {"error_cb": self.failed}

    def explain(self, reason: str) -> str:
        """Return ``reason`` with the client's last error, unless that is included. Blocks for at most 2 s."""
        if self.last_error is None or self.last_error in reason:
            return reason
        cause = with_certificate_error(self.last_error, self.settings.authorities, self.settings.reader)
        return f"{reason}; the client's last error: {cause}"


def error_of(exception: KafkaException) -> KafkaError:
    """Return the error of a ``KafkaException``."""
    return cast("KafkaError", exception.args[0])
