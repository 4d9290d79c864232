"""What librdkafka is told: our defaults, the user's settings, and what no setting may undo."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from confluent_kafka import KafkaError, KafkaException

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.sinks.kafka.certificate_errors import diagnosed
from outbox_relay.sinks.kafka.repeat_filter import RepeatFilter

Scalar: TypeAlias = str | int | float | bool

BATCH_BYTES = 990_000
"""The largest batch, in bytes, unless the user says otherwise: what a topic takes that nobody gave another limit."""
LINGER_MS = 10
"""How long a record waits for others of its partition while more are handed over, unless the user says otherwise."""
FILE_BYTES = 65_536
"""Largest file that holds a setting, in bytes."""

DEFAULTS: Mapping[str, Scalar] = {
    # Places keys as Java clients do. Records without a key are spread; plain murmur2 puts them all in one partition.
    "partitioner": "murmur2_random",
    # While more comes, few large requests; the last records handed over do not wait for company (``RecordProducer.hurry``).
    "linger.ms": LINGER_MS,
    "socket.keepalive.enable": True,
    # A broker that comes back is found within a second; librdkafka itself waits up to ten.
    "reconnect.backoff.max.ms": 1_000,
    # The most that two calls of the sink hand over, and the most memory they take before the sink waits for room.
    "queue.buffering.max.messages": 10_000,
    "queue.buffering.max.kbytes": 131_072,
    # The topic's limit decides what is too large, not the client; below socket.request.max.bytes of brokers, which
    # close the connection of whoever sends more.
    "message.max.bytes": 100_000_000,
    "statistics.interval.ms": 5_000,
}
"""What the sink sets unless the user's settings say otherwise."""

GUARANTEES: Mapping[str, Scalar] = {
    "enable.idempotence": True,
    "acks": "all",
    # librdkafka never gives up by itself: what it gave up would be sent again behind later records of its key.
    "message.timeout.ms": 0,
    # When the first request of a partition fails and may be repeated, as it does while the partition is being made, and
    # a second one is under way, the broker takes that second one for the first, and librdkafka then counts the first as
    # delivered: it would be lost.
    "max.in.flight.requests.per.connection": 1,
    # A request that fails for good ends the producer. Otherwise librdkafka sends the next requests of the partition,
    # and they overtake the mates of a record that was refused.
    "enable.gapless.guarantee": True,
    "delivery.report.only.error": False,
}
"""What keeps order and loses nothing; set last."""

LINGERS = {"linger.ms", "queue.buffering.max.ms"}
"""The two names of how long records wait for others."""
ALIASES = ("request.required.acks", "delivery.timeout.ms", "max.in.flight")
"""Other names of settings in ``GUARANTEES``: left out, so that the order of settings decides nothing."""

ONE_AT_A_TIME: Mapping[str, Scalar] = {
    "batch.num.messages": 1,
    "linger.ms": 0,
    "max.in.flight.requests.per.connection": 1,
    # With one request under way nothing can overtake, and a refused record need not end the producer.
    "enable.gapless.guarantee": False,
}
"""On top of the others, for records that are sent alone."""

_SECRET = ("password", "secret", "pem", "jaas", "token", "private", "sasl.oauthbearer.config", "ssl.key")
_LEAST_SECRET_CHARS = 3
_NOISE = ("enable.gapless.guarantee is experimental", "failed: Local: Purged in flight")
_HANDLED = "unable to satisfy gap-less guarantee"


