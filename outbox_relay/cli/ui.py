"""Commands of the page: ui, ui-user."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import ipaddress
import re
import sys
from pathlib import Path
from typing import Any

from outbox_relay.cli.arguments import text
from outbox_relay.cli.command import add_command, load_database
from outbox_relay.cli.output import DONE
from outbox_relay.domain.errors import ConfigurationError

LISTEN = ("127.0.0.1", 8090)
PASSWORD_CHARS = 12
"""Least length of a new password."""
ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+")


def add(commands: Any) -> None:
    """Add the commands of this module."""
    ui = add_command(commands, "ui", _ui, "serve a page to inspect and repair sinks, exceptions and the log")
    about = "default: 127.0.0.1:8090; port 0: any free"
    ui.add_argument("--listen", dest="address", type=_address, metavar="HOST:PORT", default=LISTEN, help=about)
    ui.add_argument(
        "--auth", choices=("none", "basic", "proxy"), default="none",
        help="who may use it: anyone on this machine, users with passwords, or users named by a proxy; default: none",
    )  # fmt: skip
    for name, dest, read, metavar, default, about in (
        ("--users", "users", Path, "FILE", None, "lines NAME:ROLE:HASH, as ui-user prints them"),
        ("--token-file", "tokens", Path, "FILE", None, "lines ROLE:TOKEN, for /api with a bearer token"),
        ("--proxy-header", "proxy_header", text, "NAME", None, "the header in which the proxy names the user"),
        ("--trusted-proxies", "trusted_proxies", text, "CIDR,…", None, "networks of the proxies that are trusted"),
        ("--root-path", "root_path", _root_path, "PATH", "", "path at which a proxy serves the page, and removes it"),
        ("--label", "label", text, "TEXT", "", "the environment, such as production, shown on every page"),
    ):
        ui.add_argument(name, dest=dest, type=read, metavar=metavar, default=default, help=about)
    ui.add_argument("--read-only", action="store_true", help="refuse every action")
    ui.add_argument("--show-payloads", action="store_true", help="show payloads and headers to operators")
    ui.set_defaults(extra="ui")
    text_of_user = "print a line of the users' file, after asking for a password"
    user = commands.add_parser("ui-user", help=text_of_user, description=text_of_user, allow_abbrev=False)
    user.add_argument("name", type=text, metavar="NAME", help="the user's name")
    user.add_argument("role", choices=("viewer", "operator"), metavar="ROLE", help="viewer or operator")
    user.set_defaults(do=_ui_user, extra="ui")


def _address(value: str) -> tuple[str, int]:
    """Return host and port. A host is an address, or localhost."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise argparse.ArgumentTypeError("should be HOST:PORT, such as 127.0.0.1:8090")
    if host == "localhost":
        return "127.0.0.1", int(port)
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "should be an address of this machine and a port, such as 127.0.0.1:8090"
        ) from None


def _root_path(value: str) -> str:
    """Return the path without a slash at its end."""
    path = value.rstrip("/")
    if path and not ROOT_PATH.fullmatch(path):
        raise argparse.ArgumentTypeError("should be a path of letters, digits and ._~-, such as /outbox")
    return path


def _ui(arguments: argparse.Namespace) -> int:
    from outbox_relay.service import logs
    from outbox_relay.ui.server import Serving, serve

    database = load_database(arguments)
    database.require_dsn()
    logs.configure("info", "json" if not sys.stderr.isatty() else "console")
    serving = Serving(**{each.name: getattr(arguments, each.name) for each in dataclasses.fields(Serving)})
    serve(
        serving, database.dsn, pooler=database.pooler == "transaction", say=lambda address: print(address, flush=True)
    )
    return DONE


def _ui_user(arguments: argparse.Namespace) -> int:
    from outbox_relay.ui.users import hash_password, valid_name

    if not valid_name(arguments.name):
        raise ConfigurationError("a name has letters, digits and ._@+-, at most 64, and begins with a letter or digit")
    password = _password()
    if len(password) < PASSWORD_CHARS:
        raise ConfigurationError(f"a password has at least {PASSWORD_CHARS} characters")
    print(f"{arguments.name}:{arguments.role}:{hash_password(password)}")
    return DONE


def _password() -> str:
    """Return a password from the terminal, asked for twice, or from the first line of stdin."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("Password: ")
    if getpass.getpass("Again: ") != password:
        raise ConfigurationError("the passwords differ")
    return password
