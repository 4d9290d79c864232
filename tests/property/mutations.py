"""Take rules out of the product's own code, one by one, and see that the state machine fails without each of them.

usage: python -m tests.property.mutations [NUMBER …]

Every mutation works on a copy of the project. The exit code is 1 if the state machine passes without a rule, or does
not end in time: a timeout shows nothing of the rule.
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
LONGEST_SECONDS = 700.0
"""Longer than pytest's own limit for the test."""
TIMED_OUT = "from pytest-timeout"
"""Text of pytest for a test that exceeded its time limit."""
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
            return Outcome(False, "TIMED OUT") if TIMED_OUT in reason else Outcome(True, f"found: {reason}")
        case _:
            raise RuntimeError(f"the tests did not run:\n{output[-2_000:]}")


def tried(mutation: Mutation) -> Outcome:
    """Run the state machine without the rule, in a copy of the project."""
    with tempfile.TemporaryDirectory(prefix="outbox-mutation-") as directory:
        copy = Path(directory)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        _take_out(mutation, copy / mutation.file)
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


def _take_out(mutation: Mutation, file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.text) != 1:
        raise RuntimeError(f"{mutation.file} does not hold once what is to be taken out: {mutation.left_out}")
    file.write_text(text.replace(mutation.text, mutation.instead), encoding="utf-8")


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
