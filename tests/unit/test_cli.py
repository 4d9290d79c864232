"""The command line without a database: what it takes, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from outbox_relay import cli
from outbox_relay.cli import service
from outbox_relay.cli.parser import build
from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable
from outbox_relay.settings import Settings
from outbox_relay.settings.schema import SHIPPED
from outbox_relay.workbench.embedded.ports import free_port
from tests.docs.parsing import parsers
from tests.support.command import inside
from tests.support.wait import until

DATABASE_COMMANDS: list[tuple[str, ...]] = [
    ("status",),
    ("dead", "retry", "--yes"),
    ("emit", "order.created"),
    ("migrate",),
    ("run",),
]
KAFKA = """
[sinks.events]
type = "kafka"
topic = "shop"
[sinks.events.producer]
"bootstrap.servers" = "localhost:9092"
"""


def toml(directory: Path, text: str) -> Path:
    """Return a configuration."""
    file = directory / "relay.toml"
    file.write_text(text)
    return file


GROUPS = {
    "dead": ("list",),
    "sinks": ("list",),
    "replay": ("show", "1"),
    "schedules": ("list",),
    "retention": ("status",),
    "config": ("show",),
    "catalogue": ("check", "shop.events"),
}
"""The groups of commands, with a command of each."""


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_common_options_may_stand_before_or_after_every_command_of_a_group(group: str, place: int) -> None:
    words = [group, *GROUPS[group]]
    found = build().parse_args([*words[:place], "-c", "relay.toml", "--dsn", "host=db", *words[place:]])
    assert (found.config, found.dsn) == (Path("relay.toml"), "host=db")


def test_help_lists_every_command_in_four_groups() -> None:
    ended = inside("--help")
    groups = re.findall(r"^([A-Z]\w+):\n((?:  .*\n)+)", ended.out, re.MULTILINE)
    assert [name for name, _ in groups] == ["Run", "Look", "Act", "Development"]
    listed = [line.split()[0] for _, lines in groups for line in lines.splitlines()]
    assert sorted(listed) == sorted({name.split()[0] for name in parsers()})
    assert len(parsers()) <= 47


def test_the_schema_of_the_file_is_printed() -> None:
    assert inside("config", "show", "--schema").json == json.loads(SHIPPED.read_text(encoding="utf-8"))


def test_run_serves_the_sinks_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[list[str]] = []

    def run(settings: Settings, read_settings: Callable[[], Settings]) -> int:
        served.extend([[*settings.sinks], [*read_settings().sinks]])
        return 0

    monkeypatch.setattr("outbox_relay.service.process.run", run)
    other = KAFKA.replace("sinks.events", "sinks.audit")
    file = toml(tmp_path, f'[database]\ndsn = "host=db"\n{KAFKA}{other}[routes]\n"*" = ["events", "audit"]\n')
    assert inside("run", "-c", file, "--sinks", "audit").code == 0
    assert served == [["audit"], ["audit"]]
    ended = inside("run", "-c", file, "--sinks", "audit,event", OUTBOX_RELAY_LOG_FORMAT="console")
    assert (ended.code, ended.err) == (2, "--sinks: there is no sink event; did you mean events?\n")


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("check", "--onlin"), "--online"),
        (("dead", "list", "--limt", "3"), "--limit"),
        (("--versoin", "status"), "--version"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest_one(words: tuple[str, ...], right: str) -> None:
    ended = inside(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith(f"; did you mean {right}?\n")


@pytest.mark.parametrize(
    "words",
    [
        ("dead", "list", "--since", "yesterday"),
        ("audit", "--since", "2026-11-23"),
        ("sinks", "seek", "crm", "--to", "tomorrow"),
        ("status", "--max-oldest", "soon"),
        ("why", "order-1"),
    ],
    ids=" ".join,
)
def test_a_wrong_value_is_answered_in_one_line(words: tuple[str, ...]) -> None:
    ended = inside(*words)
    assert (ended.code, ended.out) == (2, "")
    [line] = ended.err.splitlines()
    assert re.match(rf"outbox-relay {words[0]}\b.*: error: argument .*: should be a ", line)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("stat",),
        ("status", "extra"),
        ("status", "--max-oldest", "soon"),
        ("status", "--max-oldest", "-1"),
        ("status", "--max-oldest", "nan"),
        ("status", "--js"),
        ("why",),
        ("why", "01a1fe9a-cd39-7f81-9032-e812a3369897", "--key", "k"),
        ("why", "order-1"),
        ("pause",),
        ("emit", "t", "--header", "no-equals-sign"),
        ("emit", "t", "--uid", "7"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_says_so_on_stderr(arguments: tuple[str, ...]) -> None:
    ended = inside(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "error: " in ended.err


@pytest.mark.parametrize("command", DATABASE_COMMANDS, ids=" ".join)
def test_without_a_database_the_three_ways_to_name_one_are_named(command: tuple[str, ...]) -> None:
    ended = inside(*command)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
    for way in ("[database]", "DATABASE_URL", "--dsn"):
        assert way in ended.err


@pytest.mark.parametrize("command", DATABASE_COMMANDS[:-1], ids=" ".join)
def test_a_database_that_is_not_there_is_a_failure_in_one_line_without_the_password(command: tuple[str, ...]) -> None:
    ended = inside(*command, "--dsn", f"postgresql://relay:SECRET@127.0.0.1:{free_port()}/shop")
    assert (ended.code, ended.out) == (1, "")
    assert len(ended.err.splitlines()) == 1
    assert "SECRET" not in ended.err


@pytest.mark.parametrize("command", [*DATABASE_COMMANDS[:-1], ("check", "--online")], ids=" ".join)
@pytest.mark.parametrize("dsn", ["postgresql://relay:SECRET@127.0.0.1:port/shop", "host=127.0.0.1 pasword=SECRET"])
def test_a_malformed_dsn_is_wrong_configuration_and_is_not_repeated(command: tuple[str, ...], dsn: str) -> None:
    ended = inside(*command, "--dsn", dsn)
    assert (ended.code, ended.out) == (2, "")
    assert "SECRET" not in ended.err


@pytest.mark.parametrize("dsn", ["", " "])
def test_an_empty_dsn_is_refused_and_no_database_of_this_machine_is_used(dsn: str) -> None:
    """Goes red when a script whose variable is not set migrates the database that libpq finds by default."""
    for words in (("--dsn", dsn, "migrate"), ("migrate", "--dsn", dsn)):
        ended = inside(*words)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.splitlines()[-1].endswith("argument --dsn: is empty; name a database, or leave the option out")


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--dns", "postgresql://relay:SECRET@db/shop"),
        ("status", "postgresql://relay:SE@CRE/T@db/shop"),
        ("postgresql://relay:SECRET@db/shop", "status"),
        ("status", "host=db password=SECRET"),
        ("status", "host=db password = SECRET"),
        ("status", "host=db password = 'SECRET"),
        ("status", "host=db PASSWORD='SEC RET'"),
    ],
    ids=range(7),
)
def test_a_misplaced_dsn_is_not_repeated_with_its_password(arguments: tuple[str, ...]) -> None:
    ended = inside(*arguments)
    assert ended.code == 2
    said = ended.err.replace("SECONDS", "")  # in the usage
    for piece in ("SECRET", "SE@", "CRE", "SEC", "RET"):
        assert piece not in said


def test_check_says_that_an_archive_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, `run` ends with the same sentence. Only an import that fails stands in for its absence."""
    database = '[database]\ndsn = "postgresql://relay@localhost/shop"\n'
    file = toml(tmp_path, f'{database}[retention]\narchive = "{tmp_path}"\n')
    assert inside("check", "-c", file).code == 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ended = inside("check", "-c", file)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1] == "retention.archive: needs pip install 'outbox-relay[archive]'"


