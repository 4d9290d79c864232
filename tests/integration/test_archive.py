"""Days that are archived before they are emptied: verified, never lost, and never emptied without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from psycopg import sql

from outbox_relay.postgres.retention import DayEvent
from outbox_relay.retention.files import COLUMNS
from tests.support.archives import archived, odd_events, run, write_config
from tests.support.command import inside
from tests.support.database import Database
from tests.support.days import Connection, date_ago, emit_ago, events_of, fill_days, keep, register, table_ago
from tests.support.power_cut import DECISIVE, PARENT, POINTS
from tests.support.wait import until

FORMS = ["jsonl.zst", "parquet"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Path:
    """Return a file with an archive in a directory."""
    return write_config(database, tmp_path, str(tmp_path / "archive"))


USUAL = {
    "content_type": sql.SQL("coalesce(content_type, 'application/json')"),
    "emitter": sql.SQL("pg_get_userbyid(emitter)::text"),
}


def stored(connection: Connection, table: str) -> list[DayEvent]:
    """Return the events of a partition, as they are archived."""
    columns = sql.SQL(", ").join(
        sql.SQL("{}::text").format(sql.Identifier(name))
        if name in {"xid", "uid", "headers", "deliver_at", "created_at"}
        else USUAL.get(name, sql.Identifier(name))
        for name in COLUMNS
    )
    connection.execute("set timezone = 'UTC'")
    statement = sql.SQL("select {}, payload, null from outbox.{} order by id, uid").format(
        columns, sql.Identifier(table)
    )
    return [DayEvent(*row) for row in connection.execute(statement).fetchall()]


@pytest.mark.parametrize("form", FORMS)
def test_a_day_is_archived_byte_for_byte_and_emptied(
    database: Database, owner: Connection, tmp_path: Path, form: str
) -> None:
    odd_events(owner)
    before = stored(owner, table_ago(12))
    ended = run(write_config(database, tmp_path, str(tmp_path / "archive"), form))
    assert (ended.code, ended.json["emptied"]) == (0, [date_ago(12)]), ended
    [(address, events, written)] = owner.execute(
        "select archived_to, events, writing_to from outbox.day where emptied_at is not null"
    ).fetchall()
    assert (events, written) == (54, None)
    assert archived(address) == before
    manifest = json.loads((Path(address) / "manifest.json").read_text())
    assert manifest["key_hashes_complete"]
    assert set(manifest["key_hashes"]) == {
        key_hash for (key_hash,) in owner.execute("select outbox_internal.keyed_hash('k' || n) "
                                                  "from generate_series(1, 50) n")
    } | {key_hash for (key_hash,) in owner.execute("select outbox_internal.keyed_hash(k) from (values ('a'), (''), "
                                                   "(E'ü\\n''\"')) v (k)")}  # fmt: skip
    assert (Path(address) / "manifest.json").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("form", ["jsonl.zst", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_day_is_archived_to_s3(database: Database, owner: Connection, tmp_path: Path, form: str) -> None:
    from moto.server import ThreadedMotoServer

    odd_events(owner)
    before = stored(owner, table_ago(12))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    try:
        _, port = server.get_host_and_port()
        query = f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in keys.items():
                patch.setenv(name, value)
            urlopen(Request(f"http://127.0.0.1:{port}/events", method="PUT")).close()
            ended = run(write_config(database, tmp_path, f"s3://events/log{query}", form))
            assert (ended.code, ended.json["emptied"]) == (0, [date_ago(12)]), ended
            [(address,)] = owner.execute("select archived_to from outbox.day where emptied_at is not null").fetchall()
            assert address.startswith(f"s3://events/log/{date_ago(12)}-")
            assert archived(address, query) == before
    finally:
        server.stop()


def kept(*configs: Path) -> list[str]:
    """Return the reasons of passes for the day that they leave."""
    return [reason for config in configs for reason in run(config).json["kept"].values()]


def test_an_archive_that_cannot_be_written_empties_nothing(
    database: Database, owner: Connection, tmp_path: Path
) -> None:
    odd_events(owner)
    (tmp_path / "file").write_text("")
    ended = run(write_config(database, tmp_path, str(tmp_path / "file" / "archive")))
    assert ended.code == 1
    [reason] = ended.json["kept"].values()
    assert "was not written: " in reason
    assert reason.endswith("nothing was emptied")
    assert events_of(owner, table_ago(12)) == 54
    for command in ("status", "retention status"):
        assert reason in inside(*command.split(), "--dsn", database.dsn).out
    without = inside("retention", "run", "--json", "--dsn", database.dsn)
    assert "must be archived first" in without.json["kept"][date_ago(12)]
    [day] = inside("status", "--json", "--dsn", database.dsn).json["retention"]["blocked"]
    assert day["left_because"] == without.json["kept"][date_ago(12)]
    assert events_of(owner, table_ago(12)) == 54
    assert run(write_config(database, tmp_path, str(tmp_path / "archive"))).code == 0
    days = inside("retention", "status", "--json", "--dsn", database.dsn).json["days"]
    assert {(day["left_because"], day["left_at"]) for day in days} == {(None, None)}


# The others take long, and end as one of these does.
@pytest.mark.fence("a day is emptied whose archive misses an event")
@pytest.mark.parametrize("form", ["jsonl.zst", pytest.param("parquet", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "point",
    [point if point == DECISIVE else pytest.param(point, marks=pytest.mark.thorough) for point in POINTS],
)
def test_a_power_cut_loses_no_event(
    owner: Connection, database: Database, tmp_path: Path, point: str, form: str
) -> None:
    config = write_config(database, tmp_path, str(tmp_path / "archive"), form)
    fill_days(owner, 12, 11, 5)
    emit_ago(owner, 0)
    register(owner, "crm", "now")
    keep(owner, 5, archive=True)
    tables = {date_ago(n): table_ago(n) for n in (12, 11)}
    before = {day: stored(owner, table) for day, table in tables.items()}

    def accounted() -> None:
        """Assert that each event is in the log, or in the verified archive that the database names."""
        done = dict(
            owner.execute("select day::text, archived_to from outbox.day where emptied_at is not null").fetchall()
        )
        for day, events in before.items():
            there = owner.execute("select to_regclass(%s)", (f"outbox.{tables[day]}",)).fetchone() != (None,)
            left = stored(owner, tables[day]) if there else []
            assert left == events or (not left and archived(done[day]) == events), (point, day)

    killed = subprocess.run(
        [sys.executable, "-m", "tests.support.power_cut", point, "retention", "run", "--json", "-c", str(config)],
        cwd=ROOT, capture_output=True, check=False, timeout=60, env=dict(os.environ),
    )  # fmt: skip
    # A writing process that is killed ends the pass with an archive that failed.
    assert killed.returncode == (-signal.SIGKILL if point.lstrip("2")[:-1] in PARENT else 1), killed
    accounted()
    owner.execute("update outbox.retention set owner = null")
    until(lambda: run(config).json["left"] == 0, seconds=30, what="every day is emptied after the cut")
    accounted()
    assert [events_of(owner, table) for table in tables.values() if owner.execute(
        "select to_regclass(%s)", (f"outbox.{table}",)).fetchone() != (None,)] in ([], [0], [0, 0])  # fmt: skip
    folders = {folder.name for folder in (config.parent / "archive").iterdir()}
    named = {path.rpartition("/")[2] for (path,) in owner.execute("select archived_to from outbox.day").fetchall()}
    assert named == folders
