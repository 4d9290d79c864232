"""The memory of a relay stays within its bounds: short forms of two measurements."""

import sys
from pathlib import Path

import pytest

from tests.bench import dead_destination, huge_transaction

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600), pytest.mark.xdist_group("memory")]


def tell(line: str) -> None:
    """Print a line of the measurement, which a failure shows."""
    sys.stdout.write(line + "\n")


def test_nothing_grows_while_a_destination_is_dead() -> None:
    """Memory, open files, log lines and sessions: two minutes, of which the first half a minute does not count."""
    assert dead_destination.run(8, 15.0, 300, dead_destination.FOREIGN, tell) == []


def test_a_huge_transaction_stays_within_the_memory_of_its_sink(tmp_path: Path) -> None:
    assert huge_transaction.measure(tmp_path, 200_000, None, True, tell) == []