def test_check_prints_json_also_if_there_are_problems(tmp_path: Path) -> None:
    file = toml(tmp_path, KAFKA + '[routes]\n"*" = ["events"]\n')
    ended = inside("check", "--json", "-c", file)
    [warning] = [line.removeprefix("warning: ") for line in ended.err.splitlines()]
    assert (ended.code, ended.json) == (
        0,
        {"sinks": 1, "routes": 1, "problems": [], "unanswered": [], "warnings": [warning]},
    )
    file.write_text(KAFKA + '[routes]\n"*" = ["event"]\n[http]\nlisen = "x"\n')
    ended = inside("check", "--json", "-c", file)
    assert ended.code == 2
    assert ended.json["problems"] == ended.err.splitlines()
    assert len(ended.json["problems"]) == 2
    assert ended.json["sinks"] is None


NO_JSON_OPTION = {
    "health": "prints the relay's answer, which is JSON",
    "dead export": "prints JSON lines",
    "catalogue jsonschema": "prints JSON",
    "catalogue asyncapi": "prints JSON",
    "completion": "prints a script",
    "ui-user": "prints a line of a file",
    "run": "prints nothing",
    "ui": "prints nothing",
}


def test_every_command_that_prints_data_takes_json() -> None:
    options = {name: {*parser._option_string_actions} for name, parser in parsers().items()}  # pyright: ignore[reportPrivateUsage]
    assert {name for name, each in options.items() if "--json" not in each} == NO_JSON_OPTION.keys()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file or directory"), ("no dsn", 'should be "postgresql://USER@HOST:PORT/DATABASE"')],
)
def test_check_warns_of_a_dsn_file_that_cannot_be_used(tmp_path: Path, content: str | None, said: str) -> None:
    """It may exist only where the relay runs."""
    file = tmp_path / "dsn"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    ended = inside("check", "-c", toml(tmp_path, f'[database]\ndsn_file = "{file}"\n{KAFKA}'))
    assert (ended.code, f"warning: dsn_file {file}: {said}" in ended.err) == (0, True), ended.err


