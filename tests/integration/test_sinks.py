"""Sinks that are removed and renamed: what the schema does, and how relays that run and start obey."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import errors
from structlog.testing import capture_logs

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict
from outbox_relay.domain.window import Position
from outbox_relay.postgres.migrations import migrate
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.emitting import emit_types
from tests.support.ledger import ledger
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.roles import denied, new_role
from tests.support.service import RelayService
from tests.support.sink_actions import audited, call, lapse, register, remove, rename
from tests.support.wait import auntil, becomes, until

SHORT_LEASE = 3.0
HOSTILE = [None, "", "nosuch", "é", "a'b\"c", "x" * 5000, "s; drop table outbox.sink"]


def ask(database: Database, *arguments: str | Path) -> Ended:
    """Run a command on `database` by --dsn alone."""
    return inside(*arguments, "--dsn", database.dsn)


# -- remove ---------------------------------------------------------------------------------------------------------


def test_a_removed_sink_is_not_registered_again_until_its_name_is_forgotten(database: Database) -> None:
    first = register(database, "s")
    emit(database, ["a"])
    assert remove(database, "s")["removed"]
    assert register(database, "s") == 0
    assert query(database, "select 1 from outbox.sink union all select 1 from outbox.progress") == []
    assert remove(database, "s", forget=True) | {"audit": 0} == {
        "removed": False, "forgotten": True, "deliveries": 0, "audit": 0,
    }  # fmt: skip
    assert register(database, "s") > first
    assert audited(database) == [
        ("sinks remove", "s", {"forget": False}, 0, "tester"),
        ("sinks forget", "s", {"forget": True}, 0, "tester"),
    ]


def test_a_sink_registered_after_all_were_removed_begins_now(database: Database) -> None:
    register(database, "s")
    remove(database, "s")
    call(database, """select outbox_internal.register_sinks('[{"name": "t", "patterns": ["*"]}]', 0, '3:3:', 3)""")
    assert query(database, "select start from outbox.sink") == [("now",)]


async def test_many_rows_are_deleted_in_steps_of_which_the_audit_has_one_row(database: Database) -> None:
    async with ledger(database) as books:
        await books.register(("s", ["*"], "beginning"))
        await books.own("s")
        await books.park("s", *[books.row(event) for event in books.emit(*"abcde")])
    call(database, "insert into outbox.discarded (sink, id, uid, reason) values ('s', 1, gen_random_uuid(), 'x')")
    step = remove(database, "s", most=2)
    assert (step["removed"], step["deliveries"]) == (False, 2)
    assert query(database, "select paused, (select count(*) from outbox.delivery) from outbox.sink") == [(True, 3)]
    ended = await asyncio.to_thread(ask, database, "sinks", "remove", "s", "--yes", "--json")
    assert (ended.code, ended.json) == (0, {"done": 3, "left": 0})
    assert query(database, "select 1 from outbox.discarded union all select 1 from outbox.delivery") == []
    again = await asyncio.to_thread(ask, database, "sinks", "remove", "s")
    assert (again.code, again.out) == (0, "sink s is already removed\n")
    assert [row[3] for row in audited(database)] == [2, 3]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_sink_that_does_not_exist_is_refused_by_every_action(database: Database, name: str | None) -> None:
    register(database, "s")
    for statement in (
        "select outbox.drop_sink(%s, false, 1, 'x', null)",
        "select outbox.rename_sink(%s, 't', 'x', null)",
        "select outbox.preview_removal(%s, 1, 1, 1)",
        "select outbox.preview_seek(%s, 'now', 1, 1)",
        "select outbox.seek_sink(%s, 'now', 'x', null)",
    ):
        with pytest.raises(errors.NoDataFound, match="there is no sink"):
            call(database, statement, name)
    assert query(database, "select name from outbox.sink") == [("s",)]


def test_the_nearest_name_is_suggested_and_a_former_name_leads_on_in_words_only(database: Database) -> None:
    register(database, "billing")
    for command in (("remove", "biling"), ("rename", "biling", "b"), ("seek", "biling", "--to", "now")):
        ended = ask(database, "sinks", *command, *(["--yes"] if command[0] != "rename" else []))
        assert (ended.code, ended.out) == (3, "")
        assert "there is no sink 'biling' in this database; did you mean billing?" in ended.err
    rename(database, "billing", "invoices")
    for command in (
        ("pause",),
        ("resume",),
        ("sinks", "probe"),
        ("dead", "list", "--sink"),
        ("dead", "summary", "--sink"),
    ):
        ended = ask(database, *command, "billing")
        assert (ended.code, "its name is now 'invoices'" in ended.err) == (3, True), (command, ended.err)
    ended = ask(database, "sinks", "remove", "billing", "--yes")
    assert ended.code == 3
    assert "its name is now 'invoices'" in ended.err


def test_removal_says_first_what_is_lost_and_asks(database: Database) -> None:
    register(database, "s")
    emit(database, ["a", "b"])
    ended = ask(database, "sinks", "remove", "s")
    assert (ended.code, ended.out) == (2, "")
    assert "Remove sink s, with 0 rows? 2 events will not be delivered." in ended.err
    assert "add --yes" in ended.err
    assert query(database, "select name from outbox.sink") == [("s",)]
    ended = ask(database, "sinks", "remove", "s", "--yes", "--forget")
    assert (ended.code, ended.out) == (0, "sink s is removed, with 0 rows\n")
    assert register(database, "s") > 0


async def test_a_relay_with_a_removed_sink_serves_its_others_and_shows_the_fault(database: Database) -> None:
    gone, stays = MemorySink(), MemorySink()
    register(database, "s")
    remove(database, "s")
    async with running(database.dsn, (spec("s"), gone), (spec("t"), stays)) as harness:
        await delivered(stays, emit(database, ["a"]))
        await auntil(lambda: _fault(harness, "--forget"), seconds=10, what="the fault is shown")
        assert register(database, "s") == 0
    assert ids(gone) == []


async def _fault(harness: RelayHarness, words: str) -> bool:
    return words in str(harness.relays[0].fault)


async def test_a_relay_whose_sink_is_removed_while_it_runs_shows_the_fault(database: Database) -> None:
    sink = MemorySink()
    async with running(
        database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, expects={"lease_lost", "reload"}
    ) as harness:
        await harness.owns_all()
        await delivered(sink, emit(database, ["a"]))
        await asyncio.to_thread(remove, database, "s")
        await auntil(lambda: _fault(harness, "--forget"), seconds=10, what="the fault is shown")
        await asyncio.to_thread(remove, database, "s", forget=True)
        register(database, "s")
        await delivered(sink, emit(database, ["b"]))


# -- rename ---------------------------------------------------------------------------------------------------------


def test_a_sink_is_not_renamed_while_a_live_relay_lists_it(database: Database) -> None:
    """The fence: goes red when relays that are about to claim its shards are not looked for."""
    register(database, "s")
    relay = "insert into outbox.relay (id, name, version, sinks) values (gen_random_uuid(), %s, '0', %s)"
    call(database, relay, "one", ["s", "t"])
    call(database, relay, "other", ["t"])
    ended = ask(database, "sinks", "rename", "s", "new")
    assert (ended.code, ended.out) == (2, "")
    assert "sink 's' is served by one: stop these relays, or take the sink out of their files" in ended.err
    call(database, "update outbox.relay set seen_at = seen_at - interval '31 seconds' where name = 'one'")
    assert rename(database, "s", "new") == 0


async def test_a_sink_is_not_renamed_before_the_leases_of_its_shards_have_ended(database: Database) -> None:
    """The fence: goes red when only relays that are seen count: this one is frozen."""
    async with ledger(database) as books:
        await books.register(("s", ["*"], "beginning"))
        await books.own("s")
        with pytest.raises(errors.InvalidParameterValue, match=f"'s' is served by {books.relay}"):
            rename(database, "s", "new")
        assert query(database, "select name from outbox.sink") == [("s",)]
        assert query(database, "select from outbox.former_sink") == []
        lapse(database)
        assert rename(database, "s", "new") == 0
        assert query(database, "select distinct sink, owner from outbox.shard") == [("new", None)]


async def test_a_sink_is_renamed_once_its_relay_has_stopped_and_the_next_one_goes_on(database: Database) -> None:
    async def fail(event: StoredEvent, _: int) -> Verdict:
        return Failed("no") if event.key == "bad" else DELIVERED

    sink = MemorySink(fail, keeps_order=False)
    async with running(database.dsn, (spec("old"), sink), lease_seconds=SHORT_LEASE) as harness:
        await harness.owns_all()
        await delivered(sink, emit(database, ["a"]))
        emit(database, ["bad"])
        await has(database, "select from outbox.delivery where state = 'dead'")
        with pytest.raises(errors.InvalidParameterValue, match="'old' is served by harness"):
            await asyncio.to_thread(rename, database, "old", "new")
        await harness.stop()
    late = emit(database, ["b"])
    assert rename(database, "old", "new") == 1
    assert query(database, "select sink, state from outbox.delivery") == [("new", "dead")]
    sink = MemorySink()
    async with running(database.dsn, (spec("new"), sink), lease_seconds=SHORT_LEASE):
        await delivered(sink, late)
    assert ids(sink) == late
    assert query(database, "select name from outbox.sink") == [("new",)]


async def test_the_old_name_is_refused_and_other_sinks_of_the_relay_go_on(database: Database) -> None:
    """Goes red when the name is registered again, or led to the sink of another name."""
    register(database, "old")
    rename(database, "old", "new")
    gone, stays = MemorySink(), MemorySink()
    sinks = (spec("old"), gone), (spec("t"), stays)
    async with running(database.dsn, *sinks, lease_seconds=SHORT_LEASE) as harness:
        await delivered(stays, emit(database, ["a"]))
        await auntil(lambda: _fault(harness, "the sink is now called new"), seconds=10, what="the fault is shown")
        assert register(database, "old") == 0
    assert ids(gone) == []
    assert query(database, "select name from outbox.sink order by 1") == [("new",), ("t",)]


async def test_a_relay_whose_paused_sink_is_renamed_stops_it_and_goes_on_with_the_others(database: Database) -> None:
    paused, stays = MemorySink(), MemorySink()
    sinks = (spec("old"), paused), (spec("t"), stays)
    async with running(database.dsn, *sinks, lease_seconds=SHORT_LEASE, expects={"reload", "lease_lost"}) as harness:
        await harness.owns_all()
        call(database, "update outbox.sink set paused = true where name = 'old'")
        await has(database, "select 1 from outbox.shard where sink = 'old' having count(owner) = 0")
        await asyncio.to_thread(rename, database, "old", "new")
        await auntil(lambda: _fault(harness, "the sink is now called new"), seconds=10, what="the fault is shown")
        await delivered(stays, emit(database, ["a"]))
    assert ids(paused) == []


async def test_the_log_says_that_new_settings_wait_for_a_long_request(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends, the sink starts no other event. Goes red when the log does not give the reason."""
    monkeypatch.setattr("outbox_relay.relay.sink_relay.TELL_SECONDS", 0.1)
    ended = asyncio.Event()

    async def request(event: StoredEvent, _: int) -> Verdict:
        if event.key == "long":
            await ended.wait()
        return DELIVERED

    sink = MemorySink(request, keeps_order=False)
    with capture_logs() as lines:
        async with running(database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, expects={"reload"}) as harness:
            wanted = emit(database, ["long"])
            await becomes(lambda: sink.attempts == wanted, "the request is under way")
            [relay] = harness.relays
            relay.reload(replace(spec("s"), record_attempts="all"), relay.leases.generation)
            await becomes(lambda: [line for line in lines if line["event"] == "config.waits"], "the log says it")
            wanted += emit(database, ["short"])
            ended.set()
            await delivered(sink, wanted)
    assert [line["requests"] for line in lines if line["event"] == "config.waits"] == [1]
    assert relay.spec.record_attempts == "all"


