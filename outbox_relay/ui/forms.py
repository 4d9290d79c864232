"""Filters and fields of forms and of the API: read, checked, and written as the query of a link. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode
from uuid import UUID

from outbox_relay.admin.deliveries import STATES, Place
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.times import read_moment

FIELDS_MOST: Final = 100
TEXT_CHARS: Final = 1024
"""Maximum length of a field."""
FILTER_TEXTS: Final = ("sink", "type", "tenant", "error", "key")
FILTER_TIMES: Final = ("since", "until")
ALL: Final = "all"
"""The value of the field ``state`` that selects every state. Only a list can show them all."""
LISTED: Final = (*STATES, ALL)
KIND: Final = "kind"
"""The kind of an error without a status. If it is empty, rows without an error are meant."""
FILTER_NAMES: Final = (*FILTER_TEXTS, KIND, "status", *FILTER_TIMES, "state", "uid")
EXACT: Final = ("tenant", "error")
"""Texts that may begin or end with blanks."""
MAY_BE_EMPTY: Final = ("key", KIND)
"""Fields that may be selected by an empty value."""
KEY_HASH: Final = "key_hash"
"""The field that selects a key by its hash, as ``Keys.resolve`` finds it."""
SHOWN_NAMES: Final = (*(name for name in FILTER_NAMES if name != "key"), KEY_HASH)
"""The names that a URL may contain."""
AS_OF, COUNTED = "as_of", "counted"
"""The time of a dry run, and the number that it counted, beyond which its action does not go."""


def read_fields(body: bytes) -> dict[str, str]:
    """Return the fields of a form. Raises ``ConfigurationError`` if they cannot be read, or one is given twice."""
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=FIELDS_MOST)
    except ValueError:
        raise ConfigurationError("the form cannot be read") from None
    return single(pairs)


def single(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return fields by name. Raises ``ConfigurationError`` for one that is given twice or too long."""
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigurationError(f"{name[:40]} is given twice")
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigurationError(f"{name[:40]!a} has characters that the database cannot store")
        if len(value) > TEXT_CHARS:
            raise ConfigurationError(f"{name[:40]} has more than {TEXT_CHARS} characters")
        found[name] = value
    return found


def read_filter(fields: Mapping[str, str], states: Sequence[str] = LISTED) -> dict[str, Any]:
    """Return the filter of deliveries that ``fields`` describe. Empty fields do not count, except for a key and a kind.

    Blanks around a value do not count either, except in the texts ``EXACT``. ``states`` are those that can be selected,
    of which the first is the default.

    Raises ``ConfigurationError``, which names the field.
    """
    given = {name: value if name in EXACT else value.strip() for name, value in fields.items()}
    wanted: dict[str, Any] = {name: given[name] for name in FILTER_TEXTS if given.get(name)}
    wanted |= {name: fields[name] for name in MAY_BE_EMPTY if name in fields}  # as it is: a key may begin with a space
    if given.get(KEY_HASH):  # which must not select every key
        wanted["key"] = fields["key"]
    wanted |= {name: read_time(name, given[name]) for name in (*FILTER_TIMES, AS_OF) if given.get(name)}
    if given.get("status"):
        wanted["status"] = read_integer("status", given["status"], 0, 99_999)
    if given.get("uid"):
        wanted["uids"] = [str(read_uid(each)) for each in given["uid"].replace(",", " ").split()]
    state = given.get("state") or states[0]
    if state not in states:
        raise ConfigurationError(f"state should be one of {', '.join(states)}")
    wanted["states"] = list(STATES) if state == ALL else [state]
    return wanted


def read_integer(name: str, value: str, least: int, most: int) -> int:
    """Return an integer from ``least`` to ``most``. Raises ``ConfigurationError``."""
    if not (value.isascii() and value.isdigit() and len(value) <= 19 and least <= int(value) <= most):
        raise ConfigurationError(f"{name} should be a number, {least:,} to {most:,}")
    return int(value)


def read_uid(value: str) -> UUID:
    """Return the UUID that ``value`` spells. Raises ``ConfigurationError``."""
    try:
        return UUID(value)
    except ValueError:
        raise ConfigurationError("a uid should be a UUID, as emit returned it") from None


def read_time(name: str, value: str) -> str:
    """Return the time or age that a field names. Raises ``ConfigurationError``."""
    try:
        return read_moment(value.strip())
    except ValueError as error:
        raise ConfigurationError(f"{name} {error}") from None


def read_place(fields: Mapping[str, str]) -> Place | None:
    """Return the place where a page of a list begins, or None for the first page. Raises ``ConfigurationError``."""
    if not fields.get("before"):
        return None
    number, _, sink = fields["before"].partition("-")
    return read_integer("before", number, 0, 2**63 - 1), sink


def refuse_unknown(fields: Mapping[str, str], known: Collection[str]) -> None:
    """Raise ``ConfigurationError``, which names it, for a field that means nothing: it might be a misspelt filter."""
    for name in fields:
        if name not in known:
            raise ConfigurationError(f"{name[:40]} means nothing here; there are {', '.join(known)}")


def refuse_empty(fields: Mapping[str, str]) -> None:
    """Raise ``ConfigurationError`` for a field of a program that is empty: it would select everything."""
    for name, value in fields.items():
        is_empty = not value if name in EXACT else not value.strip()
        if is_empty and name not in MAY_BE_EMPTY:
            raise ConfigurationError(f"{name} is empty: leave it out, or name a value")


def filter_query(fields: Mapping[str, str], **changes: str | None) -> str:
    """Return the query of a link with the same filter and ``changes``; None leaves a name out. A key never is in it."""
    kept: dict[str, str | None] = {name: fields[name] for name in SHOWN_NAMES if name in fields}
    pairs = {**kept, **changes}.items()
    return urlencode([(name, value) for name, value in pairs if value or (name == KIND and value is not None)])


def group_query(fields: Mapping[str, str], group: Mapping[str, Any]) -> str:
    """Return the query of a link with the same filter that selects exactly one group of a summary."""
    status = None if group["status"] is None else str(group["status"])
    kind = (group["error"] or "") if status is None else None
    only = {"sink": group["sink"], "type": group["type"], "state": group["state"]}
    return filter_query(fields, **only, status=status, kind=kind)


def is_uid(text: str) -> bool:
    """Return True if ``text`` spells a UUID."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
