"""Parts of a destination in trouble: what is shown of several, and which are forgotten."""

from __future__ import annotations

from outbox_relay.domain.circuit import MOST_TROUBLES, Troubles
from outbox_relay.domain.outcomes import LAST_ERROR_CHARS


def test_a_part_that_is_no_longer_reported_is_forgotten() -> None:
    troubles = Troubles()
    troubles.report("topic a", "topic a: unknown", 1.0)
    troubles.report("topic b", "topic b: unknown", 1.0)
    troubles.report("topic a", "topic a: unknown", 2.0)
    troubles.forget(1.0)
    assert troubles.reasons == {"topic a": "topic a: unknown"}
    troubles.forget(2.0)
    assert troubles.text is None


def test_many_parts_are_counted_and_use_bounded_memory_and_text() -> None:
    troubles = Troubles()
    for n in range(MOST_TROUBLES + 7):
        troubles.report(f"topic {n}", f"topic {n}: " + "x" * 400, float(n))
    assert len(troubles) == MOST_TROUBLES
    assert "topic 6" not in troubles.reasons
    text = troubles.text or ""
    assert text.startswith("topic 7: ")
    assert text.endswith(f"; and {MOST_TROUBLES - 5} more")
    assert len(text) < LAST_ERROR_CHARS + 20
