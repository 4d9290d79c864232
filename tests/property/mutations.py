"""What the state machine is worth: each rule is taken out of the product's own code, and it must go red.

usage: python -m tests.property.mutations [NUMBER …]

Every mutation works on a copy of the project. Exit code 1 when one of them stays unnoticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("outbox_relay", "schema", "tests", "pyproject.toml")
SEQUENCES = 2_000
"""How many sequences it gets to find one."""
LONGEST_SECONDS = 1_200.0
SCHEMA = "schema/0001_outbox.sql"


class Mutation(NamedTuple):
    """A rule, and the text that is replaced to take it out, which stands in `file` once."""

    left_out: str
    file: str
    text: str
    instead: str = ""


MUTATIONS = (
    Mutation("a settlement with rows compares epoch and owner", SCHEMA,
             " and s.epoch = f.epoch and s.owner = owner_id\n"
             "             order", "\n             order"),
    Mutation("it keeps its shards locked until it commits", SCHEMA, "               for share of s\n"),
    Mutation("of the ledger's rows the highest epoch counts", SCHEMA,
             "order by p.sink, u.shard, u.epoch desc, p.seq desc",
             "order by p.sink, u.shard, p.seq desc"),
    Mutation("a row is gone only under its lease", "outbox_relay/postgres/sql/delete_rows.sql",
             " and d.lease = r.lease"),
    Mutation("a row goes back only under its lease", "outbox_relay/postgres/sql/update_rows.sql",
             " and d.lease = r.lease"),
    Mutation("no row is claimed before an earlier one of its key", SCHEMA,
             " and not d.suspect\n"
             "               and (not d.ordered or not exists (\n"
             "                    select from outbox.delivery f\n"
             "                     where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered\n"
             "                       and (f.state <> 'dead' or hold)))\n",
             " and not d.suspect\n"),
    Mutation("rows of a key that are claimed together have none before them that is not", SCHEMA,
             "    if behind <> '{}' then", "    if false then"),
    Mutation("blocked keys are known before anything is read", "outbox_relay/relay/log_reader.py",
             "        if self._spec.ordered:\n            sink, hold", "        if False:\n            sink, hold"),
    Mutation("a key is free only by an answer asked for after its last settlement", "outbox_relay/domain/in_flight.py",
             " and self._keys.get(key, (asked_at + 1, 0))[0] <= asked_at]", " and key in self._keys]"),
)  # fmt: skip


def noticed(mutation: Mutation) -> bool:
    """Whether the state machine goes red without the rule. Raises RuntimeError when it did not run."""
    with tempfile.TemporaryDirectory(prefix="outbox-mutation-") as directory:
        copy = Path(directory)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        file = copy / mutation.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutation.text) != 1:
            raise RuntimeError(f"{mutation.file} does not hold once what is to be taken out: {mutation.left_out}")
        file.write_text(text.replace(mutation.text, mutation.instead), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-k", "some", "tests/property/test_state_machine.py"],
            cwd=copy, env={**os.environ, "OUTBOX_TEST_SEQUENCES": str(SEQUENCES), "PYTHONPATH": str(copy)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST_SECONDS, check=False,
        )  # fmt: skip
    if run.returncode not in (0, 1):
        raise RuntimeError(f"the tests did not run:\n{run.stdout[-2_000:]}")
    return run.returncode == 1


def main(arguments: list[str]) -> int:
    """Try them all, or those with these numbers."""
    chosen = [MUTATIONS[int(number) - 1] for number in arguments] or MUTATIONS
    missed = 0
    for mutation in chosen:
        began = time.monotonic()
        red = noticed(mutation)
        missed += not red
        found = "found" if red else "NOT FOUND"
        print(f"{mutation.left_out}: {found} in {time.monotonic() - began:.0f} s", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
