"""The command emit."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from outbox_relay.cli.arguments import PAYLOAD_BYTES, due, header, integer_between, text, uid
from outbox_relay.cli.command import add_command, print_result, query
from outbox_relay.cli.output import DONE
from outbox_relay.domain.errors import ConfigurationError

NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors that say that a text is not the name of a file."""


def add(commands: Any) -> None:
    """Add the command."""
    emit = add_command(commands, "emit", _emit, "emit one event in a transaction of its own, and print its uid", "json")
    emit.add_argument("type", type=text, metavar="TYPE", help="the event's type, such as order.created")
    emit.add_argument("--key", type=text, help="events of one key are delivered in order")
    emit.add_argument("--payload", metavar="FILE", help="the payload: a file, - for stdin, or JSON; default: {}")
    emit.add_argument("--header", type=header, metavar="NAME=VALUE", action="append", default=[], help="a header")
    emit.add_argument("--content-type", type=text, metavar="TYPE", help="default: application/json, which is checked")
    emit.add_argument(
        "--deliver-at", type=due, metavar="TIME", help="not before 2026-11-23T08:00:00Z, or a delay such as 15m, 2h, 3d"
    )
    emit.add_argument("--uid", type=uid, help="an idempotency key; a second emit with it does nothing")
    emit.add_argument("--tenant", type=text, help="the tenant to which the event belongs")
    emit.add_argument(
        "--priority", type=integer_between(-32768, 32767), metavar="NUMBER", help="higher ones come first; default: 0"
    )
    emit.add_argument("--unique-key", type=text, metavar="KEY", help="emit nothing while an event with it is not done")


def _emit(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    headers = dict(arguments.header)
    if len(headers) != len(arguments.header):
        raise ConfigurationError("--header: a name is given twice")
    payload = _payload(arguments.payload)
    if arguments.content_type is None:
        _check_json(payload)

    names = ("key", "deliver_at", "uid", "tenant", "priority", "unique_key")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    given |= {"headers": headers or None, "content_type": arguments.content_type or "application/json"}
    found = query(
        arguments,
        lambda store: admin.emit(store, arguments.type, payload, **given),
        check_schema=False,
        grant="emit",
    )
    print_result(arguments, {"uid": str(found)}, str(found))
    return DONE


def _payload(name: str | None) -> bytes:
    """Read a file, or stdin for ``-``, up to ``PAYLOAD_BYTES``; return what begins as JSON and is no file as it is.

    Raises ``ConfigurationError``.
    """
    if name is None:
        return b"{}"
    try:
        if name == "-":
            payload = sys.stdin.buffer.read(PAYLOAD_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                payload = file.read(PAYLOAD_BYTES + 1)
    except OSError as error:
        if error.errno not in NO_FILE or not name.lstrip().startswith(("{", "[", '"')):
            said = f"--payload {name}: {error.strerror}: name a file, - for stdin, or write the JSON itself"
            raise ConfigurationError(said) from None
        payload = os.fsencode(name)
    if len(payload) > PAYLOAD_BYTES:
        raise ConfigurationError(f"--payload {name}: is larger than {PAYLOAD_BYTES} bytes")
    return payload


def _check_json(payload: bytes) -> None:
    try:
        json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ConfigurationError("the payload is not JSON: name its type with --content-type, or correct it") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON knows no {name}")
