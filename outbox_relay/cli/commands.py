"""The command line: what was asked for, who does it, and with which exit code it ends.

Data goes to stdout, messages go to stderr. Whatever needs more than emitting does is imported by the command that
needs it, so that an application's plain installation gets a sentence and not a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from uuid import UUID

from outbox_relay import __version__
from outbox_relay.domain.errors import Misconfigured, NotFound, RelayError, Unusable

if TYPE_CHECKING:
    from outbox_relay.postgres.store import Store
    from outbox_relay.settings import Settings
    from outbox_relay.workbench.bench.report import Report

T = TypeVar("T")

DONE, FAILED, USAGE, NOT_FOUND = 0, 1, 2, 3
"""Exit codes; also done when there was nothing to do."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
PIPE_CLOSED = 141
"""Exit code when whoever read the output went away, as shells have it."""
HEALTH_SECONDS = 3.0
"""Longest wait for the answer of a running relay."""
HEALTH_BYTES = 1 << 20
"""Longest answer of a running relay that is read."""
PAYLOAD_LEAST, PAYLOAD_BYTES = 1 << 10, 64 << 20
"""Smallest and largest ceiling of payloads; nothing larger is read for an emit."""
LOAD_SECONDS, LOAD_LEAST, LOAD_MOST = 20, 2, 600
"""How long the demo emits events, in seconds: by default, at least, at most."""
RUNS, RUNS_MOST = 3, 100
"""How often the bench measures everything: by default, at most."""
SCALE_LEAST, SCALE_MOST = 0.0001, 100.0
"""By what the bench multiplies events and seconds: at least, at most."""

_SECRETS = re.compile(r"(?<=://)\S*@|(?<=password=)('[^']*'?|\S+)", re.IGNORECASE)
_INVALID_CHOICE = re.compile(r"invalid choice: '([\w-]+)' \(choose from (.+)\)$")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


def _run(argv: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE
    try:
        return arguments.do(arguments)
    except RelayError as error:
        _say(str(error))
        return _exit_code(error)
    except ImportError as error:
        if (error.name or "").startswith("outbox_relay"):
            raise
        reason = str(error).partition("\n")[0]
        _say(f"outbox-relay {arguments.command} needs pip install 'outbox-relay[{arguments.extra}]' ({reason})")
        return USAGE


def _exit_code(error: RelayError) -> int:
    match error:
        case NotFound():
            return NOT_FOUND
        case Misconfigured() | Unusable():
            return USAGE
        case _:
            return FAILED


def _say(message: str) -> None:
    """A message for people."""
    print(message, file=sys.stderr)


# -- what can be said -----------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose messages suggest the nearest command and repeat no password that stands in an argument."""

    def error(self, message: str) -> NoReturn:
        found = _INVALID_CHOICE.search(message)
        near = get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), 1) if found else []
        super().error(_SECRETS.sub("…", message) + (f"; did you mean {near[0]}?" if near else ""))


