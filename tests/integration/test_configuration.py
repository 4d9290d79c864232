"""Configurations that change while relays read: the counter of a tick, removed sinks, relays that come and go."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from outbox_relay.admin.status import status
from outbox_relay.admin.text import status_text
from outbox_relay.domain.errors import LeaseLost, PositionsMissing
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.window import Position
from outbox_relay.postgres.migrations import rebase
from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.ledger import ledger
from tests.support.memory_sink import MemorySink
from tests.support.ports import free_port
from tests.support.relay_harness import RelayHarness, owns, running, spec
from tests.support.service import RelayService
from tests.support.wait import until

SHORT_LEASE = 1.5
NARROW = spec("s", patterns=("a",))
WIDE = spec("s", patterns=("a", "b"))
REMOVALS = {
    "function": "select outbox.drop_sink('s', true, 1000, null, null)",
    "by hand": "delete from outbox.sink where name = 's'",
}


def config(database: Database) -> int:
    """Return what a tick says of the configuration."""
    [(generations,)] = query(database, "select generations from outbox_internal.tick()")
    return generations


def register(database: Database, name: str, patterns: str, start: str = "now") -> int:
    """Return the generation under which a sink is registered."""
    wanted = f'[{{"name": "{name}", "patterns": {patterns}, "start": "{start}"}}]'
    with database.connect(autocommit=True) as connection:
        connection.execute("set default_transaction_isolation = 'read committed'")
        found = connection.execute("select generation from outbox_internal.register_sinks(%s, 0, '3:3:', 3)", (wanted,))
        [(generation,)] = found.fetchall()
    return generation


def do(database: Database, statement: str) -> None:
    """Run a statement in a transaction of its own."""
    with database.connect(autocommit=True) as connection:
        connection.execute(statement.encode())


# -- the counter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        """select outbox_internal.register_sinks('[{"name": "new", "patterns": ["*"]}]', 0, '3:3:', 3)""",
        """select outbox_internal.register_sinks('[{"name": "s", "patterns": ["x"]}]', 0, '3:3:', 3)""",
        "update outbox.sink set patterns = '{y}', generation = generation + 1",
        "update outbox.sink set generation = 7000",
        "insert into outbox.sink (name, patterns, start) values ('t', '{a}', 'now')",
        "delete from outbox.sink",
        "truncate outbox.sink cascade",
        "select outbox.drop_sink('s', true, 1000, null, null)",
        "select outbox.rebase()",
        "select outbox.seek_sink('s', 'beginning', 'tester', null)",
        """select outbox.start_replay('{"sink": "s", "since": "PT1H"}', null, null, 'tester', null)""",
    ],
)
def test_every_change_of_the_configuration_raises_the_counter(database: Database, change: str) -> None:
    register(database, "s", '["a"]')
    before = config(database)
    do(database, change)
    assert config(database) > before
    assert query(database, "select 1 from outbox.sink, outbox.meta where generation > config") == []


def test_a_relay_that_starts_with_the_same_configuration_leaves_the_counter_alone(database: Database) -> None:
    generation = register(database, "s", '["a"]')
    before = config(database)
    assert register(database, "s", '["a"]') == generation
    do(database, "update outbox.sink set paused = true, circuit = 'open'")
    assert config(database) == before


def test_a_generation_is_never_given_out_again(database: Database) -> None:
    seen = [register(database, "s", '["a"]')]
    for patterns in ('["b"]', '["a"]'):
        seen.append(register(database, "s", patterns))
        do(database, "delete from outbox.sink")
        seen.append(register(database, "s", patterns))
    assert seen == sorted(set(seen))


def test_removal_and_registration_between_two_ticks_are_seen(database: Database) -> None:
    """Goes red with the sum of the generations, which both together leave as it was."""
    register(database, "other", '["zz"]')
    old, new = MemorySink(), MemorySink()
    with running(database.dsn, (NARROW, old)) as older:
        older.owns_all()
        delivered_all(emit_as(database, "a", 1), old)
        older.keeper.end()  # it would look by itself
        with database.connect() as connection:
            connection.execute("delete from outbox.sink where name = 'other'")
            connection.execute(
                """select outbox_internal.register_sinks('[{"name":"s","patterns":["a","b"]}]', 0, '3:3:', 3)"""
            )
        wanted = emit_as(database, "b", 20)
        with running(database.dsn, (WIDE, new)):
            delivered_all(wanted, old, new)


def emit_as(database: Database, type_: str, count: int) -> list[int]:
    """Emit events of a type, each in a transaction and with a key of its own; returns their ids."""
    made: list[int] = []
    for n in range(count):
        with database.connect() as connection:
            row = connection.execute("select outbox.emit(%s, '{}', key => %s)", (type_, f"k{n}")).fetchone()
            found = connection.execute("select id from outbox.event where uid = %s", row).fetchone()
            assert found
            made.append(found[0])
    return made


def delivered_all(wanted: list[int], *sinks: MemorySink, seconds: float = 30) -> None:
    """Wait until each of `wanted` was delivered to one of `sinks`."""

    def fact() -> bool:
        return not set(wanted) - {i for sink in sinks for i in ids(sink)}

    until(fact, seconds=seconds, what=f"{len(wanted)} events are delivered")


# -- removed sinks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=list(REMOVALS))
def test_a_sink_removed_under_load_and_added_again_from_the_beginning_skips_nothing(
    database: Database, removal: str
) -> None:
    old, new = MemorySink(), MemorySink()
    # It ends after the other relay, and may see that none serves the sink's newer generation any more.
    with running(
        database.dsn, (spec("s"), old), lease_seconds=SHORT_LEASE, expects={"reload", "lease_lost"}
    ) as serving:
        serving.owns_all()
        before = emit(database, [f"k{n}" for n in range(20)])
        delivered(old, before)
        do(database, removal)
        during = emit(database, [f"k{n}" for n in range(20)])
        with running(database.dsn, (spec("s"), new), lease_seconds=SHORT_LEASE) as again:
            again.owns_all()
            after = emit(database, [f"k{n}" for n in range(20)])
            delivered_all([*before, *during, *after], new, old)
            has(database, "select 1 from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0")
    assert set(before) <= set(ids(new)) | {i for i in ids(old) if ids(old).count(i) > 1}, "from the beginning"


@pytest.mark.fence("positions of a removed sink count for a new one of its name")
def test_nothing_that_an_old_relay_writes_of_a_removed_sink_counts(database: Database) -> None:
    with ledger(database) as old, ledger(database) as new:
        old.register(("s", ["*"], "beginning"))
        old.own("s")
        wanted = old.emit(*(f"k{n}" for n in range(20)))
        for _ in range(5):
            old.store.reclaim_shards("s", old.relay)
        end = Position(old.tick())
        old.know_epochs("s")
        old.park("s", old.row(wanted[0]))
        old.do("select outbox.drop_sink('s', true, 1000, null, null)")
        old.place("s", end)
        with pytest.raises(LeaseLost):
            old.park("s", old.row(wanted[1]))
        new.register(("s", ["*"], "beginning"))
        old.place("s", end)
        assert old.own("s") == [], "of the generation that it knows there is none any more"
        [found] = new.query("select events, exact from outbox_internal.backlog('s', null, 1000, 5.0)")
        assert found == (20, True)
        assert new.query("select 1 from outbox.delivery") == []


def test_rows_that_were_left_of_a_removed_sink_do_not_swallow_events(database: Database) -> None:
    register(database, "s", '["*"]', "beginning")
    emit(database, ["a"])
    left = """insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
              select 's', e.id, e.shard, 'dead', false, now(), e.uid, e.type, 'application/json', e.created_at
                from outbox.event e"""
    do(database, left)
    do(database, "delete from outbox.sink")
    assert query(database, "select 1 from outbox.delivery union all select 1 from outbox.progress") == []
    do(database, left)
    register(database, "s", '["*"]', "beginning")
    assert query(database, "select 1 from outbox.delivery") == []


def test_a_sink_that_is_not_there_cannot_be_removed(database: Database) -> None:
    register(database, "crm", '["*"]')
    with pytest.raises(psycopg.errors.NoDataFound, match="there is no sink 'crmm'") as refused:
        do(database, "select outbox.drop_sink('crmm', true, 1000, null, null)")
    assert refused.value.diag.message_hint == "There are: crm"
    assert query(database, "select count(*) from outbox.shard") == [(SHARDS,)]


def test_a_relay_whose_sink_was_removed_says_so_and_serves_it_when_it_is_back(database: Database) -> None:
    sink = MemorySink()
    with running(
        database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, expects={"lease_lost", "reload"}
    ) as harness:
        harness.owns_all()
        do(database, REMOVALS["function"])
        until(lambda: _removed(harness), seconds=10, what="the removal is noticed")
        register(database, "s", '["*"]', "beginning")
        delivered(sink, emit(database, ["a"]))
        assert not harness.leases("s").missing


def _removed(harness: RelayHarness) -> bool:
    return harness.leases("s").missing


# -- relays that come and go ----------------------------------------------------------------------------------------


def test_the_configuration_of_relays_that_stay_wins_over_that_of_one_that_has_gone(database: Database) -> None:
    """During a rolling deployment an old process starts once more, and is then replaced."""
    new = MemorySink()
    with running(database.dsn, (WIDE, new), lease_seconds=SHORT_LEASE, expects={"reload"}) as stays:
        owns(stays, SHARDS)
        old = RelayHarness(database.dsn, [(NARROW, MemorySink())], lease_seconds=SHORT_LEASE)
        old.start()
        owns(old, SHARDS)
        owns(stays, 0)
        old.stop()
        wanted = emit_as(database, "b", 3)
        delivered_all(wanted, new)
        assert query(database, "select patterns from outbox.sink") == [(["a", "b"],)]


def test_two_configurations_that_are_alive_do_not_take_turns(database: Database) -> None:
    with (
        running(database.dsn, (NARROW, MemorySink()), lease_seconds=SHORT_LEASE) as older,
        running(database.dsn, (WIDE, MemorySink()), lease_seconds=SHORT_LEASE) as newer,
    ):
        owns(newer, SHARDS)
        owns(older, 0)
        before = config(database)
        renewals(older, 8)
        assert config(database) == before
        assert (older.keeper.held["s"], newer.keeper.held["s"]) == (0, SHARDS)


def test_a_paused_sink_is_not_taken_for_one_that_no_relay_serves(database: Database) -> None:
    with (
        running(database.dsn, (NARROW, MemorySink()), lease_seconds=SHORT_LEASE) as older,
        running(database.dsn, (WIDE, MemorySink()), lease_seconds=SHORT_LEASE) as newer,
    ):
        owns(newer, SHARDS)
        do(database, "update outbox.sink set paused = true")
        owns(newer, 0)
        before = config(database)
        renewals(older, 8)
        assert config(database) == before
        do(database, "update outbox.sink set paused = false")
        owns(newer, SHARDS)
        assert config(database) == before


def renewals(harness: RelayHarness, count: int) -> None:
    """Wait until `harness` has renewed its leases so often."""
    start = harness.store.calls["heartbeat"]

    def fact() -> bool:
        return harness.store.calls["heartbeat"] - start >= count

    until(fact, seconds=60, what=f"{count} renewals")


def test_a_relay_does_not_take_back_what_another_has_registered_meanwhile(database: Database) -> None:
    with ledger(database) as books:
        known = (books.store.register_sinks([("s", ["a"], None)], books.tick()))["s"]
        newer = (books.store.register_sinks([("s", ["b"], None)], books.tick()))["s"]
        tick = books.tick()
        assert books.store.reregister_sink("s", ["a"], known, tick) is None
        assert books.query("select patterns, generation from outbox.sink") == [(["b"], newer)]
        assert books.store.reregister_sink("s", ["b"], known, tick) == newer
        again = books.store.reregister_sink("s", ["a"], newer, tick)
        assert again is not None
        assert again > newer
        assert books.store.reregister_sink("gone", ["a"], newer, tick) is None
        assert books.query("select count(*) from outbox.sink") == [(1,)]


# -- positions that are missing -------------------------------------------------------------------------------------

LOSE = """
alter table outbox.progress disable trigger user;
delete from outbox.progress;
alter table outbox.progress enable trigger user;
"""


LOST_SHARDS = "select id from outbox.event where (shard in (3, 7)) = %s order by id"


def test_shards_without_a_position_are_not_served_and_are_named(database: Database) -> None:
    with ledger(database) as books:
        books.register(("s", ["*"], "beginning"))
        books.emit(*"abc")
        do(database, LOSE)
        assert books.store.missing_positions() == {"s": list(range(SHARDS))}
        books.place("s", Position(books.tick()), range(60))
        assert books.store.missing_positions() == {"s": [60, 61, 62, 63]}
        with pytest.raises(PositionsMissing, match=r"sink s: 4 of its shards .*\(60, 61, 62, 63\).*rebase"):
            books.store.positions("s", range(SHARDS))
        assert set(books.store.positions("s", range(60))) == set(range(60))


def test_shards_whose_rows_were_deleted_are_named_and_their_events_come_after_a_rebase(
    database: Database,
) -> None:
    before, after = MemorySink(), MemorySink()
    with ledger(database) as books:
        books.register(("s", ["*"], "beginning"))
        books.emit(*map(str, range(200)))
        do(database, "delete from outbox.shard where shard in (3, 7)")
        lost, others = ([event for (event,) in books.query(LOST_SHARDS, wanted)] for wanted in (True, False))
        assert lost
        with running(database.dsn, (spec("s"), before)) as harness:
            delivered(before, others)
            harness.stop()
        assert books.store.missing_positions() == {"s": [3, 7]}
        found = status(books.store)
        assert "2 shards without a position" in status_text(found)
        rebase(database.dsn)
        assert books.store.missing_positions() == {}
        with running(database.dsn, (spec("s"), after)):
            delivered(after, lost)
    assert not set(lost) & set(ids(before))


def test_status_says_that_positions_are_missing_and_counts_the_log(database: Database) -> None:
    with ledger(database) as books:
        books.register(("s", ["*"], "beginning"))
        books.emit(*"abc")
        books.catch_up("s")
        do(database, LOSE)
        found = status(books.store)
        assert (found["sinks"]["s"]["missing_positions"], found["sinks"]["s"]["backlog"]) == (SHARDS, 3)
        assert "64 shards without a position" in status_text(found)


def test_a_relay_does_not_serve_shards_without_a_position_until_rebase_gives_them_one(database: Database) -> None:
    sink = MemorySink()
    with ledger(database) as books:
        books.register(("s", ["*"], "beginning"))
        wanted = books.emit(*"abc")
        do(database, LOSE)
        harness = RelayHarness(database.dsn, [(spec("s"), sink)], expects={"database_refused"})
        harness.start()
        until(lambda: _faulty(harness), seconds=10, what="the relay finds that positions are missing")
        assert "no position" in str(harness.loops[0].fault)
        harness.crash()
        assert ids(sink) == []
        do(database, "delete from outbox.relay")
        rebase(database.dsn)
        assert books.store.missing_positions() == {}
        with running(database.dsn, (spec("s"), sink)):
            delivered(sink, wanted)


WEBHOOK = """
[database]
dsn = "{dsn}"
[sinks.s]
type = "webhook"
url = "https://127.0.0.1:{port}/"
allow_networks = ["127.0.0.1/32"]
secrets = ["whsec_bWlzc2luZ3Bvc2l0aW9uc21pc3NpbmdwbyEh"]
start = "beginning"
[routes]
"*" = ["s"]
"""


def test_readyz_and_check_online_say_that_positions_are_missing(database: Database, tmp_path: Path) -> None:
    register(database, "s", '["*"]', "beginning")
    do(database, LOSE)
    service = RelayService(tmp_path, WEBHOOK.format(dsn=database.dsn, port=free_port()), expects={"database_refused"})
    with service.start(wait=False) as relay:
        until(lambda: "no position" in _fault(relay), seconds=30, what="the fault is shown")
        assert relay.ask("/readyz")[0] == 503
        ended = outbox_relay("check", "-c", relay.config, "--online")
    assert ended.code == 2
    assert "sink s: 64 of its shards have no position" in ended.err


def test_a_relay_that_refuses_the_log_is_not_ready_until_the_log_is_its_servers_again(
    database: Database, tmp_path: Path
) -> None:
    text = WEBHOOK.format(dsn=database.dsn, port=free_port())
    with RelayService(tmp_path, text, expects={"database_refused", "incarnation"}).start() as relay:
        do(database, "update outbox.meta set system_identifier = system_identifier + 1")
        do(
            database, "select setval('outbox.server_mark', 1)"
        )  # the identifier is asked for once the incarnation has changed
        until(lambda: "rebase" in _fault(relay), seconds=30, what="the fault is shown")
        assert relay.ask("/readyz")[0] == 503
        do(database, "update outbox.meta set system_identifier = system_identifier - 1")
        until(lambda: relay.ready, seconds=30, what="the relay is ready again")
        assert _fault(relay) == "None"


def _fault(relay: RelayService) -> str:
    _, body = relay.ask("/readyz")
    return str(body and body["sinks"].get("s", {}).get("fault"))


def _faulty(harness: RelayHarness) -> bool:
    return harness.loops[0].fault is not None
