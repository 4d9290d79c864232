"""Take fences out of the schema, one by one, and see that the test that names each of them fails.

usage: python -m tests.property.mutations [NUMBER …]

Every mutation works on a copy of the project. The exit code is 1 if a test passes without its fence. Fences of the
relay's own code are taken out by ``python -m tests.simulation fences``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("outbox_relay", "schema", "tests", "pyproject.toml")
LONGEST_SECONDS = 600.0
OWNERSHIP = "tests/integration/test_ownership.py::"
FENCING = "tests/integration/test_fencing.py::"
FUNCTIONS = "tests/integration/test_reading_functions.py::"
CLAIM = "outbox_internal.claim_rows"
SETTLE = "outbox_internal.settle"


class Mutation(NamedTuple):
    """A fence, the text that is replaced to take it out, which is in `place` once, and the test that fails then.

    `place` is a file, or a function of the database.
    """

    left_out: str
    place: str
    text: str
    instead: str
    test: str

    def found_in(self, root: Path) -> tuple[Path, int, int]:
        """Return the file of `place` below `root`, and the offsets at which `place` begins and ends."""
        if not self.place.startswith("outbox_internal."):
            file = root / self.place
            return file, 0, len(file.read_text(encoding="utf-8"))
        return definition(self.place, root)

    def take_out(self, root: Path) -> None:
        """Replace the text in the project below `root`. Raise RuntimeError unless it is there once."""
        file, start, end = self.found_in(root)
        text = file.read_text(encoding="utf-8")
        if text.count(self.text, start, end) != 1:
            raise RuntimeError(f"{self.place} does not hold once what is to be taken out: {self.left_out}")
        mutated = text[start:end].replace(self.text, self.instead)
        file.write_text(text[:start] + mutated + text[end:], encoding="utf-8")


def definition(function: str, root: Path) -> tuple[Path, int, int]:
    """Return the file that defines `function`, and the offsets of the definition."""
    created = re.compile(rf"^create or replace function {re.escape(function)}\(.*?^\$\$;$", re.MULTILINE | re.DOTALL)
    for file in sorted((root / "schema" / "functions").glob("*.sql")):
        if found := [*created.finditer(file.read_text(encoding="utf-8"))]:
            return file, found[-1].start(), found[-1].end()
    raise RuntimeError(f"no file defines {function}")


MUTATIONS = (
    Mutation("a settlement with rows compares epoch and owner", SETTLE,
             " and s.epoch = f.epoch and s.owner = owner_id\n"
             "             order", "\n             order",
             FENCING + "test_what_a_zombie_writes_changes_nothing"),
    Mutation("it keeps its shards locked until it commits", SETTLE, "               for share of s\n", "",
             OWNERSHIP + "test_a_claim_passes_by_shards_that_a_settlement_has_locked"),
    Mutation("of the ledger's rows the highest epoch counts", "schema/views.sql",
             "order by k.name, u.shard, u.epoch desc, p.seq desc", "order by k.name, u.shard, p.seq desc",
             OWNERSHIP + "test_a_late_position_of_an_old_epoch_never_outranks_the_owner"),
    Mutation("a row is gone only under its lease", "outbox_relay/postgres/sql/delete_rows.sql",
             " and d.lease = r.lease", "", OWNERSHIP + "test_an_expired_lease_of_a_row_settles_nothing"),
    Mutation("a row goes back only under its lease", "outbox_relay/postgres/sql/update_rows.sql",
             " and d.lease = r.lease", "", OWNERSHIP + "test_an_expired_lease_of_a_row_settles_nothing"),
    Mutation("no row is claimed before an earlier one of its key", CLAIM,
             " and not d.suspect\n"
             "               and (not d.ordered or (\n"
             "                    not exists (\n"
             "                        select from outbox.delivery f\n"
             "                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered"
             " and f.state <> 'dead')\n"
             "                    and not",
             " and not d.suspect\n"
             "               and (not d.ordered or (\n"
             "                    not",
             FUNCTIONS + "test_row_waits_behind_earlier_rows_of_its_key"),
    Mutation("rows of a key that are claimed together have none before them that is not", CLAIM,
             "(other.id is null or i.id < other.id) and (c.dead is null or i.id < c.dead)", "true",
             FUNCTIONS + "test_followers_are_not_claimed_behind_what_another_has_just_claimed"),
)  # fmt: skip


def fails(mutation: Mutation) -> bool:
    """Return True if the test fails without the fence, in a copy of the project. Raise RuntimeError if none ran."""
    with tempfile.TemporaryDirectory(prefix="outbox-mutation-") as directory:
        copy = Path(directory)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        mutation.take_out(copy)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", mutation.test],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, timeout=LONGEST_SECONDS, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    if run.returncode not in (0, 1) or "ERROR " in run.stdout:
        raise RuntimeError(f"the test did not run:\n{run.stdout[-2_000:]}")
    return run.returncode == 1


def main(arguments: list[str]) -> int:
    """Try all mutations, or those with these numbers; return the exit code."""
    chosen = [MUTATIONS[int(number) - 1] for number in arguments] or MUTATIONS
    missed = 0
    for mutation in chosen:
        began = time.monotonic()
        found = fails(mutation)
        missed += not found
        print(
            f"{mutation.left_out} ({time.monotonic() - began:.0f} s): {'found' if found else 'NOT FOUND'}", flush=True
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
