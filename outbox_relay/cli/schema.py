"""Commands that change the schema: migrate, rebase."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from outbox_relay.cli.arguments import PAYLOAD_BYTES, PAYLOAD_LEAST, integer_between
from outbox_relay.cli.command import add_command, by, load_database, print_result
from outbox_relay.cli.output import DONE

_GRANTS = {
    "emit": "grant a role of an application what it needs",
    "consume": "grant a role of a consumer what it needs for the inbox",
    "relay": "grant the role of the relay what it needs",
    "read": "allow a role to see status, why, audit and lists, without payloads",
    "operate": "allow a role to run the read-only commands and take every action",
    "payloads": "allow a role to run the read-only commands and view payloads",
}
"""Kinds of grants, with their help."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    migrate = add_command(commands, "migrate", _migrate, "create or upgrade the schema outbox")
    printed = migrate.add_mutually_exclusive_group()
    printed.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    printed.add_argument("--json", action="store_true", help="print JSON")
    for kind, help_text in _GRANTS.items():
        migrate.add_argument(f"--grant-{kind}", metavar="ROLE", action="append", default=[], help=help_text)
    migrate.add_argument(
        "--max-payload-bytes", type=integer_between(PAYLOAD_LEAST, PAYLOAD_BYTES, "number of bytes"), metavar="N",
        help=f"the largest payload that can be emitted, {PAYLOAD_LEAST} to {PAYLOAD_BYTES}; kept until set again",
    )  # fmt: skip
    migrate.add_argument("--inbox", action="store_true", help="accepted without effect: every schema has the inbox")
    migrate.add_argument("--debezium", action="store_true", help="create outbox.adopt_debezium too (docs/debezium.md)")
    migrate.add_argument(
        "--revoke-others", action="store_true",
        help="revoke the privileges in the schema that it names otherwise: those that migrate did not grant",
    )  # fmt: skip
    migrate.add_argument(
        "--role-settings", action="store_true",
        help="store the settings that relays need behind a pooler as defaults of their roles in this database",
    )  # fmt: skip
    text = "after a restore into another cluster, while no relay runs: adapt the log's numbers to this server"
    add_command(commands, "rebase", _rebase, text, "json", "reason")


def _migrate(arguments: argparse.Namespace) -> int:
    from outbox_relay.postgres import migrations, schema

    grants = {kind: getattr(arguments, f"grant_{kind}") for kind in _GRANTS}
    options = {
        "debezium": arguments.debezium,
        "max_payload_bytes": arguments.max_payload_bytes,
        "revoke_others": arguments.revoke_others,
        "role_settings": arguments.role_settings,
    }
    if arguments.sql:
        print(schema.script(grants=grants, **options), end="")
        return DONE
    found = migrations.migrate(_owner_dsn(arguments), grants=grants, **options)
    print_result(arguments, asdict(found), str(found))
    return DONE


def _rebase(arguments: argparse.Namespace) -> int:
    from outbox_relay.postgres import migrations

    floor = migrations.rebase(_owner_dsn(arguments), **by(arguments))
    print_result(arguments, {"new_ids_above": floor}, f"rebased: new ids start above {floor}; start the relays")
    return DONE


def _owner_dsn(arguments: argparse.Namespace) -> str:
    """Return the connection string for a change of the schema. With ``--dsn``, no settings are read."""
    return load_database(arguments).dsn() if arguments.dsn is None else arguments.dsn
