"""Types of arguments. Each raises ``ArgumentTypeError`` with the fix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from outbox_relay.domain.times import read_due, read_moment

T = TypeVar("T")
PAYLOAD_LEAST, PAYLOAD_BYTES = 1 << 10, 64 << 20
"""Smallest and largest payload ceiling, in bytes."""


def text(value: str) -> str:
    """Return ``value`` if it can be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8") from None
    return value


def dsn(value: str) -> str:
    """Return ``value`` unless it is blank: libpq would take any database that it finds on this machine."""
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty; name a database, or leave the option out")
    return value


def reason(value: str) -> str | None:
    """Return ``value`` as ``text`` does; None if it is blank."""
    return text(value).strip() or None


def uid(value: str) -> UUID:
    """Return the UUID that ``value`` spells."""
    return _told(UUID, value, "should be a UUID, as emit returned it")


def names(value: str) -> tuple[str, ...]:
    """Return names with commas between them."""
    return tuple(dict.fromkeys(name.strip() for name in text(value).split(",") if name.strip()))


def header(value: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, equals, content = text(value).partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("should be NAME=VALUE")
    return name, content


def moment(value: str) -> str:
    """Return a time as ISO 8601 with its zone, or an age such as 90s, 2h, 3d as ISO 8601 duration.

    The database subtracts an age from its own clock.
    """
    return _told(read_moment, value)


def due(value: str) -> datetime | timedelta:
    """Return a time with its zone, or a delay such as 90s, 2h, 3d, which the database adds to its own clock."""
    return _told(read_due, value)


def _told(read: Callable[[str], T], value: str, complaint: str = "") -> T:
    try:
        return read(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(complaint or str(error)) from None


def seconds(value: str) -> float:
    """Return a finite number of seconds, 0 or more."""
    return _number(value, 0, sys.float_info.max, "should be a number of seconds, 0 or more")


def seconds_between(least: float, most: float) -> Callable[[str], float]:
    """Return the type of a number of seconds from ``least`` to ``most``."""
    return lambda value: _number(value, least, most, f"should be a number of seconds, {least:g} to {most:g}")


def number_between(least: float, most: float) -> Callable[[str], float]:
    """Return the type of a number from ``least`` to ``most``."""
    return lambda value: _number(value, least, most, f"should be a number, {least:g} to {most:g}")


def integer_between(least: int, most: int, noun: str = "number") -> Callable[[str], int]:
    """Return the type of an integer from ``least`` to ``most``, in ASCII digits."""

    def read(value: str) -> int:
        unsigned = value.removeprefix("-") if least < 0 else value
        digits = value.isascii() and unsigned.isdigit() and len(value) <= len(str(most)) + 1
        if not (digits and least <= int(value) <= most):
            raise argparse.ArgumentTypeError(f"should be a {noun}, {least} to {most}")
        return int(value)

    return read


def _number(value: str, least: float, most: float, complaint: str) -> float:
    number = _told(float, value, complaint)
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(complaint)
    return number
