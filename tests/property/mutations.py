"""Take rules out of the product's own code, one by one, and see that the state machine fails without each of them.

usage: python -m tests.property.mutations [NUMBER …]

Every mutation works on a copy of the project. The exit code is 1 if the state machine passes without a rule, or does
not end in time: a timeout shows nothing of the rule.
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
SEQUENCES = 2_000
"""Maximum number of sequences to find one."""
LONGEST_SECONDS = 700.0
"""Longer than pytest's own limit for the test."""
TIMED_OUT = "from pytest-timeout"
OF_THE_TOOL = "hypothesis.errors."
"""Errors that say something of the drawn sequences, and nothing of the product."""
"""Text of pytest for a test that exceeded its time limit."""
STANDING = "schema/views.sql"
CLAIM = "outbox_internal.claim_rows"
SETTLE = "outbox_internal.settle"
EARLIER = "outbox_relay/relay/earlier_outcomes.py"


class Mutation(NamedTuple):
    """A rule, and the text that is replaced to take it out, which is in `place` once.

    `place` is a file, or a function of the database.
    """

    left_out: str
    place: str
    text: str
    instead: str = ""

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
             "             order", "\n             order"),
    Mutation("it keeps its shards locked until it commits", SETTLE, "               for share of s\n"),
    Mutation("of the ledger's rows the highest epoch counts", STANDING,
             "order by k.name, u.shard, u.epoch desc, p.seq desc",
             "order by k.name, u.shard, p.seq desc"),
    Mutation("a row is gone only under its lease", "outbox_relay/postgres/sql/delete_rows.sql",
             " and d.lease = r.lease"),
    Mutation("a row goes back only under its lease", "outbox_relay/postgres/sql/update_rows.sql",
             " and d.lease = r.lease"),
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
             "                    not"),
    Mutation("rows of a key that are claimed together have none before them that is not", CLAIM,
             "(other.id is null or i.id < other.id) and (c.dead is null or i.id < c.dead)", "true"),
    Mutation("blocked keys are known before anything is read", EARLIER,
             "if self._spec.ordered and await self._load_keys(shards):", "if False:"),
    Mutation("a session ends when it lost a shard, even if it claimed it again", "outbox_relay/relay/sink_leases.py",
             "        return self._lost\n", "        return False\n"),
    Mutation("the keys of dead rows are asked for before a read is handed over", EARLIER,
             "if events and self._dead_rows:", "if False:"),
    Mutation("the keys of retried rows are known when no dead row is left", EARLIER,
             " or await self._load_keys(self._in_flight.shards)"),
    Mutation("what is read again is compared with the marks of discarded events", EARLIER,
             "if events and events[0].id <= self._highest_discarded:", "if False:"),
    Mutation("a key is free only by an answer asked for after its last settlement", "outbox_relay/domain/in_flight.py",
             " and self._keys.get(key, (asked_at + 1, 0))[0] <= asked_at]", " and key in self._keys]"),
)  # fmt: skip


class Outcome(NamedTuple):
    """The end of the state machine without a rule. `found` is true only if it judged the product to be wrong."""

    found: bool
    text: str


def outcome(exit_code: int, output: str) -> Outcome:
    """Return what the end of pytest says. Raise RuntimeError if the tests did not run."""
    failed = [line.partition(" - ")[2] for line in output.splitlines() if line.startswith("FAILED ")]
    match exit_code, failed:
        case 0, []:
            return Outcome(False, "NOT FOUND")
        case 1, [reason]:
            if TIMED_OUT in reason:
                return Outcome(False, "TIMED OUT")
            found = not reason.startswith(OF_THE_TOOL)
            return Outcome(found, f"found: {reason}" if found else f"NOT JUDGED: {reason}")
        case _:
            raise RuntimeError(f"the tests did not run:\n{output[-2_000:]}")


def tried(mutation: Mutation) -> Outcome:
    """Run the state machine without the rule, in a copy of the project."""
    with tempfile.TemporaryDirectory(prefix="outbox-mutation-") as directory:
        copy = Path(directory)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        mutation.take_out(copy)
        environment = {
            **os.environ,
            "OUTBOX_TEST_SEQUENCES": str(SEQUENCES),
            "OUTBOX_TEST_SHRINK": "no",
            "PYTHONPATH": str(copy),
            "COLUMNS": "1000",
        }
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-k", "some", "tests/property/test_state_machine.py"],
                cwd=copy, env=environment, timeout=LONGEST_SECONDS, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(False, "TIMED OUT")
    return outcome(run.returncode, run.stdout)


def main(arguments: list[str]) -> int:
    """Try all mutations, or those with these numbers; return the exit code."""
    chosen = [MUTATIONS[int(number) - 1] for number in arguments] or MUTATIONS
    missed = 0
    for mutation in chosen:
        began = time.monotonic()
        result = tried(mutation)
        missed += not result.found
        print(f"{mutation.left_out} ({time.monotonic() - began:.0f} s): {result.text}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
