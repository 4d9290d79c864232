"""The bounds that the measurement with a dead destination judges."""

from dataclasses import replace

import pytest

from tests.bench.dead_destination import GROWTH_BYTES, GROWTH_FILES, GROWTH_LINES, SESSIONS, Use, violations

USE = Use(70_000_000, 15, 5, SESSIONS)
"""The use of a relay that has begun."""


def test_growth_of_the_first_periods_and_a_little_afterwards_is_no_violation() -> None:
    first = Use(1, 1, 1, 1)
    last = Use(USE.resident_bytes + GROWTH_BYTES - 1, 15 + GROWTH_FILES, 5 + GROWTH_LINES, SESSIONS)
    assert violations([first, USE, last]) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (replace(USE, resident_bytes=USE.resident_bytes + GROWTH_BYTES), "memory grew by 20.0 MB"),
        (replace(USE, open_files=16 + GROWTH_FILES), "open files grew by 11"),
        (replace(USE, log_lines=6 + GROWTH_LINES), "the log grew by 21 lines"),
        (replace(USE, sessions=SESSIONS + 1), "the relay had 13 database sessions, more than 12"),
    ],
    ids=["memory", "files", "lines", "sessions"],
)
def test_each_kind_of_growth_is_a_violation(more: Use, said: str) -> None:
    assert violations([USE, USE, USE, more]) == [said]
    assert violations([USE, USE]) == []