class ClientSettings:
    """The settings of one sink's clients, made from those in its table ``producer``.

    ``files`` are settings whose values stand in files, each read again whenever a client is made. ``creates`` says that
    the sink creates topics, and no broker shall do it by itself.
    """

    def __init__(
        self, user: Mapping[str, Scalar], files: Mapping[str, Path] | None = None, *, creates: bool = False
    ) -> None:
        self._asking: Mapping[str, Scalar] = {"allow.auto.create.topics": False} if creates else {}
        self._user = {name: value for name, value in user.items() if name not in ALIASES}
        self._files = dict(files or {})
        self._of_files: dict[str, str] = {}
        self._secrets = [
            text
            for name, value in user.items()
            if any(part in name for part in _SECRET) and len(text := str(value)) >= _LEAST_SECRET_CHARS
        ]
        self._former: Sequence[str] = ()

    def adopt(self, newer: ClientSettings) -> None:
        """Be as ``newer`` is from now on. What was secret until now is still redacted: clients that use it live on."""
        self._former = (*self._secrets, *self._of_files.values())
        self._asking, self._user, self._files = newer._asking, newer._user, newer._files
        self._secrets, self._of_files = newer._secrets, newer._of_files

    @property
    def batch_bytes(self) -> int:
        """The largest batch that is made, in bytes."""
        return int(self._user.get("batch.size", BATCH_BYTES))

    @property
    def hurries(self) -> bool:
        """Whether the last records handed over may go out at once: the user has not said how long they wait."""
        return LINGERS.isdisjoint(self._user)

    @property
    def compresses(self) -> bool:
        """Whether a record may be smaller on its way than its payload."""
        codec = self._user.get("compression.type", self._user.get("compression.codec", "none"))
        return str(codec) != "none"

    @property
    def authorities(self) -> str | None:
        """Where the certificates of authorities are, if that was said."""
        found = self._user.get("ssl.ca.location")
        return None if found is None else str(found)

    @property
    def record_bytes(self) -> int | None:
        """The largest record that the user wants to send, in bytes, if that was said."""
        found = self._user.get("message.max.bytes")
        return None if found is None else int(found)

    def producer(self, batch_bytes: int, extra: Mapping[str, Scalar]) -> dict[str, object]:
        """The settings of a producer whose batches stay within ``batch_bytes``. Raises ``Misconfigured`` for a file."""
        return {
            **DEFAULTS,
            **self._asking,
            **self._user,
            **self._read(),
            **GUARANTEES,
            "batch.size": batch_bytes,
            **extra,
        }

    def admin(self, *, create_topics: bool) -> dict[str, object]:
        """The settings of a client that only asks; ``create_topics``: asking may make the broker create a topic.

        Raises ``Misconfigured`` for a file.
        """
        own = {"enable.idempotence": False, "allow.auto.create.topics": create_topics}
        return {"socket.keepalive.enable": True, **self._user, **self._read(), **own}

    def _read(self) -> dict[str, str]:
        """What stands in the files, without the end of the last line."""
        found: dict[str, str] = {}
        for name, path in self._files.items():
            try:
                with path.open("rb") as file:
                    content = file.read(FILE_BYTES + 1)
                if len(content) > FILE_BYTES:
                    raise Misconfigured(f'producer_files."{name}": {path} is larger than {FILE_BYTES} bytes')
                found[name] = content.decode().removesuffix("\n").removesuffix("\r")
            except OSError as error:
                raise Misconfigured(f'producer_files."{name}": {path}: {error.strerror}') from None
            except UnicodeDecodeError:
                raise Misconfigured(f'producer_files."{name}": {path} is not text in UTF-8') from None
            if not found[name]:
                raise Misconfigured(f'producer_files."{name}": {path} is empty')
        self._of_files = found
        return found

    def redact(self, text: str) -> str:
        """``text`` without the values of settings that hold secrets."""
        for secret in (*self._secrets, *self._of_files.values(), *self._former):
            text = text.replace(secret, "***")
        return text

    def describe(self, error: KafkaError) -> str:
        """``error`` in one line for people, without secrets."""
        return self.redact(f"{error.name()}: {error.str()}")


class ClientLog:
    """librdkafka's own log lines, passed to the logger ``outbox_relay.kafka``; and its last error, kept for reasons.

    Each line has the name of the ``sink``. Lines that repeat are left out and counted.
    """

    def __init__(self, settings: ClientSettings, sink: str = "") -> None:
        self.settings = settings
        self._logger = logging.getLogger("outbox_relay.kafka")
        self._extra = {"sink": sink} if sink else {}
        self._repeats = RepeatFilter()
        self._told = RepeatFilter()
        self.last_error: str | None = None
        self.trouble: str | None = None
        """Why no broker can be reached, for people; other words for it replace it as seldom as log lines repeat."""

    def log(self, level: int, message: str, *args: object) -> None:
        """Take a line; called by the client as it would call a logger. What we caused ourselves is left out."""
        line = self.settings.redact(message % args)
        if _HANDLED in line:
            # Fatal for that producer; the sink sends the records again with another one.
            level = min(level, logging.WARNING)
        if any(noise in line for noise in _NOISE) or not self._logger.isEnabledFor(level):
            return
        if (shown := self._repeats.take(line, time.monotonic())) is not None:
            self._logger.log(level, "%s", shown, extra=self._extra)

    def failed(self, error: KafkaError) -> None:
        """Keep ``error``; called by the client for what concerns no record, such as a connection."""
        # That all brokers are down is said after the reason for it, such as a refused password.
        if self.last_error is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last_error = self.settings.describe(error)

    def unreachable(self, error: KafkaError) -> None:
        """Keep and show ``error``; called by a producer, which looks for brokers as long as none answers."""
        self.failed(error)
        # A fatal error ends the producer alone; the sink replaces it.
        if not error.fatal() and self._told.take(self.last_error or "", time.monotonic()) is not None:
            self.trouble = self.last_error

    def answered(self) -> None:
        """Forget the last error: records are acknowledged."""
        self.last_error = None
        self.forget()

    def forget(self) -> None:
        """Show no error: a broker is connected, or no client is left that could find out how it is now."""
        if self.trouble is not None:
            self.trouble, self._told = None, RepeatFilter()

    def callbacks(self) -> dict[str, Callable[[KafkaError], None]]:
        """The settings by which a client reports its errors here."""
        return {"error_cb": self.failed}

    def explain(self, reason: str) -> str:
        """``reason``, and the client's last error if there is one that it does not name. Blocks for up to 2 s."""
        if self.last_error is None or self.last_error in reason:
            return reason
        return f"{reason}; the client's last error: {diagnosed(self.last_error, self.settings.authorities)}"


def error_of(exception: KafkaException) -> KafkaError:
    """The error that a ``KafkaException`` carries."""
    return cast("KafkaError", exception.args[0])