async def test_rows_marks_and_positions_move_and_nothing_written_under_either_name_counts(database: Database) -> None:
    async with ledger(database) as old, ledger(database) as zombie:
        await old.register(("old", ["*"], "beginning"))
        await old.own("old")
        await zombie.register(("new", ["*"], "beginning"))
        await zombie.own("new")
        remove(database, "new", forget=True)
        events = old.emit(*(f"k{n}" for n in range(20)))
        await old.park("old", old.row(events[0]))
        call(database, "insert into outbox.discarded (sink, id, uid, reason) values ('old', 1, gen_random_uuid(), 'x')")
        end = Position(await old.tick())
        await zombie.place("new", end)
        lapse(database)
        assert rename(database, "old", "new") == 1
        await zombie.place("new", end)
        await old.place("old", end)
        assert query(database, "select sink from outbox.delivery union all select sink from outbox.discarded") == [
            ("new",), ("new",),
        ]  # fmt: skip
        assert query(database, "select events from outbox_internal.backlog('new', null, 1000, 5.0)") == [(19,)]
        assert rename(database, "new", "old") == 1
        assert query(database, "select events from outbox_internal.backlog('old', null, 1000, 5.0)") == [(19,)]


def test_chains_of_renames_lead_to_the_newest_name_and_back(database: Database) -> None:
    generation = register(database, "a")
    rename(database, "a", "b")
    rename(database, "b", "c")
    former = "select name, renamed_to from outbox.former_sink order by name"
    assert query(database, former) == [("a", "c"), ("b", "c")]
    rename(database, "c", "a")
    assert query(database, former) == [("b", "a"), ("c", "a")]
    assert query(database, "select name, generation from outbox.sink") == [("a", generation)]
    remove(database, "a")
    assert query(database, former) == [("a", None), ("b", None), ("c", None)]
    assert [register(database, name) for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize("name", [None, "", "Aa", "a__b", "1a", "a" * 41, "a-b", "é", "a b", "a\n"])
def test_a_name_that_no_sink_may_have_is_refused(database: Database, name: str | None) -> None:
    register(database, "s")
    with pytest.raises(errors.InvalidParameterValue, match="cannot be the name of a sink"):
        rename(database, "s", name)
    assert query(database, "select name from outbox.sink") == [("s",)]


def test_a_name_that_is_taken_is_refused_and_one_of_a_removed_sink_is_not(database: Database) -> None:
    for name in ("s", "t", "u"):
        register(database, name)
    ended = ask(database, "sinks", "rename", "s", "t")
    assert (ended.code, "there is a sink 't' already" in ended.err) == (2, True)
    ended = ask(database, "sinks", "rename", "s", "s")
    assert (ended.code, "equals the current name" in ended.err) == (2, True)
    rename(database, "u", "v")
    ended = ask(database, "sinks", "rename", "s", "u")
    assert (ended.code, "former name of sink 'v'" in ended.err) == (2, True)
    remove(database, "t")
    ended = ask(database, "sinks", "rename", "s", "t")
    assert (ended.code, ended.out) == (0, "sink s is now t: change the name in the relays' files, too\n")
    assert query(database, "select name, renamed_to from outbox.former_sink order by 1") == [("s", "t"), ("u", "v")]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    "action",
    [
        "outbox.drop_sink('s', false, 1, 'x', null)",
        "outbox.rename_sink('s', 't', 'x', null)",
        "outbox.seek_sink('s', 'now', 'x', null)",
    ],
)
def test_a_transaction_that_would_not_see_new_rows_is_refused(database: Database, action: str, level: str) -> None:
    register(database, "s")
    with database.connect(autocommit=True) as connection:
        connection.execute(f"set default_transaction_isolation = '{level}'".encode())
        with pytest.raises(errors.InvalidTransactionState):
            connection.execute(f"select {action}".encode())


