"""The cost of an emit for its transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from tests.bench.database import PAYLOAD, TYPE, BenchDatabase
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import TRANSACTIONS_PER_SECOND, Figure, ratio
from tests.bench.scenarios.scenario import Scenario

QUICK_SECONDS, FULL_SECONDS = 1.0, 2.0
QUICK_TURNS, FULL_TURNS = 1, 7
"""Number of turns of each form; short turns let changing conditions affect all forms."""
CLIENTS = (1, 16)
SCALE = 16
"""Branches of the TPC-B-like transaction, as many as clients to avoid waits for row locks."""
INITIALIZE_SECONDS = 120.0
TABLE = "create table shop_order (id bigserial primary key, customer integer not null, total numeric not null)"
SET = "\\set k random(1, 5000)\n\\set delta random(-5000, 5000)\n"
ONE_INSERT = SET + "begin;\ninsert into shop_order (customer, total) values (:k::int, 12.34);\n{more}commit;\n"
TPCB = (
    SET
    + f"""\\set aid random(1, 100000 * {SCALE})
\\set bid random(1, 1 * {SCALE})
\\set tid random(1, 10 * {SCALE})
begin;
update pgbench_accounts set abalance = abalance + :delta where aid = :aid;
select abalance from pgbench_accounts where aid = :aid;
update pgbench_tellers set tbalance = tbalance + :delta where tid = :tid;
update pgbench_branches set bbalance = bbalance + :delta where bid = :bid;
insert into pgbench_history (tid, bid, aid, delta, mtime) values (:tid, :bid, :aid, :delta, current_timestamp);
"""
    + "{more}commit;\n"
)
ONE = "one insert"
TRANSACTIONS: Mapping[str, str] = {ONE: ONE_INSERT, "TPC-B-like": TPCB}
"""A quick run omits the second one with one client."""
WITHOUT, INSERT, EMIT = "without", "with a plain INSERT", "with emit"
MORE: Mapping[str, str] = {
    WITHOUT: "",
    INSERT: "insert into outbox.event (shard, type, key, payload) values "
    "(outbox_internal.shard_of('k' || :k::int, null), "
    f"'{TYPE}', 'k' || :k::int, '\\x{PAYLOAD.encode().hex()}'::bytea);\n",
    EMIT: f"select outbox.emit('{TYPE}', '{PAYLOAD}', key => 'k' || :k::int);\n",
}
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure every transaction in its three forms, with 1 and 16 clients; the first form changes with every turn."""
    database = bench.new_database()
    database.run(TABLE)
    bench.pgbench(database, "--initialize", "--quiet", f"--scale={SCALE}", seconds=INITIALIZE_SECONDS)
    database.checkpoint()
    found: list[Figure] = []
    for name, script in TRANSACTIONS.items():
        for clients in CLIENTS if bench.options.full or name == ONE else CLIENTS[-1:]:
            found += _compared(bench, database, name, script, clients)
    return found


def _compared(bench: BenchEnvironment, database: BenchDatabase, name: str, script: str, clients: int) -> list[Figure]:
    taken: dict[str, list[float]] = {form: [] for form in MORE}
    for turn in range(FULL_TURNS if bench.options.full else QUICK_TURNS):
        first = (bench.run_number + turn) % len(MORE)
        for form in [*MORE][first:] + [*MORE][:first]:
            taken[form].append(_tps(bench, database, script.replace("{more}", MORE[form]), clients))
    tps = {form: median(values) for form, values in taken.items()}
    label = f"{name}, {clients} {'client' if clients == 1 else 'clients'}"
    return [
        *(Figure(f"{label}, {form}", tps[form], TRANSACTIONS_PER_SECOND) for form in MORE),
        ratio(f"{label}: what emit leaves of the rate", tps[EMIT], tps[WITHOUT]),
        ratio(f"{label}: cost of emit beside the INSERT", tps[INSERT], tps[EMIT]),
    ]


def _tps(bench: BenchEnvironment, database: BenchDatabase, script: str, clients: int) -> float:
    file = bench.new_path(".sql")
    file.write_text(script)
    seconds = max(1, round(bench.scaled_seconds(QUICK_SECONDS, FULL_SECONDS)))
    printed = bench.pgbench(
        database, "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={clients}", "--jobs=1",
        f"--time={seconds}", seconds=seconds + INITIALIZE_SECONDS,
    )  # fmt: skip
    tps = _TPS.search(printed)
    return float(tps[1]) if tps else 0.0


SCENARIO = Scenario(
    "emit",
    "Transactions per second of pgbench (prepared statements) without an event, with a plain INSERT of the same row "
    "into the same table, and with outbox.emit, in turns; no relay is running. The cost beside the INSERT is the ratio "
    "of the durations of a transaction.",
    measure,
    quick=True,
)
