"""The command catalogue: the events that a module of the application declares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outbox_relay.cli.arguments import integer_between, text
from outbox_relay.cli.command import add_command, add_group, print_result, query
from outbox_relay.cli.output import DONE, FAILED, say

NEWEST, NEWEST_MOST = 100, 10_000
LOOK_BACK, LOOK_BACK_MOST = 10_000, 1_000_000


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "catalogue", "print and check the events that a module of an application declares")
    schema = add_command(actions, "jsonschema", _jsonschema, "print one JSON Schema with every event", with_dsn=False)
    document = add_command(actions, "asyncapi", _asyncapi, "print an AsyncAPI 3 document of the events", with_dsn=False)
    about = "compare the newest events of the log, or a release, with a module"
    checked = add_command(actions, "check", _check, about, "json")
    for parser in (schema, document, checked):
        parser.add_argument("module", type=text, metavar="MODULE", help="the module, such as shop.events")
        parser.set_defaults(extra="catalogue")
    for parser in (schema, document):
        parser.add_argument("--title", type=text, metavar="TEXT", help="default: Events of MODULE")
    document.add_argument("--release", type=text, metavar="TEXT", default="1", help="the version; default: 1")
    document.add_argument(
        "--topic", type=text, metavar="TEXT", help="the address of channels, such as shop.{type}; default: unknown"
    )
    checked.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with a document of jsonschema instead, without a database"
    )
    for name, default, most, about in (
        ("--newest", NEWEST, NEWEST_MOST, "events of each type that are compared"),
        ("--look-back", LOOK_BACK, LOOK_BACK_MOST, "newest events of the log that are searched for them"),
    ):
        help_text = f"{about}, 1 to {most}; default: {default}"
        checked.add_argument(name, type=integer_between(1, most), metavar="N", default=default, help=help_text)


def _jsonschema(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import catalogue

    print(json.dumps(catalogue.document(arguments.module, arguments.title), indent=2))
    return DONE


def _asyncapi(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import catalogue
    from outbox_relay.catalogue.documents import asyncapi

    declared = catalogue.load(arguments.module)
    title = arguments.title or f"Events of {arguments.module}"
    catalogue.schema_of(declared, title)
    print(json.dumps(asyncapi(declared, title, arguments.release, arguments.topic), indent=2))
    return DONE


def _check(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import catalogue
    from outbox_relay.catalogue.conformity import PayloadValidator

    if arguments.against is not None:
        changes = catalogue.against(arguments.module, arguments.against)
        print_result(
            arguments,
            {"changes": [vars(each) for each in changes]},
            "\n".join(map(str, changes)) or "no difference",
        )
        return DONE if all(each.additive for each in changes) else FAILED
    validator = PayloadValidator(catalogue.document(arguments.module))
    found = query(
        arguments,
        lambda store: catalogue.compare(store, validator, arguments.newest, arguments.look_back),
        grant="payloads",
    )
    print_result(arguments, found, lambda: catalogue.report_text(found))
    if found["undeclared"]:
        say(f"not in the catalogue: {', '.join(found['undeclared'])}")
    return FAILED if any(each["difference"] for each in found["types"]) else DONE
