"""Archives of days: passes that write them, and their events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outbox_relay.postgres.retention import DayEvent
from outbox_relay.retention.files import Folder
from tests.support.command import Ended, inside
from tests.support.database import Database
from tests.support.days import Connection, date_ago, emit_ago, fill_days, keep


def write_config(database: Database, folder: Path, address: str, form: str = "jsonl.zst") -> Path:
    """Write a file with an archive."""
    file = folder / "relay.toml"
    file.write_text(
        f'[database]\ndsn = "{database.dsn}"\n[retention]\narchive = "{address}"\narchive_format = "{form}"\n'
    )
    return file


def run(config: Path) -> Ended:
    """Do a pass."""
    return inside("retention", "run", "--json", "-c", config)


def archived(address: str, query: str = "") -> list[DayEvent]:
    """Return the events of a verified archive."""
    root, _, name = address.rpartition("/")
    folder = Folder(root + query, name)
    manifest: dict[str, Any] = json.loads(folder.read("manifest.json"))
    events = [event for part in manifest["parts"] for event in folder.events(part["name"], manifest["format"])]
    assert len(events) == manifest["events"]
    return events


def odd_events(connection: Connection) -> None:
    """Fill the day of 12 days ago with events of every kind."""
    fill_days(connection, 12, 12, 50)
    connection.execute(
        "insert into outbox.event (shard, uid, type, key, payload, content_type, headers, deliver_at, created_at)"
        " select outbox_internal.shard_of(coalesce(k, ''), null), gen_random_uuid(), 'odd', k, p, 'x/y', h, d,"
        " %s::timestamptz from (values ('a', 'aGk='::bytea, '{\"a\": \"b\"}'::jsonb, 'infinity'::timestamptz),"
        " (null, '\\xff00', null, null), ('', '', '{}', '9998-01-01'), (E'ü\\n''\"', null, null, null)) v (k, p, h, d)",
        (f"{date_ago(12)} 13:00:00.000001+00",),
    )
    emit_ago(connection, 0)
    keep(connection, 5, archive=True)
