"""The history of routes, and what ``why`` makes of events that were read under earlier ones."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_relay import admin
from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.routing import canonical, matches
from outbox_relay.relay.sink_spec import SinkSpec
from tests.support.database import Database
from tests.support.deliveries import delivered
from tests.support.ledger import Ledger, ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.sink_actions import call, register, seek

LAPSE = "update outbox.session set lease_until = now() - interval '1 second'"
VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=8)
FEW = st.text(st.sampled_from("ab*%_\\"), min_size=1, max_size=6)


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with the sink `s` for orders, owned by the relay `here`."""
    with ledger(database) as found:
        found.register(("s", ["order.*"], "beginning"))
        found.live("here", "s")
        found.own("s")
        yield found


def why(books: Ledger, event_id: int, sink: str = "s") -> dict[str, Any]:
    """Return what is told of an event and a sink."""
    return (admin.why(books.store, UUID(books.uid(event_id))))["sinks"][sink]


def states(books: Ledger, *event_ids: int, sink: str = "s") -> list[str]:
    """Return the states of events."""
    return [(why(books, event_id, sink))["state"] for event_id in event_ids]


def to_the_end(books: Ledger, sink: str = "s") -> None:
    """Write positions after everything that is committed now."""
    books.catch_up(sink)


def change_routes(books: Ledger, *patterns: str) -> None:
    """Register other patterns, which nothing has claimed yet."""
    books.register(("s", list(patterns), "beginning"))


def take_over(books: Ledger) -> Ledger:
    """Let the leases of every owner end, and claim the shards for another relay."""
    books.do(LAPSE)
    other = Ledger(books.database, books.store)
    other.own("s")
    return other


# -- routes -------------------------------------------------------------------------------------------------


def test_relays_with_other_routes_deliver_what_theirs_match(database: Database) -> None:
    with ledger(database) as books:
        [order, user] = [*books.emit("a", type="order.paid"), *books.emit("a", type="user.created")]
        serve(database, spec("s", patterns=("order.*",)), order)
        [later] = books.emit("a", type="user.created")
        serve(database, spec("s"), later)
        assert states(books, order, user, later) == ["settled", "not routed", "settled"]


def serve(database: Database, sink_spec: SinkSpec, event_id: int) -> None:
    """Run a relay until it has delivered an event and settled everything, then stop it."""
    sink = MemorySink()
    with running(database.dsn, (sink_spec, sink)) as harness:
        delivered(sink, [event_id])
        harness.settled()
        harness.stop()


def test_events_are_judged_by_the_patterns_under_which_they_were_read(books: Ledger) -> None:
    first = books.emit("a", "a", type="order.paid") + books.emit("a", type="user.created")
    to_the_end(books)
    change_routes(books, "user.*")
    assert states(books, *first) == ["settled", "settled", "not routed"]
    second = books.emit("a", type="order.paid") + books.emit("a", type="user.created")
    to_the_end(take_over(books))
    assert states(books, *first, *second) == ["settled", "settled", "not routed", "not routed", "settled"]


@pytest.mark.fence("an event counts as delivered that only later or earlier routes match")
def test_what_waited_when_the_routes_changed_is_unknown_if_only_some_match(books: Ledger) -> None:
    """Goes red when the routes of the newest generation count for what an older relay may have delivered."""
    order, user, odd = (books.emit("a", type=name)[0] for name in ("order.paid", "user.created", "odd"))
    change_routes(books, "user.*", "order.paid")
    to_the_end(take_over(books))
    assert states(books, order, user, odd) == ["settled", "unknown", "not routed"]
    assert (why(books, user))["reason"] == "routes changed"
    assert "the old or the new ones" in admin.why_text(admin.why(books.store, UUID(books.uid(user))))


@pytest.mark.fence("an owner, a claim under way or a row delivers on under the routes before")
def test_a_claim_that_has_not_seen_other_routes_counts_as_an_owner(books: Ledger) -> None:
    """Goes red when the owners are looked for without a lock that the claim waits for, or is waited for."""
    [user] = books.emit("a", type="user.created")
    books.store.release_shards("s", books.relay, books.epochs["s"])
    with books.database.connect() as claim:
        claim.execute("update outbox.shard set owner = gen_random_uuid() where shard = 0")
        change_routes(books, "user.*")
        claim.rollback()
    to_the_end(take_over(books))
    assert states(books, user) == ["unknown"]


