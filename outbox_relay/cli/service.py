"""Commands of the relay process: check, run, health, config show."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import names
from outbox_relay.cli.command import add_command, add_group, counted, load_settings
from outbox_relay.cli.output import DONE, FAILED, USAGE, exit_code, keep_libraries_quiet, missing_package, say
from outbox_relay.domain.errors import ConfigurationError, RelayError

if TYPE_CHECKING:
    from outbox_relay.settings import Settings

HEALTH_SECONDS = 3.0
"""Time limit for the answer of a running relay."""
HEALTH_BYTES = 1 << 20
"""Maximum number of bytes read of its answer."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    check = add_command(commands, "check", _check, "validate the configuration", "json")
    check.add_argument("--online", action="store_true", help="also connect to the database and to every sink")
    run = add_command(commands, "run", _serve, "relay in the foreground until SIGTERM or SIGINT")
    about = "serve only these sinks of the configuration; another relay serves the others"
    run.add_argument("--sinks", type=names, metavar="A,B", default=(), help=about)
    add_command(commands, "health", _health, "ask the running relay whether it is ready", with_dsn=False)
    actions = add_group(commands, "config", "show the settings in effect")
    shown = add_command(actions, "show", _show, "show every setting in effect; secrets as …", "json")
    about = "print the JSON Schema of the file instead, by which editors complete it"
    shown.add_argument("--schema", action="store_true", help=about)


def _check(arguments: argparse.Namespace) -> int:
    from outbox_relay import settings
    from outbox_relay.service import check, webhooks

    try:
        loaded = load_settings(arguments)
    except ConfigurationError as error:
        if arguments.json:
            print(json.dumps(_checked(problems=str(error).splitlines())))
        raise
    warnings = [*settings.warnings(loaded), *settings.exposures(loaded, os.environ)]
    if arguments.online:
        keep_libraries_quiet()
        problems, unanswered, found = check.check_online(loaded)
        warnings += found
    else:
        unanswered = []
        problems = [*check.unusable_plugins(loaded), *chain(*check.refused_values(loaded).values())]
        warnings += webhooks.unreadable(loaded)
        try:
            loaded.database.dsn()
        except ConfigurationError as error:
            warnings.append(str(error))
    problems = [*settings.dsn_faults(loaded), *check.missing_for_archive(loaded), *problems]
    for warning in warnings:
        say(f"warning: {warning}")
    for problem in [*unanswered, *problems]:
        say(problem)
    if arguments.json:
        print(json.dumps(_checked(loaded, problems, unanswered, warnings)))
    if problems or unanswered:
        return USAGE if problems else FAILED
    if not arguments.json:
        checked = f"{counted(len(loaded.sinks), 'sink')} and {counted(len(loaded.routes.table), 'route')}"
        print(f"{checked}: {counted(len(warnings), 'warning')}" if warnings else f"no problem found in {checked}")
    return DONE


def _checked(
    loaded: Settings | None = None,
    problems: Sequence[str] = (),
    unanswered: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the result of a check as JSON. Without settings, which could not be read, their numbers are None."""
    return {
        "sinks": None if loaded is None else len(loaded.sinks),
        "routes": None if loaded is None else len(loaded.routes.table),
        "problems": list(problems),
        "unanswered": list(unanswered),
        "warnings": list(warnings),
    }


def _serve(arguments: argparse.Namespace) -> int:
    from outbox_relay import settings
    from outbox_relay.service import logs, process

    terminal = sys.stderr.isatty()
    log_format = settings.log_format(os.environ, terminal=terminal)
    logs.configure("info", log_format, colors=_colors())
    try:
        log = settings.log_settings(os.environ, terminal=terminal)
        logs.configure(log.level, log.format, colors=_colors())
        loaded = settings.serving(load_settings(arguments), arguments.sinks)
        loaded.database.require_dsn()
        for warning in settings.warnings(loaded):
            logs.logger().warning("config.warning", reason=warning)
        return process.run(loaded, lambda: settings.serving(load_settings(arguments), arguments.sinks))
    except Exception as error:
        if log_format != "json":
            raise
        return _log_failure(error, arguments)


def _log_failure(error: Exception, arguments: argparse.Namespace) -> int:
    """Write the error that ended the relay as a line of its log, and return the exit code."""
    from outbox_relay.service import logs

    match error:
        case RelayError():
            logs.logger().critical("relay.failed", reason=str(error))
            return exit_code(error)
        case ImportError() if not (error.name or "").startswith("outbox_relay"):
            logs.logger().critical("relay.failed", reason=missing_package(error, arguments.command, arguments.extra))
            return USAGE
        case _:
            logs.logger().critical("relay.crashed", reason=logs.reason(error), exc_info=error)
            return FAILED


def _colors() -> bool:
    """Return True if stderr is a terminal that may be given colors (https://no-color.org)."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _health(arguments: argparse.Namespace) -> int:
    import http.client
    import urllib.error
    import urllib.request

    address = load_settings(arguments).http.address
    if address is None:
        raise ConfigurationError('there is no listener to ask: set listen = "127.0.0.1:8080" in [http]')
    host, port = address
    if port == 0:
        raise ConfigurationError("http.listen: port 0 means any free port, which cannot be asked: name a port")
    host = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)  # noqa: S104 - listens anywhere, asked at loopback
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/readyz"
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=HEALTH_SECONDS) as answer:
            status, body = DONE, answer.read(HEALTH_BYTES)
    except urllib.error.HTTPError as error:
        status, body = FAILED, error.read(HEALTH_BYTES)
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        say(f"no answer from {url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
        return FAILED
    print(body.decode(errors="replace").rstrip("\n"))
    return status


def _show(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        from outbox_relay.settings.schema import json_schema

        print(json.dumps(json_schema(), indent=1))
        return DONE
    from outbox_relay.settings.effective import shown

    found = shown(load_settings(arguments))
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in found.items())
    print(json.dumps(found) if arguments.json else "\n".join(lines))
    return DONE
