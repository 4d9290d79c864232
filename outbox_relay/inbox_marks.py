"""Marks of the inbox as parameters of ``outbox.once``, and how a delivery names its event and its consumer.

Imports the standard library.

The database checks the length of a name, also for SQL callers. These functions check only values that cannot be sent to
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol, TypeAlias, cast
from uuid import UUID

PUBLIC: Final = "outbox_relay.inbox"
"""The module under which the errors are known, such as in traces."""
REFUSED: Final = re.compile(r"outbox\.once: (?P<said>.*)", re.DOTALL)
"""The message of the database for a mark that it refuses (SQLSTATE 22023)."""
OUTSIDE: Final = (
    "once was called outside a transaction, so the event would be marked before your changes are committed; use `{}` "
    "around both"
)
"""The message of ``NoTransaction``; the remedy is put into it."""

UID_TEXT: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
REPLAY_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
KAFKA_UID, WEBHOOK_UID, REPLAY = "id", "webhook-id", "outbox-replay"
"""The headers that name an event in a Kafka record and in a webhook, and the one that names a replay in both."""
SHOWN_CHARS = 40
"""Maximum length of a refused text in a message."""

Mark: TypeAlias = tuple[str, str]
"""A consumer's name and a uid."""
Pair: TypeAlias = tuple[str, str | bytes | None]
Headers: TypeAlias = Mapping[str, str | bytes | None] | Iterable[Pair]


class InvalidMark(ValueError):
    """A consumer's name, a uid or headers that the inbox refuses; the message names the field and the fault."""

    __module__ = PUBLIC


class NoTransaction(RuntimeError):
    """``once`` was called outside a transaction: the mark would be committed before the changes of the caller."""

    __module__ = PUBLIC


class HasHeaders(Protocol):
    """A delivery: a record of a Kafka client, whose ``headers`` may be a method, or a request of a web framework."""

    @property
    def headers(self) -> Any:
        """The headers, or a method that returns them."""
        ...


# -- the mark -----------------------------------------------------------------------------------------------------


def mark_of(consumer: object, uid: object) -> Mark:
    """Return the parameters of ``outbox.once``. Raises ``InvalidMark``."""
    return _name(consumer), str(_uid(uid))


def outside(remedy: str) -> NoTransaction:
    """Return the error for a call outside a transaction."""
    return NoTransaction(OUTSIDE.format(remedy))


def refused_mark(said: str | None) -> InvalidMark | None:
    """Return the error for the database's message (SQLSTATE 22023), or None if it is not about a mark."""
    refused = REFUSED.match(said or "")
    return None if refused is None else InvalidMark(refused["said"])


def unencodable_mark(error: UnicodeEncodeError) -> InvalidMark:
    """Return the error for a name that the encoding of the connection lacks."""
    return InvalidMark(f"consumer has characters that the encoding {error.encoding} lacks")


def _name(consumer: object) -> str:
    if not isinstance(consumer, str):
        raise InvalidMark(f"consumer must be a str, not {type(consumer).__name__}")
    if "\0" in consumer:
        raise InvalidMark("consumer must not have a NUL character")
    try:
        consumer.encode()
    except UnicodeEncodeError:
        raise InvalidMark("consumer must be UTF-8; it has a lone surrogate") from None
    return consumer


def _uid(uid: object) -> UUID:
    if isinstance(uid, UUID):
        return uid
    if not isinstance(uid, str):
        raise InvalidMark(f"uid must be a uuid.UUID or a str, not {type(uid).__name__}")
    if not UID_TEXT.fullmatch(uid):
        shown = repr(uid) if len(uid) <= SHOWN_CHARS else f"{uid[:SHOWN_CHARS]!r}…"
        raise InvalidMark(f"uid must be a UUID such as '01a1fe9a-d7b3-795c-8af1-aa7f5518f66b', not {shown}")
    return UUID(uid)


# -- headers ------------------------------------------------------------------------------------------------------


def uid_of(headers: Headers | None) -> UUID:
    """Return the uid of the event that was delivered with these headers.

    Kafka clients give pairs of a name and bytes: ``id`` has the uid. Web frameworks give text: ``webhook-id`` has it.

    Raises :class:`InvalidMark` if there is none, or no UUID, or more than one.
    """
    found = _values(headers, KAFKA_UID, WEBHOOK_UID)
    if len(found) != 1:
        said = "name several events" if found else "do not name an event"
        raise InvalidMark(f"the headers {said}: a Kafka record has one id, and a webhook one webhook-id")
    return _uid(found.pop())


def consumer_of(consumer: str, headers: Headers | None) -> str:
    """Return the name for which a delivery with these headers counts.

    This is ``consumer``, or ``consumer/replay-ID`` in a replay, which delivers events again on purpose: it counts as
    another consumer.

    Raises :class:`InvalidMark` if the header ``outbox-replay`` is not the number of a replay.
    """
    found = _values(headers, REPLAY, REPLAY)
    if not found:
        return consumer
    number = found.pop()
    if found or not REPLAY_NUMBER.fullmatch(number):
        raise InvalidMark("the header outbox-replay is not the number of a replay")
    return f"{consumer}/replay-{number}"


def headers_of(message: HasHeaders) -> list[Pair]:
    """Return the headers of a delivery."""
    found = message.headers
    return _pairs(cast("Headers | None", found() if callable(found) else found))


def _pairs(headers: Headers | None) -> list[Pair]:
    """Return headers as a list. Some Kafka clients give None in place of an empty one."""
    items: Any = getattr(headers, "items", None)  # of a mapping, or of the headers of the standard library
    if callable(items):
        return list(cast("Iterable[Pair]", items()))
    return list(cast("Iterable[Pair]", headers or ()))


def _values(headers: Headers | None, in_bytes: str, in_text: str) -> set[str]:
    """Return the values of the header ``in_bytes``, if values are bytes, or ``in_text``, in upper or lower case."""
    return {
        value.decode(errors="replace") if isinstance(value, bytes) else value
        for name, value in _pairs(headers)
        if value is not None and name.lower() == (in_bytes if isinstance(value, bytes) else in_text)
    }
