"""The plans of statements as the server ran them: a log to run them on, and the nodes of their plans."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.errors import Diagnostic

from outbox_relay.postgres.database import statements

PARTITIONS = 30
NEVER_IN_ORDER = {"Sort", "Incremental Sort", "Seq Scan", "Bitmap Heap Scan", "Bitmap Index Scan", "Hash Join"}


LOG = f"""
do $$
declare
    today timestamptz := date_trunc('day', now() at time zone 'UTC') at time zone 'UTC';
    day timestamptz;
    part text;
begin
    for n in 1..{PARTITIONS - 1} loop
        day := today - n * interval '1 day';
        part := 'past_' || n;
        execute format('create table outbox.%I (like outbox.event including defaults including generated)', part);
        execute format('alter table outbox.%I set (autovacuum_enabled = off)', part);
        execute format('alter table outbox.event attach partition outbox.%I for values from (%L) to (%L)',
                       part, day, day + interval '1 day');
    end loop;
end
$$;
alter table outbox.delivery set (autovacuum_enabled = off);
analyze
"""
EVENTS_OF_A_DAY = """
insert into outbox.event (shard, uid, type, key, payload, content_type, created_at)
select outbox_internal.shard_of('key-' || g % 1000, null), gen_random_uuid(), 'type.' || g % 7, 'key-' || g % 1000,
       '{{}}', 'text/plain', now() - {} * interval '1 day'
  from generate_series(1, {}) g
"""
EXPLAIN = """
load 'auto_explain';
set auto_explain.log_min_duration = 0;
set auto_explain.log_nested_statements = on;
set auto_explain.log_analyze = on;
set auto_explain.log_timing = off;
set auto_explain.log_format = json;
set auto_explain.log_level = notice
"""


@dataclass(frozen=True)
class Node:
    """One node of a plan that was run; counts are of all its loops."""

    type: str
    relation: str
    index: str
    condition: str
    returned: int
    scanned: int


@dataclass
class Explained:
    """A connection on which every plan is shown."""

    connection: psycopg.Connection[Any]
    texts: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.connection.add_notice_handler(self._hear)
        self.connection.execute(EXPLAIN)

    def _hear(self, notice: Diagnostic) -> None:
        self.texts.append(notice.message_primary or "")

    def run(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of one of the product's statements; the plans inside it are kept."""
        self.texts.clear()
        return self.connection.execute(statements()[statement], {"server": None, **parameters}).fetchall()

    def nodes(self, *, of: str) -> list[Node]:
        """Return the nodes of the statement inside the function that has the text ``of``."""
        plans = [json.loads(text[text.index("{") :]) for text in self.texts if "plan:" in text]
        [plan] = [plan["Plan"] for plan in plans if of in plan["Query Text"]]
        return list(walk(plan))

    def relations(self) -> set[str]:
        """Return every table that any of the plans read, by name."""
        plans = [json.loads(text[text.index("{") :])["Plan"] for text in self.texts if "plan:" in text]
        return {node.relation for plan in plans for node in walk(plan) if node.relation}

    def scans(self, *tables: str, of: str) -> list[Node]:
        """Return the scans of the tables whose names begin with ``tables``."""
        return [node for node in self.nodes(of=of) if node.relation.startswith(tables) and node.type != "ModifyTable"]

    def conditions(self, *, of: str) -> set[tuple[str, str]]:
        """Return (index, condition) of every use of an index; an index of a partition counts as that of the log."""
        uses = [node for node in self.nodes(of=of) if node.index]
        return {(re.sub(r"^(event|past)_\w+?_(?=id_shard|xid)", "event_", use.index), use.condition) for use in uses}


def walk(plan: Mapping[str, Any]) -> Iterator[Node]:
    loops = plan["Actual Loops"]
    if not loops:  # never run: what only sinks with when_dead = "hold" ask
        return
    returned = round(plan["Actual Rows"] * loops)
    removed = round((plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)) * loops)
    yield Node(
        plan["Node Type"],
        plan.get("Relation Name", ""),
        plan.get("Index Name", ""),
        plan.get("Index Cond", ""),
        returned,
        returned + removed,
    )
    for child in plan.get("Plans", ()):
        yield from walk(child)