def test_a_rename_waits_for_a_settlement_and_takes_its_rows_along(database: Database) -> None:
    register(database, "s")
    emit(database, ["a"])
    row = """insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
             select 's', e.id, e.shard, 'dead', false, now(), e.uid, e.type, 'application/json', e.created_at
               from outbox.event e"""
    with database.connect() as settlement, database.connect(autocommit=True) as renamer:
        settlement.execute("select from outbox.shard where sink = 's' for share")
        renamer.execute("set lock_timeout = 0")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            renamer.execute("select outbox.rename_sink('s', 't', 'x', null)")
        settlement.execute(row.encode())
    assert rename(database, "s", "t") == 1
    assert query(database, "select sink from outbox.delivery") == [("t",)]


# -- list, roles, service ------------------------------------------------------------------------------------------


def test_the_list_has_sinks_and_former_names(database: Database) -> None:
    assert ask(database, "sinks", "list").out.startswith("no sink is known yet")
    generation = register(database, "s", "a.*", "b")
    register(database, "t")
    remove(database, "t")
    found = ask(database, "sinks", "list", "--json").json
    [sink] = found["sinks"]
    assert (sink["name"], sink["generation"], sink["patterns"]) == ("s", generation, ["a.*", "b"])
    assert (sink["start"], sink["paused"], sink["relays"]) == ("beginning", False, [])
    [former] = found["former"]
    assert (former["name"], former["renamed_to"], former["actor"]) == ("t", None, "tester")
    text = ask(database, "sinks", "list").out
    assert "a.* b" in text
    assert "removed" in text


