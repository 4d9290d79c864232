"""The commands on deliveries as people run them: output, exit codes, questions, and mistakes."""

from __future__ import annotations

import base64
import json
import re
from uuid import uuid4

import pytest

from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.examples import assert_true, examples, register

ROWS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, last_error, last_status, uid, type, key, payload,
                             content_type, headers, created_at)
select 'crm', id, shard, 'dead', true, now(), 'answered 422', 422, uid, type, key, payload, content_type, headers,
       created_at
  from outbox.event
"""
NOWHERE = "01900000-0000-7000-8000-000000000000"


def ask(database: Database, *arguments: str) -> Ended:
    """Run a command on `database` by --dsn alone."""
    return inside(*arguments, "--dsn", database.dsn)


def emit(database: Database, payload: bytes = b"{}", key: str = "k") -> str:
    """Emit an event and return its uid."""
    [(uid,)] = query(database, "select outbox.emit_raw('order.created', %s, key => %s)::text", payload, key)
    return uid


@pytest.fixture
def uid(database: Database) -> str:
    """Return the uid of a dead letter of `crm`, whose event the log no longer has."""
    register(database, "crm", "events", pattern="*")
    uid = emit(database, b'{"id": 1}')
    with database.connect() as connection:
        connection.execute(ROWS)
        connection.execute("truncate outbox.event")
    return uid


# -- questions ----------------------------------------------------------------------------------------------------


def test_lists_are_tables_or_json(database: Database, uid: str) -> None:
    ended = ask(database, "dead", "list", "--sink", "crm")
    assert (ended.code, ended.err) == (0, "")
    header, row = ended.out.splitlines()
    assert header.split()[:3] == ["UID", "SINK", "TYPE"]
    assert row.split()[:6] == [uid, "crm", "order.created", "k", "dead", "0"]
    found = ask(database, "dead", "list", "--json", "--limit", "1").json
    assert (found["total"], found["exact"], found["deliveries"][0]["uid"]) == (1, True, uid)
    keys = "uid sink type key state attempts error status since due_at last_attempt_at"
    assert " ".join(found["deliveries"][0]) == keys
    summary = ask(database, "dead", "summary", "--json").json
    assert [(g["sink"], g["status"], g["count"]) for g in summary["groups"]] == [("crm", 422, 1)]
    assert "status 422" in ask(database, "dead", "summary").out


def test_an_event_is_shown_with_its_payload_if_asked_for(database: Database, uid: str) -> None:
    ended = ask(database, "dead", "show", uid)
    assert ended.code == 0
    assert "crm  dead since" in ended.out
    assert "id" not in ended.out.split("shard")[1].split("\n", 1)[1].replace("dead", "").replace("attempts", "")
    assert '{"id": 1}' in ask(database, "dead", "show", uid, "--payload").out
    found = ask(database, "dead", "show", uid, "--payload", "--json", "--sink", "crm").json
    assert (found["payload"], found["payload_encoding"], found["headers"]) == ('{"id": 1}', "utf-8", None)
    assert [d["state"] for d in found["deliveries"]] == ["dead"]


def test_an_export_has_every_payload_byte_for_byte(database: Database) -> None:
    register(database, "crm", pattern="*")
    payloads = [b'{"a": "\xc3\xa9"}', b"\x00\xff", b"", "🦆\n\r\u2028".encode(), b"with \x00 NUL"]
    wanted = {emit(database, payload): payload for payload in payloads}
    with database.connect() as connection:
        connection.execute(ROWS)
    ended = ask(database, "dead", "export")
    assert (ended.code, ended.err) == (0, "")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    got = {
        line["uid"]: base64.b64decode(line["payload"])
        if line["payload_encoding"] == "base64"
        else line["payload"].encode()
        for line in lines
    }
    assert got == wanted
    assert [line["uid"] for line in lines] == list(reversed(wanted))
    assert lines[0]["error"] == "answered 422"


@pytest.mark.parametrize("example", examples("dead "), ids=lambda example: example.partition("\n")[0][14:30])
def test_the_examples_of_the_page_answer_as_they_stand(
    database: Database, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(database, "crm", pattern="*")
    uid = emit(database, b'{"id": 1}', "order-1")
    if " retry " in example:
        emit(database)
    with database.connect() as connection:
        connection.execute(ROWS)
        connection.execute("update outbox.delivery set attempts = 1, content_type = 'application/json'")
        connection.execute("truncate outbox.event")
    monkeypatch.setenv("OUTBOX_RELAY_DATABASE__DSN", database.dsn)
    assert_true(example, uid)


# -- actions ------------------------------------------------------------------------------------------------------


def test_an_action_by_filter_wants_a_yes(database: Database, uid: str) -> None:
    for words in (("retry",), ("discard", "--reason", "r")):
        ended = ask(database, "dead", *words, "--sink", "crm")
        assert (ended.code, ended.out) == (2, "")
        assert "1 dead delivery? Not a terminal: add --yes" in ended.err
    ended = ask(database, "dead", "retry", "--sink", "crm", "--yes", "--json")
    assert (ended.code, ended.json) == (0, {"done": 1, "left": 0})
    ended = ask(database, "dead", "retry", uid)
    assert (ended.code, ended.out) == (0, "no dead delivery matches\n")
    assert ended.err == f"event {uid} is waiting for sink crm: add --state waiting to select it\n"


def test_a_named_event_is_discarded_and_why_and_audit_say_so(database: Database, uid: str) -> None:
    ended = ask(database, "dead", "discard", uid, "--reason", "customer was deleted", "--json")
    assert (ended.code, ended.json, ended.err) == (0, {"done": 1, "left": 0}, "")
    ended = ask(database, "why", uid)
    assert ended.code == 0
    assert re.search(r"^crm +discarded at .+: customer was deleted$", ended.out, re.MULTILINE)
    [action] = ask(database, "audit", "--json").json["audit"]
    assert (action["action"], action["count"], action["reason"]) == ("dead discard", 1, "customer was deleted")
    assert action["filter"]["uids"] == [uid]
    shown = ask(database, "audit", "--since", "1h").out
    assert "customer was deleted" in shown
    assert uid in shown
    ended = ask(database, "dead", "discard", uid, "--reason", "again")
    assert (ended.code, ended.err) == (0, f"event {uid} was discarded\n")


@pytest.mark.usefixtures("uid")
def test_a_scheduled_event_that_is_named_is_cancelled(database: Database) -> None:
    """Goes red when the one who names it has to know its state, or when a filter cancels what it does not name."""
    [(found,)] = query(database, "select outbox.emit('order.later', '1', deliver_at => now() + interval '1 day')::text")
    ended = ask(database, "dead", "retry", found, "--sink", "crm")
    assert ended.err == f"event {found} is scheduled for sink crm\n"
    ended = ask(database, "dead", "discard", "--sink", "crm", "--type", "order.later", "--reason", "r", "--yes")
    assert (ended.code, ended.out) == (0, "no dead delivery matches\n")
    ended = ask(database, "dead", "discard", found, "--sink", "crm", "--reason", "r", "--dry-run")
    assert (ended.code, ended.out) == (0, "1 scheduled delivery matches\n")
    ended = ask(database, "dead", "discard", found, "--sink", "crm", "--reason", "r")
    assert (ended.code, ended.out) == (0, "discarded 1 delivery\n")
    assert query(database, "select from outbox.scheduled") == []


def test_a_named_event_that_is_being_delivered_is_left_with_exit_code_1(database: Database, uid: str) -> None:
    """Goes red when a script takes it for revoked."""
    query(
        database,
        "update outbox.delivery set state = 'waiting', lease = gen_random_uuid(), owner = gen_random_uuid(),"
        " lease_until = now() + interval '1 minute' where uid = %s returning 1",
        uid,
    )
    ended = ask(database, "dead", "discard", uid, "--state", "waiting", "--reason", "r", "--json")
    assert (ended.code, ended.json) == (1, {"done": 0, "left": 1})
    assert "being delivered now" in ended.err


def test_an_unknown_event_among_others_is_named(database: Database, uid: str) -> None:
    unknown = str(uuid4())
    ended = ask(database, "dead", "retry", uid, unknown, "--json")
    assert (ended.code, ended.json, ended.err) == (3, {"done": 1, "left": 0}, f"no event {unknown} is known\n")


def test_a_delivery_that_would_be_read_again_is_left_with_the_reason(
    database: Database, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outbox_relay.admin import delivery_actions

    assert uid
    monkeypatch.setattr(delivery_actions, "UNSETTLED_SECONDS", 0.0)
    emit(database)
    with database.connect() as connection:
        connection.execute(ROWS)
        connection.execute("update outbox.sink set paused = true")
    ended = ask(database, "dead", "discard", "--key", "k", "--reason", "r", "--yes", "--json")
    assert (ended.code, ended.json) == (1, {"done": 1, "left": 1})
    assert "1 not discarded: their shard's position is before them" in ended.err
    assert "(crm (paused))" in ended.err


MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    (("list", "--sink", "crn"), 3, "did you mean crm?"),
    (("retry", "--sink", "zzz", "--yes"), 3, "there are: crm, events"),
    (("show", NOWHERE, "--sink", "events"), 3, "has no delivery of its own to sink events"),
    (("list", "--type", ""), 2, "type of a filter must be a pattern"),
    (("list", "--since", "2100-01-01T00:00:00Z"), 2, "since lies in the future"),
    (("list", "--since", "1h", "--until", "2h"), 2, "is after until"),
    (("list", "--status", "-1"), 2, "should be a number, 0 to 99999"),
    (("retry", "--state", "held"), 2, "invalid choice"),
    (("discard", "--reason", " ", "--yes"), 2, "a discard needs a reason"),
    (("discard", "--reason", "x" * 2001, "--yes"), 2, "reason must have at most 2000 bytes"),
    (("retry", "--rate", "nan"), 2, "should be a number"),
]


@pytest.mark.usefixtures("uid")
def test_mistakes_end_with_one_sentence(database: Database) -> None:
    for words, code, message in MISTAKES:
        ended = ask(database, "dead", *words)
        assert (ended.code, ended.out) == (code, ""), words
        assert message in ended.err.splitlines()[-1]
