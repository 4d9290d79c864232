"""docs/operations.md and the tables of docs/commands.md: every statement is run, every figure is explained."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.admin import status
from outbox_relay.admin.text import findings_text, status_text
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.log_events import LOG_EVENTS
from outbox_relay.domain.outcomes import DELIVERED, Refused, Verdict
from outbox_relay.relay import settle
from outbox_relay.service.build import CONNECTIONS, REPLAY_CONNECTIONS, SINK_CONNECTIONS_MAX
from outbox_relay.sinks.webhook.results import status_text as phrase_of
from tests.docs.pages import PAGES, ROOT, blocks, commands, prose, text
from tests.docs.parsing import COMMON, options, parse, parsers
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.forked import run_module
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.service import RelayService
from tests.support.wait import becomes, until

SECONDS = 30
UID = "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b"
PAGE = "docs/operations.md"
CHANGING = {"retry", "discard", "start", "pause", "remove", "rebase"}
"""Words of the commands that change something."""
RECORDED = "select 1 from outbox.relay where config is not null"


_SECTION = text(PAGE).split("### Dead letters\n")[1].split("\n## ")[0]
ASKED = [
    [UID if word == "UID" else word for word in shlex.split(line)]
    for line in re.findall(r"\| `outbox-relay (.+?)` \|", _SECTION)
    if "audit" not in line
]
"""The questions about dead letters."""
SHOWN = [shlex.split(line)[1:] for block in blocks(PAGE) if block.language == "sh" for line in commands(block)]
ACTED = [words for words in SHOWN if words[0] != "erase"]
"""The actions on dead letters."""


def emit(conn: psycopg.Connection[Any], key: str = "order-1", uid: str | None = None) -> str:
    """Emit an event; its uid."""
    with conn.transaction():
        return str(outbox.emit(conn, "order.created", {}, key=key, uid=None if uid is None else UUID(uid)))


def says(harness: RelayHarness, **wanted: object) -> None:
    """Wait until `status` says so of the sink."""

    def fact() -> bool:
        found = (status(harness.store))["sinks"]["crm"]
        return found | wanted == found

    until(fact, seconds=SECONDS, what=f"status says {wanted}")


def uids(sink: MemorySink) -> list[str]:
    """Return the delivered events in order."""
    return [event.uid for event in sink.delivered]


def in_trouble() -> str:
    """Return the block with the status of sinks in trouble."""
    [shown] = [block.text for block in blocks(PAGE) if "last error of crm" in block.text]
    return shown


def test_the_status_of_sinks_in_trouble_is_as_shown() -> None:
    [healthy] = re.findall(r"^\{.*\"last_error_at\".*\}$", text("docs/commands.md"), re.MULTILINE)
    found = json.loads(healthy)
    found["sinks"]["crm"] |= {"backlog": 1204, "oldest_seconds": 372.0, "waiting": 21, "held": 4, "dead": 1}
    error = f"answered {phrase_of(503)}"
    found["sinks"]["crm"] |= {"circuit": "open", "last_error": error, "last_error_seconds_ago": 12.3}
    found["sinks"]["events"] |= {"backlog": 0, "oldest_seconds": 0.0, "paused": True, "paused_reason": "ticket 4711"}
    found["sinks"]["events"]["unowned"] = SHARDS
    found["relays"][0]["shards"]["events"] = 0
    assert in_trouble().partition("\n")[2].strip() == status_text(found)
    assert status_text(found | {"relays": []}).endswith("no relay is alive: start one with outbox-relay run")
    assert findings_text([]) == "no problems found"


def test_the_page_needs_no_sql_by_hand() -> None:
    assert not [block for block in blocks(PAGE) if block.language == "sql"]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_log_lines_by_their_events(page: str) -> None:
    words = " ".join(prose(page).split())
    messages = [message for message in LOG_EVENTS.values() if " " in message]
    assert [message for message in messages if f"`{message}`" in words or f'"{message}' in words] == []
    said = re.findall(r"\blog(?:s|ged)?(?: has a| lines?| with)? (?:line )?`([a-z]+\.[a-z_]+)`", words)
    assert set(said) <= LOG_EVENTS.keys()


def test_answers_of_the_page_are_those_that_are_run_elsewhere() -> None:
    answers = [block.text for block in blocks(PAGE) if commands(block) and block.language == "text"]
    shown = [block.text.partition("\n")[2] for block in blocks("docs/commands.md")]
    assert [answer for answer in answers if answer.partition("\n")[2] not in shown] == [in_trouble()]


def test_each_question_has_a_command_that_exists() -> None:
    [table] = [
        part for part in text(PAGE).split("\n\n") if part.startswith("| question | command |\n|---|---|\n| how far")
    ]
    questions = table.splitlines()[2:]
    assert len(questions) == 20
    for question in questions:
        [line] = re.findall(r"`outbox-relay (.+?)` \|$", question)
        parse(shlex.split(line))


@pytest.mark.slow  # runs what a page shows
def test_commands_of_the_tables_answer_and_only_read(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line
        for table in ("symptom | run |", "question | command |\n|---|---|\n| how far")
        for line in _commands_of(table)
    ]
    read = [line for line in lines if not set(shlex.split(line)) & CHANGING or "--dry-run" in line]
    with database.connect() as conn:
        values = {"UID": emit(conn, "k1"), "KEY": "k1", "SINK": "crm"}
    with Receiver() as receiver:
        config = webhook_config(database.dsn, receiver, tmp_path).replace('"a.*"', '"*"')
        with RelayService(tmp_path, config) as relay:
            until(lambda: query(database, RECORDED), seconds=SECONDS, what="the relay has recorded its settings")
            monkeypatch.setenv("OUTBOX_RELAY_CONFIG", str(relay.config))
            for line in read:
                words = [values.get(word, word) for word in shlex.split(line)]
                ended = inside(*words)
                assert ended.code == (words[0] == "doctor"), (line, ended)  # test servers run with fsync off
                assert ended.out, line
    assert len(read) > len(lines) / 2
    assert query(database, "select count(*) from outbox.audit") == [(0,)]


def _commands_of(table: str) -> list[str]:
    """Return the commands of the table of the page that begins so, without the program."""
    [rows] = [part for part in text(PAGE).split("\n\n") if part.startswith(f"| {table}")]
    return [re.findall(r"`outbox-relay (.+?)` \|", row)[0] for row in rows.splitlines()[2:]]


def test_events_are_erased_as_the_page_shows(database: Database) -> None:
    [words] = [words for words in SHOWN if words[0] == "erase"]
    with database.connect() as conn:
        emit(conn, words[words.index("--key") + 1])
    ended = inside(*words, "--yes", "--dsn", database.dsn)
    assert (ended.code, ended.out, ended.err) == (0, "1 event erased\n", "")


@pytest.mark.slow
def test_dead_letters_are_listed_retried_and_discarded(database: Database) -> None:
    asked: list[str] = []

    def script(event: StoredEvent, _attempt: int) -> Verdict:
        asked.append(event.uid)
        return Refused("no", 400) if event.uid == UID else DELIVERED

    def command(words: list[str]) -> str:
        ended = run_module("outbox_relay", [*words, "--dsn", database.dsn], ROOT)
        assert (ended.code, ended.err) == (0, ""), words
        return ended.out

    sink = MemorySink(script, keeps_order=False)
    with database.connect() as conn:
        emit(conn, uid=UID)
        follower = emit(conn)
    with running(database.dsn, (spec("crm", hold=True), sink)) as harness:
        says(harness, dead=1, held=1)
        for words in ASKED:
            assert "no delivery matches" not in command(words), words
        one, dry_run, many, discard = ACTED
        assert command(dry_run) == "1 dead delivery matches\n"
        for times, words in enumerate((one, many), 2):
            assert command(words) == "retried 1 delivery\n"
            becomes(lambda times=times: len(asked) == times, "the event is tried again")
            says(harness, dead=1, waiting=0)
            assert asked == [UID] * times
        assert command(discard) == "discarded 1 delivery\n"
        says(harness, dead=0, backlog=0)
        assert "discarded at" in command(["why", UID])
        assert "customer was deleted" in command(["audit"])
    assert (uids(sink), asked) == ([follower], [UID] * 3 + [follower])


def test_a_sink_is_removed(database: Database) -> None:
    with running(database.dsn, (spec("crm"), MemorySink())) as harness:
        harness.owns_all()
    inside("sinks", "remove", "crm", "--yes", "--dsn", database.dsn)
    with database.connect(autocommit=True) as conn:
        for table in ("sink", "shard", "progress", "delivery"):
            assert conn.execute(f"select count(*) from outbox.{table}".encode()).fetchone() == (0,), table


# -- what the pages explain ---------------------------------------------------------------------------------------


def test_every_figure_of_status_is_explained(database: Database) -> None:
    with running(database.dsn, (spec("crm"), MemorySink())) as harness:
        found = status(harness.store)
    described = text("docs/commands.md").split("## status")[1].split("\n## ")[0]
    watched = prose(PAGE).split("## Watch")[1].split("\n## ")[0]
    for field in {*found["sinks"]["crm"], *found} - {"sinks"}:
        assert f"`{field}`" in described, field
        assert f"`{field}`" in watched, field
    [ready] = re.findall(r'^\{"ready.*', text("docs/commands.md"), re.MULTILINE)
    for field in {*json.loads(ready), *json.loads(ready)["sinks"]["crm"]} - {"ready", "sinks"}:
        assert f"`{field}`" in watched, field


def test_the_figures_of_the_pages_are_those_of_the_code() -> None:
    most = CONNECTIONS + SINK_CONNECTIONS_MAX + REPLAY_CONNECTIONS
    assert f"up to {CONNECTIONS + 1} + 1 for each sink, at most {most}" in text(PAGE)
    assert f"{CONNECTIONS + 4} with two sinks" in text(PAGE)
    guarantees = " ".join(text("docs/guarantees.md").split())
    assert f"while {settle.MOST_EVENTS:,} events or {settle.MOST_BYTES >> 20} MiB of them are in flight" in guarantees
    assert f"written at most {settle.FLUSH_SECONDS} s after the deliveries" in guarantees


SECTIONS = re.split(r"\n## ", text("docs/commands.md"))[1:]


def test_the_page_has_a_section_for_every_command() -> None:
    assert {section.partition("\n")[0] for section in SECTIONS} == set(parsers())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_the_page_names_every_option(section: str) -> None:
    command = section.partition("\n")[0]
    [synopsis] = re.findall(rf"^    (outbox-relay {command}\b.*)$", section, re.MULTILINE)
    cells = re.findall(r"^\| (`--[^|]*)\|", section, re.MULTILINE)
    rows = [option for cell in cells for option in re.findall(r"--[\w-]+", cell)]
    assert set(re.findall(r"--[\w-]+", synopsis)) == options(command)
    assert set(rows) == options(command)
    assert not set(rows) & COMMON
