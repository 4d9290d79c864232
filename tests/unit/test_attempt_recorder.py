"""Records of attempts: dropped at once for a failure that needs a fix, and late for one that may pass."""

from __future__ import annotations

import pytest

from outbox_relay.domain.errors import DatabaseUnusable, RelayError, StatementFailed
from outbox_relay.relay import settle
from outbox_relay.relay.settle import MOST_TRIES, AttemptRecorder
from tests.support.logs import RecordedLog


class Writes:
    """A settlement that fails as long as it has records, and with ``broken`` in any case."""

    def __init__(self, error: RelayError | None, *, broken: bool = False) -> None:
        self.error, self.broken = error, broken
        self.names: list[str | None] = []

    def __call__(self, name: str | None) -> int:
        self.names.append(name)
        if self.error is not None and (name is not None or self.broken):
            raise self.error
        return len(self.names)


@pytest.mark.parametrize(
    "error",
    [DatabaseUnusable("no table"), StatementFailed("no room", "53100"), StatementFailed("a check", "23514")],
    ids=str,
)
def test_records_are_dropped_at_once_for_a_failure_that_needs_a_fix(error: RelayError) -> None:
    log = RecordedLog()
    recorder, writes = AttemptRecorder("here", log), Writes(error)
    assert recorder.settle(3, writes) == 2
    assert recorder.settle(4, writes) == 3
    assert writes.names == ["here", None, None], "for a while no record is tried"
    assert recorder.dropped == 7
    assert log.lines == [("warning", "attempts.dropped", {"reason": str(error), "dropped": 3})]


@pytest.mark.parametrize("state", ["40P01", "55P03", "57014", StatementFailed.NO_CONNECTION])
def test_records_are_tried_as_often_as_settlements_for_a_failure_that_may_pass(state: str) -> None:
    recorder, writes = AttemptRecorder("here", RecordedLog()), Writes(StatementFailed("busy", state))
    for _ in range(MOST_TRIES - 2):
        with pytest.raises(StatementFailed):
            recorder.settle(3, writes)
    assert recorder.dropped == 0
    recorder.settle(3, writes)
    assert (recorder.dropped, writes.names) == (3, ["here"] * (MOST_TRIES - 1) + [None])


def test_the_end_of_the_trouble_is_logged_with_the_number_of_dropped_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "SUSPEND_SECONDS", 0.0)
    log = RecordedLog()
    recorder, writes = AttemptRecorder("here", log), Writes(DatabaseUnusable("no table"))
    for _ in range(3):
        recorder.settle(2, writes)
    writes.error = None
    for _ in range(2):
        recorder.settle(2, writes)
    assert log.lines == [
        ("warning", "attempts.dropped", {"reason": "no table", "dropped": 2}),
        ("info", "attempts.recorded", {"dropped": 6}),
    ]
