"""The command line on a real database: exit codes, what goes where, and what a user's mistakes look like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.relay.calls import new_row_lease
from outbox_relay.workbench.embedded.ports import free_port
from tests.docs.parsing import parsers
from tests.support.command import Ended, inside, outbox_relay
from tests.support.database import Database
from tests.support.examples import PAGE, answer, register, same
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

NOWHERE = "01900000-0000-7000-8000-000000000000"
QUESTIONS: list[tuple[str, ...]] = [
    *(("status",), ("why", NOWHERE), ("attempts", NOWHERE), ("running",), ("pause", "s"), ("resume", "s")),
]
OPERATORS: list[tuple[str, ...]] = [("pause", "s"), ("resume", "s")]
SOME: list[tuple[str, ...]] = [*QUESTIONS[:2], ("dead", "list")]
CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"order.*" = ["events"]
"""


def ask(database: Database, *arguments: str | Path, stdin: bytes = b"") -> Ended:
    """Run a command on `database` by --dsn alone."""
    return inside(*arguments, "--dsn", database.dsn, stdin=stdin)


def refused(ended: Ended, code: int, *said: str) -> None:
    """Assert that the command wrote one line to stderr, with the problem and its fix, and nothing to stdout."""
    assert (ended.code, ended.out) == (code, ""), ended
    assert len(ended.err.splitlines()) == 1, ended.err
    for words in said:
        assert words in ended.err


# -- status, why, pause, resume, emit ---------------------------------------------------------------------------