@pytest.fixture
def operator(database: Database) -> Iterator[str]:
    """Yield an operator's role."""
    with new_role(database, "operator") as name:
        migrate(database.dsn, grants={"operate": [name]})
        yield name


@pytest.fixture
def relay(database: Database) -> Iterator[str]:
    """Yield a relay's role."""
    with new_role(database, "relay") as name:
        migrate(database.dsn, grant_relay=[name])
        yield name


def test_an_operator_acts_and_sees_no_payload(database: Database, operator: str) -> None:
    register(database, "s")
    emit(database, ["a"])
    dsn = database.dsn_as(operator)
    for command in (
        ("list",), ("seek", "s", "--to", "beginning", "--yes"), ("seek", "s", "--to", "now", "--yes"),
        ("rename", "s", "t"), ("remove", "t", "--yes"), ("remove", "t", "--forget"),
    ):  # fmt: skip
        ended = inside("sinks", *command, "--dsn", dsn)
        assert (ended.code, ended.err) == (0, ""), ended
    assert [row[0] for row in audited(database)] == [
        "sinks seek", "sinks seek", "sinks rename", "sinks remove", "sinks forget",
    ]  # fmt: skip
    assert {row["role_name"] for row in call(database, "select role_name from outbox.audit")} == {operator}
    for column in ("payload", "headers"):
        denied(database, operator, f"select {column} from outbox.event")
        denied(database, operator, f"select {column} from outbox.delivery")


