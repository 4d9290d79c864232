"""Drills as a command: the promises are kept, and no process or file is left however a drill ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.cli.workbench import DRILLS
from tests.support.child_processes import END_SECONDS, ChildProcess, reachable

pytestmark = [pytest.mark.postgres, pytest.mark.kafka, pytest.mark.thorough]

RUN_SECONDS = 300
GRACE_SECONDS = "60"
"""Added to the promised times: the machine may be busy."""
SEEN = {
    "worker-crash": "up 1 of 2",
    "failover": "the standby accepts writes",
    "poison": "outbox_exceptions(crm,dead) ",
    "destination-down": "outbox_circuit_state(crm) 2",
    "burst": "events were committed at once",
    "long-transaction": "outbox_oldest_transaction_seconds ",
}
"""A part of a line that an operator sees during each drill."""


@pytest.fixture
def directory() -> Generator[Path]:
    """Yield a directory for the drill."""
    with reachable() as directory:
        yield directory


@pytest.mark.parametrize("name", DRILLS)
def test_drill_keeps_every_promise_and_leaves_nothing(directory: Path, name: str) -> None:
    drill = ChildProcess(directory, "drill", name, "--quick", "--grace", GRACE_SECONDS, "--json")
    try:
        assert drill.process.wait(RUN_SECONDS) == 0, drill.err + drill.out
        report = json.loads(drill.out)
        left = drill.left()
    finally:
        drill.close()
    assert (report["drill"], report["kept"]) == (name, True)
    assert {"events: lost", "crm: lost", "crm: duplicates", "metrics of alerts normal again"} <= {
        check["what"] for check in report["checks"]
    }
    assert any(SEEN[name] in line for line in report["observed"]), report["observed"]
    assert any("status   crm" in line for line in report["observed"])
    assert any("doctor   " in line for line in report["observed"])
    assert left == []


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("the receiver was killed", signal.SIGINT, 130),
        ("starting two relays", signal.SIGTERM, 143),
    ],
)
def test_signal_leaves_nothing_behind(directory: Path, words: str, number: signal.Signals, code: int) -> None:
    drill = ChildProcess(directory, "drill", "destination-down")
    try:
        drill.says(words)
        drill.process.send_signal(number)
        assert drill.process.wait(END_SECONDS) == code
        assert drill.left() == []
        assert drill.err.rstrip().endswith("nothing is left running")
        assert "Traceback" not in drill.err
    finally:
        drill.close()