@pytest.mark.fence("an owner, a claim under way or a row delivers on under the routes before")
def test_before_the_end_of_a_change_is_known_newer_events_may_be_of_the_older_routes(books: Ledger) -> None:
    """Goes red when a change that may not be committed yet counts as one."""
    register(books.database, "s", "user.*")
    [user] = books.emit("a", type="user.created")
    books.generations.clear()
    to_the_end(take_over(books))
    assert states(books, user) == ["unknown"]
    books.store.value("trim_routes")
    [later] = books.emit("a", type="user.created")
    to_the_end(take_over(books))
    assert states(books, user, later) == ["unknown", "settled"]


# -- seeks --------------------------------------------------------------------------------------------------


def test_a_seek_passes_over_what_was_not_read_and_says_so(books: Ledger) -> None:
    [read] = books.emit("a", type="order.paid")
    to_the_end(books)
    [skipped] = books.emit("a", type="order.paid")
    books.store.release_shards("s", books.relay, books.epochs["s"])
    seek(books.database, "s", "now")
    found = why(books, skipped)
    assert (states(books, read), found["state"], found["by"]) == (["settled"], "passed over", "seek")
    text = admin.why_text(admin.why(books.store, UUID(books.uid(skipped))))
    assert "skipped by sinks seek, at " in text
    seek(books.database, "s", "beginning")
    found = why(books, read)
    assert (found["state"], found["again"], states(books, skipped)) == ("pending", True, ["pending"])


@pytest.mark.fence("an owner, a claim under way or a row delivers on under the routes before")
def test_a_row_that_lay_ahead_of_the_position_at_a_seek_leaves_its_event_unknown(books: Ledger) -> None:
    """Goes red when rows ahead of the place of a seek are forgotten."""
    parked, skipped = books.emit("a", "a", type="order.paid")
    books.park("s", books.row(parked, ordered=False))
    books.store.release_shards("s", books.relay, books.epochs["s"])
    seek(books.database, "s", "now")
    books.do("delete from outbox.delivery")
    assert states(books, parked, skipped) == ["unknown", "passed over"]


# -- rows, marks, attempts -------------------------------------------------------------------------------------


def record(books: Ledger, event_id: int, sink: str = "s") -> None:
    """Record a delivery of an event."""
    detail = {"partition": 2, "offset": 7}
    delivery = AttemptRecord(event_id, books.uid(event_id), 3, "delivered", time.monotonic(), 0.02, 204, None, detail)
    books.store.settle(sink, books.relay, {}, [], {}, records=[delivery], relay="here")


def test_an_event_past_retention_is_told_by_its_marks_and_records(books: Ledger) -> None:
    delivered, discarded = books.emit("a", "a", type="order.paid")
    books.register(("t", ["*"], "beginning"))
    record(books, delivered)
    books.park("s", books.row(discarded, "dead"))
    to_the_end(books)
    call(books.database, "select outbox.discard_deliveries('{}', reason => 'no use', actor => 'me')")
    uids = [UUID(books.uid(event_id)) for event_id in (delivered, discarded)]
    books.do("truncate outbox.event")
    found = [admin.why(books.store, uid) for uid in uids]
    assert [each["sinks"]["s"]["state"] for each in found] == ["delivered", "discarded"]
    assert [each["sinks"]["t"]["reason"] for each in found] == ["past retention", "past retention"]
    assert (found[0]["in_log"], found[0]["type"], found[0]["id"]) == (False, None, delivered)
    assert "by me: no use" in admin.why_text(found[1])
    assert "no longer in the log" in admin.why_text(found[0])


# -- what is not known ----------------------------------------------------------------------------------------


# -- trim, patterns -------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(VISIBLE, FEW), max_size=4), st.one_of(VISIBLE, FEW).map(lambda text: text.replace("*", "x")))
def test_patterns_match_in_the_schema_as_they_do_in_the_relay(
    matcher: Any, patterns: list[str], event_type: str
) -> None:
    patterns = [canonical(pattern) for pattern in patterns]
    [(found,)] = matcher.execute(
        "select outbox_internal.type_matches(%s::text[], %s)", (patterns, event_type)
    ).fetchall()
    assert found == any(matches(pattern, event_type) for pattern in patterns)


@pytest.fixture
def matcher(database: Database) -> Any:
    """Yield a connection."""
    with database.connect(autocommit=True) as connection:
        yield connection