def test_a_role_without_the_right_is_told_how_to_get_it(database: Database, relay: str) -> None:
    register(database, "s")
    for command in (("remove", "s", "--yes"), ("rename", "s", "t"), ("seek", "s", "--to", "now", "--yes")):
        ended = inside("sinks", *command, "--dsn", database.dsn_as(relay))
        assert (ended.code, ended.out) == (2, "")
        assert "run outbox-relay migrate --grant-operate ROLE" in ended.err
    assert inside("sinks", "list", "--dsn", database.dsn_as(relay)).code == 0


def test_a_file_with_both_names_serves_the_sink_under_the_new_one(database: Database, tmp_path: Path) -> None:
    with Receiver() as receiver:
        text = webhook_config(database.dsn, receiver, tmp_path)
        section = text[text.index("[sinks.crm]") : text.index("[routes]")]
        both = text.replace("[routes]", section.replace("sinks.crm", "sinks.sales") + "[routes]").replace(
            '["crm"]', '["crm", "sales"]'
        )
        register(database, "crm", "a.*")
        rename(database, "crm", "sales")
        with RelayService(tmp_path, both).start(wait=False) as relay:
            emit_types(database, "a.one")
            until(lambda: received_types(receiver) == ["a.one"], seconds=30, what="it delivers")
            until(lambda: "now called sales" in _shown_fault(relay, "crm"), seconds=30, what="the fault is shown")
            assert _shown_fault(relay, "sales") == "None"
            ended = inside("check", "--online", "-c", relay.config)
            assert (ended.code, "this sink is now called sales in the database" in ended.err) == (2, True)
    assert received_types(receiver) == ["a.one"]


def _shown_fault(relay: RelayService, sink: str) -> str:
    _, body = relay.ask("/readyz")
    return str(body and body["sinks"].get(sink, {}).get("fault"))


def test_check_online_names_a_new_sink_beside_one_without_settings(database: Database, tmp_path: Path) -> None:
    register(database, "older")
    with Receiver() as receiver:
        file = tmp_path / "relay.toml"
        file.write_text(webhook_config(database.dsn, receiver, tmp_path))
        ended = inside("check", "--online", "-c", file)
        assert "run outbox-relay sinks rename older crm before relays start" in ended.err
        register(database, "crm", "a.*")
        remove(database, "crm")
        ended = inside("check", "--online", "-c", file)
        assert (ended.code, "this sink was removed from the database" in ended.err) == (2, True)