@pytest.mark.parametrize(
    ("payload", "said"),
    [("missing.json", "No such file"), (".", "Is a directory"), ("{a", "is not JSON"), ("a{", "- for stdin")],
)
def test_a_payload_that_cannot_be_read_is_wrong_usage(payload: str, said: str) -> None:
    ended = inside("emit", "t", "--payload", payload, "--dsn", "postgresql://relay@localhost/shop")
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


@pytest.mark.parametrize("payload", [b"", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000])
def test_a_payload_without_a_content_type_must_be_json(payload: bytes) -> None:
    ended = inside("emit", "t", "--payload", "-", "--dsn", "postgresql://relay@localhost/shop", stdin=payload)
    assert (ended.code, ended.out) == (2, "")
    assert "--content-type" in ended.err


@pytest.mark.processes
@pytest.mark.parametrize("missing", ["pydantic_settings"])
def test_a_plain_installation_is_told_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from outbox_relay.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "status", "--dsn", "postgresql://relay@localhost/shop"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "needs pip install 'outbox-relay[relay]'" in done.stderr


@pytest.mark.processes
def test_the_command_line_itself_loads_nothing_of_the_relay() -> None:
    code = "import sys, outbox_relay.cli; print([m for m in sys.modules if m.split('.')[0] in sys.argv[1:]])"
    heavy = ["psycopg", "pydantic", "structlog", "aiohttp", "confluent_kafka", "tenacity"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, check=True, timeout=60, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.processes
def test_a_relay_loads_the_clients_of_the_destinations_that_it_has() -> None:
    """Goes red when every start of a relay waits for the client of Kafka to be loaded."""
    code = "import sys, outbox_relay.service.process; print([m for m in sys.argv[1:] if m in sys.modules])"
    clients = ["confluent_kafka", "outbox_relay.sinks.kafka", "outbox_relay.sinks.python", "structlog"]
    command = [sys.executable, "-c", code, *clients]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, text=True)
    assert done.stdout.strip() == "['structlog']"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("192.0.2.1:8080", "at 192.0.2.1:8080: Cannot assign requested address: stop the process"),
    ],
)
def test_an_address_that_cannot_be_listened_at_is_named_with_the_fix(listen: str, said: str) -> None:
    command = [sys.executable, "-m", "outbox_relay", "run", "--dsn", "postgresql://relay@127.0.0.1:1/shop"]
    environ = {**os.environ, "OUTBOX_RELAY_HTTP__LISTEN": listen}
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, text=True, env=environ)
    assert done.returncode == 2
    assert f"http.listen: cannot listen {said}" in done.stderr
    assert "Traceback" not in done.stderr


HEEDS_CTRL_C = ["env", "--default-signal=INT"]
"""Tests in the background of a shell ignore SIGINT, and so would the command."""


@pytest.mark.processes
def test_ctrl_c_ends_with_130_and_without_a_traceback(tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    os.mkfifo(payload)
    emit = [sys.executable, "-m", "outbox_relay", "emit", "t", "--payload", payload, "--dsn", "postgresql:///shop"]
    command = [*HEEDS_CTRL_C, *emit]
    # Opening the other end waits until the command has opened its own.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process, payload.open("wb"):
        # One that comes right before the command reads is seen only when that returns.
        until(lambda: _ends_by(process, signal.SIGINT), seconds=60, what="the command has ended")
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert b"Traceback" not in err


def _ends_by(process: subprocess.Popen[bytes], signal_number: signal.Signals) -> bool:
    """Send a signal, and return True if the process ends soon."""
    process.send_signal(signal_number)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.processes
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [("/dev/full", 1, "the output could not be written: No space left on device\n")],
)
def test_an_output_that_takes_nothing_is_no_traceback(to: str, code: int, said: str) -> None:
    command = f"{sys.executable} -m outbox_relay config show --json --dsn postgresql:///shop >{to}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, check=False, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (code, said)


