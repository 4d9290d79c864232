"""Commands that change the state of the outbox: pause, resume, emit."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from outbox_relay.cli.arguments import PAYLOAD_BYTES, due, header, integer_between, text, uid
from outbox_relay.cli.command import add_command, query
from outbox_relay.cli.confirmation import actor
from outbox_relay.cli.output import DONE
from outbox_relay.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox_relay.postgres.store import Store

OBEYED = "paused; relays start no new deliveries after about 2 s and finish those in flight"
"""Relays look for a pause every second."""
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors that say that a text is not the name of a file."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    for name, do, description, reason in (
        ("pause", _pause, "pause a sink on all relays, until resume", "recorded in the audit, and shown by status"),
        ("resume", _resume, "resume a paused sink", "recorded in the audit"),
    ):
        parser = add_command(commands, name, do, description)
        parser.add_argument("sink", type=text, metavar="SINK", help="its name")
        parser.add_argument("--reason", type=text, metavar="TEXT", help=reason)
        parser.add_argument("--json", action="store_true", help="print JSON")
    emit = add_command(commands, "emit", _emit, "emit one event in a transaction of its own, and print its uid")
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
    emit.add_argument("--json", action="store_true", help="print JSON")


def _pause(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    given = {"actor": actor(), "reason": arguments.reason}
    changed = query(arguments, lambda store: admin.pause(store, arguments.sink, **given))
    return _done(arguments, f"sink {arguments.sink} is {OBEYED if changed else 'already paused'}", changed=changed)


def _resume(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    given = {"actor": actor(), "reason": arguments.reason}
    changed = query(arguments, lambda store: admin.resume(store, arguments.sink, **given))
    return _done(arguments, f"sink {arguments.sink} {'is resumed' if changed else 'was not paused'}", changed=changed)


def _done(arguments: argparse.Namespace, said: str, *, changed: bool) -> int:
    print(json.dumps({"done": int(changed), "left": 0}) if arguments.json else said)
    return DONE


def _emit(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    headers = dict(arguments.header)
    if len(headers) != len(arguments.header):
        raise ConfigurationError("--header: a name is given twice")
    payload = _payload(arguments.payload)
    if arguments.content_type is None:
        _check_json(payload)

    def emit(store: Store) -> UUID:
        return admin.emit(
            store,
            arguments.type,
            payload,
            key=arguments.key,
            headers=headers or None,
            deliver_at=arguments.deliver_at,
            content_type=arguments.content_type or "application/json",
            uid=arguments.uid,
            tenant=arguments.tenant,
            priority=arguments.priority,
            unique_key=arguments.unique_key,
        )

    found = query(arguments, emit, check_schema=False, grant="emit")
    print(json.dumps({"uid": str(found)}) if arguments.json else found)
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