def test_status_of_a_new_database(database: Database) -> None:
    ended = ask(database, "status", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert {"relays": [], "sinks": {}, "unrouted": []}.items() <= ended.json.items()
    ended = ask(database, "status")
    assert (ended.code, ended.err) == (0, "")
    assert "no relay is alive" in ended.out


def test_status_ends_with_1_when_a_sink_is_further_behind_than_allowed(database: Database) -> None:
    register(database, "events", "idle")
    assert ask(database, "status", "--max-oldest", "0").code == 0
    ask(database, "emit", "order.created")
    ask(database, "emit", "user.created")
    until(lambda: _oldest(database) > 1, seconds=20, what="the event is a second old")
    ended = ask(database, "status", "--json", "--max-oldest", "1")
    assert ended.code == 1
    assert ended.json["sinks"]["events"]["backlog"] == 1
    assert ended.json["unrouted"] == ["user.created"]
    assert [line.split(":")[0] for line in ended.err.splitlines()] == ["sink events", "sink idle"]
    ended = ask(database, "status", "--max-oldest", "3600")
    assert (ended.code, ended.err) == (0, "")


def _oldest(database: Database) -> float:
    with database.connect() as connection:
        row = connection.execute("select extract(epoch from now() - min(created_at)) from outbox.event").fetchone()
    return float(row[0]) if row else 0.0


BROKEN = {
    "a setting that does not exist": "[relay]\nlease_second = 3\n",
    "no TOML": "[relay\n",
    "a sink without its settings": '[sinks.crm]\ntype = "webhook"\n',
    "a pooler that is none": '[database]\npooler = "nonsense"\n',
}
COMMANDS = (
    ("status", "--json"), ("dead", "retry", "--state", "dead", "--yes"), ("retention", "status"), ("emit", "t"),
    ("pause", "events"), ("erase", "--key", "k", "--reason", "r", "--yes"), ("migrate",),
)  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_disables_no_command_that_is_given_its_database(
    database: Database, tmp_path: Path, broken: str
) -> None:
    register(database, "events")
    file = tmp_path / "relay.toml"
    file.write_text(BROKEN[broken])
    for command in COMMANDS:
        right = inside(*command, "--dsn", database.dsn)
        ended = inside(*command, "--dsn", database.dsn, "-c", file)
        assert (command, ended.code) == (command, right.code)
        assert command[0] == "migrate" or "the configuration has faults" in ended.err
        ended = inside(*command, OUTBOX_RELAY_CONFIG=str(file))
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.splitlines()[-1].endswith("with --dsn DSN, this command needs no configuration")


def test_emit_prints_the_uid_and_why_finds_it(database: Database) -> None:
    register(database, "events")
    ended = ask(database, "emit", "order.created", "--key", "order-1")
    assert (ended.code, ended.err) == (0, "")
    uid = ended.out.strip()
    assert str(UUID(uid)) == uid
    ended = ask(database, "why", uid, "--json")
    assert (ended.code, ended.err, ended.json["sinks"]["events"]["state"]) == (0, "", "pending")
    ended = ask(database, "why", uid.upper())
    assert (ended.code, ended.err) == (0, "")
    assert "events  in the log, not yet delivered (shard" in ended.out


def test_emit_stores_the_payload_byte_for_byte(database: Database, tmp_path: Path) -> None:
    payload = b' { "a" : 1.0 }\n'
    file = tmp_path / "payload"
    file.write_bytes(payload)
    own = str(uuid4())
    ask(database, "emit", "t", "--payload", file, "--header", "a=b=c", "--header", "traceparent=", "--uid", own)
    ask(database, "emit", "t", "--payload", "-", "--content-type", "application/x-bytes", stdin=b"\x00\xff")
    ask(database, "emit", "t")
    assert ask(database, "emit", "t", "--uid", own).out.strip() == own
    with database.connect() as connection:
        rows = connection.execute("select payload, content_type, headers from outbox.event order by id").fetchall()
        [(uid,)] = connection.execute("select uid::text from outbox.event order by id limit 1").fetchall()
    assert rows == [
        (payload, None, {"a": "b=c", "traceparent": ""}),
        (b"\x00\xff", "application/x-bytes", None),
        (b"{}", None, None),
    ]
    assert uid == own


@pytest.mark.parametrize(
    "arguments",
    [("order created",), ("t", "--key", "k" * 1025), ("t", "--header", "a b=c"), ("t", "--header", "a=\n")],
    ids=range(4),
)
def test_an_event_that_the_outbox_does_not_take_is_wrong_usage(database: Database, arguments: tuple[str, ...]) -> None:
    refused(ask(database, "emit", *arguments), 2)
    with database.connect() as connection:
        assert connection.execute("select count(*) from outbox.event").fetchone() == (0,)


def test_an_unknown_event_ends_with_3(database: Database) -> None:
    refused(ask(database, "why", str(uuid4())), 3, "not committed yet", "past retention")


def test_pause_and_resume_are_stored_and_may_be_repeated(database: Database) -> None:
    register(database, "events")
    said: list[str] = []
    for command in ("pause", "pause", "resume", "resume"):
        ended = ask(database, command, "events")
        assert (ended.code, ended.err) == (0, "")
        said.append(ended.out.strip())
        paused = ask(database, "status", "--json").json["sinks"]["events"]["paused"]
        assert paused == (command == "pause")
    assert said == [
        "sink events is paused; relays start no new deliveries after about 2 s and finish those in flight",
        "sink events is already paused",
        "sink events is resumed",
        "sink events was not paused",
    ]


def test_an_unknown_sink_ends_with_3_and_names_the_nearest(database: Database) -> None:
    refused(ask(database, "pause", "events"), 3, "there is none yet")
    register(database, "events", "crm")
    refused(ask(database, "pause", "event"), 3, "did you mean events?")
    refused(ask(database, "resume", "zzz"), 3, "there are: crm, events")


# -- a user's mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", SOME, ids=" ".join)
def test_a_database_without_the_schema_says_what_to_run(empty_database: Database, command: tuple[str, ...]) -> None:
    refused(ask(empty_database, *command), 2, "outbox-relay migrate")


def test_emit_and_run_without_the_schema_say_what_to_run(empty_database: Database) -> None:
    refused(ask(empty_database, "emit", "t"), 2, "outbox-relay migrate")
    ended = outbox_relay("run", "--dsn", empty_database.dsn)
    assert (ended.code, ended.out) == (2, "")
    assert "outbox-relay migrate" in ended.err


@pytest.mark.parametrize("command", [*SOME, ("emit", "t"), ("migrate",)], ids=" ".join)
def test_a_database_that_does_not_exist_is_wrong_configuration(
    postgres: PostgresServer, command: tuple[str, ...]
) -> None:
    refused(inside(*command, "--dsn", postgres.dsn("nowhere")), 2, 'database "nowhere" does not exist')


@pytest.fixture
def guarded(database: Database) -> Iterator[str]:
    """Yield a role that must give a password."""
    role = f"guarded_{uuid4().hex[:8]}"
    with database.connect(autocommit=True) as connection:
        connection.execute(f"create role {role} login password 'SECRET-RIGHT'".encode())
        database.server.require_password(role)
        yield role
        connection.execute(f"drop role {role}".encode())


@pytest.mark.parametrize("command", [*SOME, ("emit", "t"), ("migrate",), ("run",)], ids=" ".join)
def test_a_wrong_password_is_one_line_without_it(database: Database, guarded: str, command: tuple[str, ...]) -> None:
    ended = inside(*command, "--dsn", database.dsn_as(guarded, password="SECRET-WRONG"))
    assert (ended.code, ended.out) == (2, "")
    assert "password authentication failed" in ended.err
    assert "SECRET" not in ended.err


GRANTS: dict[tuple[str, ...], str] = {
    ("status",): "read",
    ("why", NOWHERE): "read",
    ("attempts", NOWHERE): "read",
    ("running",): "read",
    ("doctor",): "read",
    ("audit",): "read",
    ("dead", "list"): "read",
    ("dead", "show", NOWHERE): "read",
    ("dead", "show", NOWHERE, "--payload"): "payloads",
    ("dead", "export"): "payloads",
    ("replay", "list"): "read",
    ("sinks", "list"): "read",
    ("retention", "status"): "read",
    ("retention", "run"): "operate",
    ("retention", "run", "--dry-run"): "operate",
    ("pause", "s"): "operate",
    ("resume", "s"): "operate",
    ("dead", "retry", "--yes"): "operate",
    ("replay", "start", "--sink", "s", "--key", "k", "--yes"): "operate",
    ("sinks", "seek", "s", "--to", "now", "--yes"): "operate",
    ("erase", "--key", "k", "--reason", "r", "--yes"): "operate",
    ("emit", "t"): "emit",
}
"""The grant that a role without any right is advised to get, by command."""


@pytest.mark.parametrize("command", GRANTS, ids=" ".join)
def test_missing_rights_say_which_grant_the_command_needs(
    database: Database, guarded: str, command: tuple[str, ...]
) -> None:
    ended = inside(*command, "--dsn", database.dsn_as(guarded, password="SECRET-RIGHT"))
    refused(ended, 2, f"run outbox-relay migrate --grant-{GRANTS[command]} ROLE")


@pytest.mark.parametrize("command", SOME, ids=" ".join)
def test_a_newer_schema_is_refused(database: Database, command: tuple[str, ...]) -> None:
    with database.connect() as connection:
        connection.execute("update outbox.meta set schema_version = 9999, min_relay = 9998")
    refused(ask(database, *command), 2, "9999")


def test_a_server_that_does_not_answer_is_a_failure(database: Database) -> None:
    dsn = make_conninfo(database.dsn, port=free_port())
    for command in (*QUESTIONS, ("emit", "t"), ("migrate",)):
        refused(inside(*command, "--dsn", dsn), 1, "Connection refused")


# -- migrate ------------------------------------------------------------------------------------------------------


def test_migrate_needs_no_file_and_may_be_repeated(empty_database: Database) -> None:
    for _ in range(2):
        ended = ask(empty_database, "migrate")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.endswith("\n")
    assert ask(empty_database, "status").code == 0


def test_migrate_grants_what_emit_and_the_questions_need(empty_database: Database) -> None:
    with ExitStack() as stack:
        roles = [stack.enter_context(_role(empty_database)) for _ in range(3)]
        emitter, other, relay = roles
        grants = ("--grant-emit", emitter, "--grant-emit", other, "--grant-relay", relay)
        assert ask(empty_database, "migrate", *grants).code == 0
        for role in (emitter, other):
            ended = inside("emit", "order.created", "--dsn", empty_database.dsn_as(role))
            assert (ended.code, ended.err) == (0, "")
        register(empty_database, "s")
        for command in (("status",), ("why", ended.out.strip()), *OPERATORS):
            ended = inside(*command, "--dsn", empty_database.dsn_as(relay))
            assert (ended.code, ended.err) == (0, "")
            kind = "operate" if command in OPERATORS else "read"
            refused(inside(*command, "--dsn", empty_database.dsn_as(emitter)), 2, f"--grant-{kind} ROLE")


class _role:  # noqa: N801 - a context manager
    """A role of its own that disappears at the end."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.name = f"role_{uuid4().hex[:8]}"

    def __enter__(self) -> str:
        self._do(f"create role {self.name} login")
        return self.name

    def __exit__(self, *_: object) -> None:
        self._do(f"drop owned by {self.name}")
        self._do(f"drop role {self.name}")

    def _do(self, text: str) -> None:
        with self.database.connect(autocommit=True) as connection:
            connection.execute(text.encode())


def test_rebase_is_for_when_no_relay_runs(database: Database) -> None:
    ask(database, "emit", "order.created")
    ended = ask(database, "rebase")
    assert (ended.code, ended.out, ended.err) == (0, "rebased: new ids start above 1; start the relays\n", "")
    with database.connect() as connection:
        connection.execute(
            "insert into outbox.relay (id, name, version, sinks) values (gen_random_uuid(), 'r', '1', '{}')"
        )
    refused(ask(database, "rebase"), 2)


# -- the service --------------------------------------------------------------------------------------------------


def test_health_check_online_and_status_of_a_running_relay(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    kafka.create_topic(topic, partitions=1)
    text = CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=kafka.bootstrap)
    with RelayService(tmp_path, text) as service:
        ended = outbox_relay("health", "-c", service.config)
        assert (ended.code, ended.json["ready"], ended.err) == (0, True, "")
        ended = inside("check", "--online", "-c", service.config)
        assert (ended.code, ended.err) == (0, "")
        uid = inside("emit", "order.created", "-c", service.config).out.strip()
        until(lambda: _state(service, uid) == "settled", seconds=30, what="the event is settled")
        [relay] = inside("status", "--json", "-c", service.config).json["relays"]
        assert relay["shards"] == {"events": 64}
        assert relay["version"]
        assert service.stop() == 0
    assert outbox_relay("health", "-c", service.config).code == 1


def _state(service: RelayService, uid: str) -> str:
    return inside("why", uid, "--json", "-c", service.config).json["sinks"]["events"]["state"]


# -- the page of commands -----------------------------------------------------------------------------------------


def test_the_page_has_every_command_and_every_option() -> None:
    commands = list(parsers())
    assert len(commands) >= 9
    for command in commands:
        heading = f"## {command}\n"
        assert heading in PAGE
        section = PAGE.split(heading)[1].split("\n## ")[0]
        for option in re.findall(r"(--[a-z-]+)", inside(*command.split(), "--help").out):
            assert option in section or option in ("--help", "--config", "--dsn"), f"{command} {option}"


@pytest.fixture
def shop(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Return the environment of the page's examples: two sinks, one relay, and the working directory with its files."""
    text = CONFIG.format(dsn=database.dsn, topic="t", bootstrap="localhost:1")
    crm = text[text.index("[sinks.events]") : text.index("[routes]")].replace("events", "crm")
    (tmp_path / "relay.toml").write_text(f'{text}"user.*" = ["crm"]\n{crm}')
    (tmp_path / "order.json").write_text('{"id": 1}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTBOX_RELAY_CONFIG", "relay.toml")
    register(database, "events")
    register(database, "crm", pattern="user.*")
    with database.connect() as connection:
        connection.execute(
            "insert into outbox.relay (id, name, version, sinks)"
            " values (gen_random_uuid(), 'relay-1:40213', '0.1.0', '{crm,events}')"
        )
        connection.execute("update outbox.shard set owner = (select id from outbox.relay)")
        connection.execute(
            "insert into outbox.session select k.name, r.id, now() + interval '15 s' from outbox.sink k, outbox.relay r"
        )
    return database


ATTEMPTED = """
insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, milliseconds, error, detail)
select now() - interval '1 s' * (3 - n), e.uid, 'crm', e.id, n, 'relay-1:40213',
       case n when 1 then 'failed' else 'delivered' end, 500, n * 18.4,
       case n when 1 then 'answered 500 Internal Server Error' end,
       case n when 1 then '{"code": "http_500", "steps": {"first_byte": 0.017}}'::jsonb end
  from outbox.event e cross join generate_series(1, 2) n where e.uid = %s::uuid"""
RUNS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, owner, lease, lease_until, uid, type, key,
                             content_type, created_at)
select 'crm', e.id, e.shard, 'waiting', true, now(), r.id, %s, now() + interval '12.8 s', e.uid, e.type, e.key,
       'application/json', e.created_at
  from outbox.event e cross join outbox.relay r where e.uid = %s::uuid"""


@pytest.mark.slow  # runs what a page shows
def test_the_examples_of_the_page_answer_as_they_stand(shop: Database) -> None:
    examples = [
        example for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for example in block.split("$ ")[1:]
    ]
    emits = [example for example in examples if "relay emit" in example]
    assert len(emits) == 1
    uid = answer(emits[0], "").out.strip()
    for example in examples:
        if "relay attempts" in example and "--json" not in example:
            with shop.connect() as connection:
                connection.execute(ATTEMPTED, (uid,))
                connection.execute(RUNS, (new_row_lease(datetime.now(UTC) - timedelta(seconds=7)), uid))
        if example not in emits:
            assert same(answer(example, uid).out) == same(example.partition("\n")[2]), example