# -- health -----------------------------------------------------------------------------------------------------


@contextmanager
def listening(answer: Callable[[BaseHTTPRequestHandler], None]) -> Generator[int]:
    """Run a server on the loopback address and yield its port."""

    class Handler(BaseHTTPRequestHandler):
        do_GET = answer  # noqa: N815 - http.server's name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def saying(status: int, body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return a handler that answers GET /readyz like this, and any other path with 404."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status if request.path == "/readyz" else 404)
        request.end_headers()
        request.wfile.write(body)

    return answer


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
@pytest.mark.parametrize("host", ["0.0.0.0"])  # noqa: S104 - asked at loopback
def test_health_says_what_the_relay_says(tmp_path: Path, status: int, code: int, host: str) -> None:
    with listening(saying(status, b'{"ready": null}\n')) as port:
        ended = inside("health", "-c", toml(tmp_path, f'[http]\nlisten = "{host}:{port}"\n'))
    assert (ended.code, ended.out, ended.err) == (code, '{"ready": null}\n', "")


def test_health_fails_when_nothing_listens(tmp_path: Path) -> None:
    ended = inside("health", "-c", toml(tmp_path, f'[http]\nlisten = "[::]:{free_port()}"\n'))
    assert (ended.code, ended.out) == (1, "")
    assert "no answer from http://localhost:" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_health_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def answer(_: BaseHTTPRequestHandler) -> None:
        silent.wait(20)

    monkeypatch.setattr(service, "HEALTH_SECONDS", 0.2)
    with listening(answer) as port:
        assert cli.main(["health", "-c", str(toml(tmp_path, f'[http]\nlisten = "127.0.0.1:{port}"\n'))]) == 1
        silent.set()


@pytest.mark.parametrize(("text", "said"), [("", "[http]"), ('[http]\nlisten = "127.0.0.1:0"\n', "port 0")])
def test_health_without_an_address_to_ask_is_wrong_configuration(tmp_path: Path, text: str, said: str) -> None:
    ended = inside("health", "-c", toml(tmp_path, text))
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_an_error_that_ends_run_is_a_line_of_its_log(tmp_path: Path) -> None:
    """In JSON, whatever it is about; on a console as a sentence."""
    file = toml(tmp_path, KAFKA.replace('topic = "shop"', 'topic = "shop"\ntopik = "shop"'))
    for log_format in ("", "json"):
        ended = inside("run", "-c", file, OUTBOX_RELAY_LOG_FORMAT=log_format)
        line = json.loads(ended.err)
        assert (ended.code, line["level"], line["event"]) == (2, "critical", "relay.failed")
        assert "there is no such setting" in line["reason"]
    plain = inside("run", "-c", file, OUTBOX_RELAY_LOG_FORMAT="console")
    assert (plain.code, plain.err) == (2, f"{line['reason']}\n")


@pytest.mark.parametrize(
    ("error", "code", "event"),
    [
        (ConfigurationError("a wrong setting"), 2, "relay.failed"),
        (DatabaseUnavailable("away"), 1, "relay.failed"),
        (ModuleNotFoundError("No module named 'confluent_kafka'", name="confluent_kafka"), 2, "relay.failed"),
        (KeyError("a defect"), 1, "relay.crashed"),
    ],
    ids=["configuration", "database", "package", "defect"],
)
def test_whatever_ends_run_is_a_line_in_json_with_the_fields_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, event: str
) -> None:
    """An error of the process is simulated: there is no known way to cause a defect."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("outbox_relay.service.process.run", fail)
    file = toml(tmp_path, f'[database]\ndsn = "host=127.0.0.1"\n{KAFKA}\n[routes]\n"*" = ["events"]\n')
    ended = inside("run", "-c", file, OUTBOX_RELAY_LOG_FORMAT="json")
    line = json.loads(ended.err)
    assert (ended.code, line["level"], line["event"]) == (code, "critical", event)
    assert {"time", "logger", "message", "reason"} <= line.keys()
    assert ("exception" in line) == (event == "relay.crashed")