def _parser() -> _Parser:
    parser = _Parser(
        prog="outbox-relay",
        description="Relays the events of a PostgreSQL transactional outbox to Kafka and webhooks.",
        epilog="Exit codes: 0 done, also when there was nothing to do; 1 failed; 2 wrong usage, configuration, "
        "password, rights or schema; 3 not found.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"outbox-relay {__version__}")
    _add_config(parser)
    _add_dsn(parser)
    parser.set_defaults(config=None, dsn=None, extra="relay")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_schema_commands(commands)
    _add_service_commands(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_question_commands(commands)
    _add_emit(commands)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="the configuration, TOML; default: the file that OUTBOX_RELAY_CONFIG names, if any",
    )  # fmt: skip


def _add_dsn(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dsn", metavar="DSN", default=argparse.SUPPRESS,
        help='the database, "postgresql://USER@HOST:PORT/DATABASE"; wins over file and environment',
    )  # fmt: skip


def _command(
    commands: Any, name: str, do: Callable[[argparse.Namespace], int], text: str, *, dsn: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    _add_config(parser)
    if dsn:
        _add_dsn(parser)
    parser.set_defaults(do=do)
    return parser


def _add_schema_commands(commands: Any) -> None:
    migrate = _command(commands, "migrate", _migrate, "create or upgrade schema outbox")
    migrate.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    for option, who in (("--grant-emit", "a role of an application"), ("--grant-relay", "the role of the relay")):
        migrate.add_argument(option, metavar="ROLE", action="append", default=[], help=f"grant {who} what it needs")
    migrate.add_argument(
        "--max-payload-bytes", type=_number_of_bytes, metavar="N",
        help=f"the largest payload that can be emitted, {PAYLOAD_LEAST} to {PAYLOAD_BYTES}; it stays until set again",
    )  # fmt: skip
    migrate.add_argument("--debezium", action="store_true", help="make outbox.adopt_debezium too (docs/debezium.md)")

    text = "after a restore into another cluster: make the log's numbers this server's; while no relay runs"
    _command(commands, "rebase", _rebase, text)


def _add_service_commands(commands: Any) -> None:
    check = _command(commands, "check", _check, "is the configuration right")
    check.add_argument("--online", action="store_true", help="ask the database and every sink too")
    _command(commands, "run", _serve, "relay in the foreground, until SIGTERM or SIGINT")
    _command(commands, "health", _health, "ask the running relay whether it is ready", dsn=False)


def _add_demo(commands: Any) -> None:
    text = "see it work: database, broker, receiver, relays and load on this machine, nothing installed, nothing left"
    demo: argparse.ArgumentParser = commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    demo.add_argument(
        "--seconds", type=_load_seconds, default=LOAD_SECONDS, metavar="N",
        help=f"how long events are emitted, {LOAD_LEAST} to {LOAD_MOST}; default: {LOAD_SECONDS}",
    )  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print the report as JSON")
    demo.set_defaults(do=_demo, extra="demo")


def _add_bench(commands: Any) -> None:
    text = "how fast it is on this machine, beside a bare loop in the same run; servers are started or given"
    bench: argparse.ArgumentParser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    _add_dsn(bench)
    size = bench.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the main scenarios, small, in 3 minutes; the default")
    size.add_argument("--full", action="store_true", help="every scenario, large; about an hour")
    bench.add_argument("--only", nargs="+", metavar="SCENARIO", default=[], help="these scenarios, in either size")
    for name, (read, default, text) in {
        "--runs": (_number_of_runs, RUNS, f"how often everything is measured, 1 to {RUNS_MOST}; default: {RUNS}"),
        "--scale": (_scale, 1.0, f"multiply all events and seconds, {SCALE_LEAST:g} to {SCALE_MOST:g}; default: 1"),
    }.items():
        bench.add_argument(name, type=read, default=default, metavar="N", help=text)
    bench.add_argument("--bootstrap", metavar="SERVERS", help="a broker that is there already, HOST:PORT,…")
    bench.add_argument("--broker", metavar="NAME", help="what the report calls that broker, such as its version")
    bench.add_argument("--fsync", action="store_true", help="let the database that is started flush at each commit")
    bench.add_argument("--json", action="store_true", help="print the report as JSON")
    bench.add_argument("--plot", type=Path, metavar="DIR", help="write pictures of the report into this directory, SVG")
    bench.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: show a report that --json printed")
    bench.set_defaults(do=_bench, extra="demo")


def _add_question_commands(commands: Any) -> None:
    status = _command(commands, "status", _status, "how far every sink is, and which relays are alive")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument(
        "--max-oldest", type=_number_of_seconds, metavar="SECONDS",
        help="exit with 1 when the oldest event that a sink has not settled is older",
    )  # fmt: skip
    why = _command(commands, "why", _why, "where an event is, sink by sink, and what it waits for")
    why.add_argument("uid", type=_uid, metavar="UID", help="what emit returned")
    why.add_argument("--json", action="store_true", help="print JSON")
    for name, do, text in (
        ("pause", _pause, "deliver nothing more to a sink; stored in the database, obeyed by all relays"),
        ("resume", _resume, "go on with a paused sink"),
    ):
        _command(commands, name, do, text).add_argument("sink", type=_text, metavar="SINK", help="the sink's name")


def _add_emit(commands: Any) -> None:
    emit = _command(commands, "emit", _emit, "emit one event, in a transaction of its own, and print its uid")
    emit.add_argument("type", type=_text, metavar="TYPE", help="the event's type, such as order.created")
    emit.add_argument("--key", type=_text, help="events of one key are delivered in order")
    emit.add_argument("--payload", metavar="FILE", help="the payload, byte for byte; - is stdin; default: {}")
    emit.add_argument("--header", type=_header, metavar="NAME=VALUE", action="append", default=[], help="a header")
    emit.add_argument("--content-type", type=_text, metavar="TYPE", help="default: application/json, which is checked")
    emit.add_argument("--uid", type=_uid, help="an idempotency key of your own: a second emit does nothing")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8") from None
    return value


def _uid(value: str) -> UUID:
    try:
        return UUID(value)
    except ValueError:
        raise argparse.ArgumentTypeError("should be a UUID, as emit returned it") from None


def _header(value: str) -> tuple[str, str]:
    name, equals, content = _text(value).partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("should be NAME=VALUE")
    return name, content


def _number_of_seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError("should be a number of seconds, 0 or more")
    return seconds


def _number_of_bytes(value: str) -> int:
    digits = value.isascii() and value.isdigit() and len(value) < 12
    if not (digits and PAYLOAD_LEAST <= int(value) <= PAYLOAD_BYTES):
        raise argparse.ArgumentTypeError(f"should be a number of bytes, {PAYLOAD_LEAST} to {PAYLOAD_BYTES}")
    return int(value)


def _load_seconds(value: str) -> float:
    seconds = _number_of_seconds(value)
    if not LOAD_LEAST <= seconds <= LOAD_MOST:
        raise argparse.ArgumentTypeError(f"should be a number of seconds, {LOAD_LEAST} to {LOAD_MOST}")
    return seconds


def _number_of_runs(value: str) -> int:
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= RUNS_MOST):
        raise argparse.ArgumentTypeError(f"should be a number, 1 to {RUNS_MOST}")
    return int(value)


def _scale(value: str) -> float:
    try:
        scale = float(value)
    except ValueError:
        scale = math.nan
    if not SCALE_LEAST <= scale <= SCALE_MOST:
        raise argparse.ArgumentTypeError(f"should be a number, {SCALE_LEAST:g} to {SCALE_MOST:g}")
    return scale


# -- schema and service -----------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> Settings:
    from outbox_relay import settings

    return settings.load(arguments.config, os.environ, arguments.dsn)


def _migrate(arguments: argparse.Namespace) -> int:
    from outbox_relay.postgres import migrations

    grants = {"grant_emit": arguments.grant_emit, "grant_relay": arguments.grant_relay}
    options = {"debezium": arguments.debezium, "max_payload_bytes": arguments.max_payload_bytes}
    if arguments.sql:
        print(migrations.script(**grants, **options), end="")
        return DONE
    print(migrations.migrate(_owner_dsn(arguments), **grants, **options))
    return DONE


def _owner_dsn(arguments: argparse.Namespace) -> str:
    """The database whose schema is to be changed: by --dsn alone no settings are looked at."""
    if arguments.dsn is not None and arguments.config is None:
        return arguments.dsn
    return _settings(arguments).database.dsn()


def _rebase(arguments: argparse.Namespace) -> int:
    from outbox_relay.postgres import migrations

    floor = migrations.rebase(_owner_dsn(arguments))
    print(f"rebased: ids go on above {floor}; relays may be started")
    return DONE


def _check(arguments: argparse.Namespace) -> int:
    from outbox_relay import settings
    from outbox_relay.service import app, webhooks

    loaded = _settings(arguments)
    warnings = [*settings.warnings(loaded), *settings.exposures(loaded, os.environ)]
    problems: list[str] = []
    if arguments.online:
        _keep_libraries_quiet()
        problems, found = asyncio.run(app.check_online(loaded))
        warnings += found
    else:
        warnings += webhooks.unreadable(loaded)
        try:
            loaded.database.require_dsn()
        except Misconfigured as error:
            warnings.append(str(error))
    for warning in warnings:
        _say(f"warning: {warning}")
    for problem in problems:
        _say(problem)
    if problems:
        return USAGE
    print(
        f"no problem found in {_counted(len(loaded.sinks), 'sink')} and {_counted(len(loaded.routes.table), 'route')}"
    )
    return DONE


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _serve(arguments: argparse.Namespace) -> int:
    from outbox_relay import settings
    from outbox_relay.service import app, logs

    log = settings.log_settings(os.environ, terminal=sys.stderr.isatty())
    logs.configure(log.level, log.format, colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    try:
        loaded = _settings(arguments)
        loaded.database.require_dsn()
        for warning in settings.warnings(loaded):
            logs.logger().warning("the configuration is allowed, but may not be what was meant", reason=warning)
        return app.run(loaded, lambda: _settings(arguments))
    except RelayError as error:
        if log.format != "json":
            raise
        logs.logger().critical("the relay cannot run", reason=str(error))
        return _exit_code(error)


def _health(arguments: argparse.Namespace) -> int:
    address = _settings(arguments).http.address
    if address is None:
        raise Misconfigured('there is nothing to ask: set listen = "127.0.0.1:8080" in [http]')
    host, port = address
    if port == 0:
        raise Misconfigured("http.listen: port 0 is any free one, which cannot be asked: name a port")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - any address, which is asked at loopback
    try:
        status, body = _get(host, port, "/readyz")
    except (OSError, http.client.HTTPException) as error:
        shown = f"[{host}]" if ":" in host else host
        _say(f"no answer from http://{shown}:{port}/readyz: {error or type(error).__name__}")
        return FAILED
    print(body)
    return DONE if status == http.client.OK else FAILED


def _get(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET, all within ``HEALTH_SECONDS``. Raises OSError or HTTPException."""
    until = time.monotonic() + HEALTH_SECONDS
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(max(0.001, until - time.monotonic()))
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(HEALTH_BYTES)
    finally:
        connection.close()
    return answer.status, body.decode(errors="replace").rstrip("\n")


def _demo(arguments: argparse.Namespace) -> int:
    from outbox_relay.workbench.demo import story

    report = story.run(arguments.seconds)
    print(json.dumps(report.json()) if arguments.json else report.text())
    return DONE if report.sound else FAILED


def _bench(arguments: argparse.Namespace) -> int:
    from outbox_relay.workbench.bench import files

    report = files.read(arguments.read) if arguments.read else _measured(arguments)
    if arguments.plot:
        _say(f"{files.draw(report, arguments.plot)} pictures in {arguments.plot}")
    print(json.dumps(report.json()) if arguments.json else report.text())
    return DONE if report.complete else FAILED


def _measured(arguments: argparse.Namespace) -> Report:
    from outbox_relay.workbench.bench import story

    options = story.Options(
        full=arguments.full,
        scale=arguments.scale,
        dsn=arguments.dsn,
        bootstrap=arguments.bootstrap,
        broker=arguments.broker,
        fsync=arguments.fsync,
    )
    return story.run(options, arguments.only, arguments.runs)


# -- questions and switches -------------------------------------------------------------------------------------


def _ask(arguments: argparse.Namespace, question: Callable[[Store], Awaitable[T]], *, schema: bool = True) -> T:
    """The answer to ``question``, asked over a connection of its own. Without ``schema`` that is not looked at."""
    from outbox_relay import admin
    from outbox_relay.postgres import migrations

    database = _settings(arguments).database
    database.require_dsn()
    _keep_libraries_quiet()

    async def ask() -> T:
        fit = migrations.fit if schema else None
        async with admin.opened(database.dsn, pooler=database.pooler == "transaction", fit=fit) as store:
            return await question(store)

    return asyncio.run(ask())


def _keep_libraries_quiet() -> None:
    """What went wrong is said once, by us."""
    logging.getLogger().addHandler(logging.NullHandler())


def _status(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    found = _ask(arguments, admin.status)
    print(json.dumps(found) if arguments.json else admin.status_text(found))
    late = admin.too_old(found, arguments.max_oldest) if arguments.max_oldest is not None else []
    for line in late:
        _say(line)
    return FAILED if late else DONE


def _why(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    found = _ask(arguments, lambda store: admin.why(store, arguments.uid))
    print(json.dumps(found) if arguments.json else admin.why_text(found))
    return DONE


def _pause(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    changed = _ask(arguments, lambda store: admin.pause(store, arguments.sink))
    print(f"sink {arguments.sink} is {'paused' if changed else 'already paused'}")
    return DONE


def _resume(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    changed = _ask(arguments, lambda store: admin.resume(store, arguments.sink))
    print(f"sink {arguments.sink} {'goes on' if changed else 'was not paused'}")
    return DONE


def _emit(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    headers = dict(arguments.header)
    if len(headers) != len(arguments.header):
        raise Misconfigured("--header: a name is given twice")
    payload = _payload(arguments.payload)
    if arguments.content_type is None:
        _check_json(payload)

    async def emit(store: Store) -> UUID:
        return await admin.emit(
            store,
            arguments.type,
            payload,
            key=arguments.key,
            headers=headers or None,
            content_type=arguments.content_type or "application/json",
            uid=arguments.uid,
        )

    print(_ask(arguments, emit, schema=False))
    return DONE


def _payload(name: str | None) -> bytes:
    if name is None:
        return b"{}"
    try:
        if name == "-":
            payload = sys.stdin.buffer.read(PAYLOAD_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                payload = file.read(PAYLOAD_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"--payload {name}: {error.strerror}") from None
    if len(payload) > PAYLOAD_BYTES:
        raise Misconfigured(f"--payload {name}: is larger than {PAYLOAD_BYTES} bytes")
    return payload


def _check_json(payload: bytes) -> None:
    try:
        json.loads(payload, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Misconfigured("the payload is not JSON: say what it is with --content-type, or mend it") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON knows no {name}")
