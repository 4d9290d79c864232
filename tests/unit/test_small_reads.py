"""The choice between reads of small events and of every size, and where a read of small ones ends."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outbox_relay.domain.event import UNREAD, StoredEvent, cut_unread
from outbox_relay.relay.small_reads import SMALL_AGAIN, SMALL_BYTES, SmallReads

SMALL = StoredEvent(1, 1, "u", "t", "k", b"{}", "application/json", None, None, datetime(2026, 1, 1, tzinfo=UTC))
LARGE = SMALL._replace(payload=b"x" * (SMALL_BYTES + 1))
FAULTY = SMALL._replace(payload=b"", fault="payload is null")
LEFT = SMALL._replace(payload=b"", fault=UNREAD)


@pytest.mark.parametrize(
    ("events", "kept", "is_cut"),
    [
        ([], 0, False),
        ([SMALL, SMALL], 2, False),
        ([SMALL, FAULTY], 2, False),
        ([LEFT], 0, True),
        ([SMALL, LEFT, SMALL], 1, True),
        ([SMALL, FAULTY, LEFT, LEFT], 2, True),
    ],
)
def test_a_read_ends_before_the_first_event_that_was_left_unread(
    events: list[StoredEvent], kept: int, is_cut: bool
) -> None:
    left = list(events)
    assert cut_unread(left) is is_cut
    assert left == events[:kept]


def test_after_a_large_event_many_small_ones_must_follow() -> None:
    reads = SmallReads()
    assert reads.size == SMALL_BYTES
    reads.met_large()
    assert reads.size is None
    reads.take([SMALL] * (SMALL_AGAIN - 1))
    reads.take([SMALL, LARGE])
    reads.take([SMALL] * (SMALL_AGAIN - 1))
    assert reads.size is None
    reads.take([SMALL])
    assert reads.size == SMALL_BYTES
    reads.met_large()
    assert reads.size is None
    reads.take([SMALL] * SMALL_AGAIN)
    reads.take([])
    assert reads.size == SMALL_BYTES


@pytest.mark.parametrize(
    ("event", "is_small"),
    [
        (SMALL, True),
        (SMALL._replace(payload=None), True),  # type: ignore[arg-type]
        (FAULTY, False),
        (LARGE, False),
        (SMALL._replace(key="k" * SMALL_BYTES), False),
        (SMALL._replace(key="ü" * (SMALL_BYTES // 2)), False),
        (SMALL._replace(key=None, headers="h" * (SMALL_BYTES - 2)), True),
        (SMALL._replace(key=None, headers="h" * (SMALL_BYTES - 1)), False),
    ],
)
def test_events_are_small_as_the_database_counts_their_bytes(event: StoredEvent, is_small: bool) -> None:
    """Goes red if an event counts as small here and not there: every read of small events would then be in vain."""
    reads = SmallReads()
    reads.met_large()
    reads.take([event] * SMALL_AGAIN)
    assert reads.size == (SMALL_BYTES if is_small else None)
