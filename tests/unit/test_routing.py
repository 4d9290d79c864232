"""Routes: patterns against a naive oracle and against SQL's LIKE, the union of sinks, the bounds."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outbox_relay.domain import routing
from outbox_relay.domain.routing import Routes

FEW = st.text(alphabet="ab.%_\\[", max_size=8)
STARRY = st.text(alphabet="ab**", min_size=1, max_size=8)
PATTERNS = st.text(alphabet="ab.%_\\[**", min_size=1, max_size=8)


def oracle(pattern: str, text: str) -> bool:
    """Match by definition: a star takes any prefix of the rest, any other character itself."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(oracle(pattern[1:], text[n:]) for n in range(len(text) + 1))
    return text[:1] == pattern[0] and oracle(pattern[1:], text[1:])


def sql_like(pattern: str, text: str) -> bool:
    """Match as PostgreSQL's LIKE with its default escape character."""
    if not pattern:
        return not text
    match pattern[0]:
        case "%":
            return any(sql_like(pattern[1:], text[n:]) for n in range(len(text) + 1))
        case "_":
            return bool(text) and sql_like(pattern[1:], text[1:])
        case "\\":
            assert len(pattern) > 1, "PostgreSQL: LIKE pattern must not end with escape character"
            return text[:1] == pattern[1] and sql_like(pattern[2:], text[1:])
        case character:
            return text[:1] == character and sql_like(pattern[1:], text[1:])


@given(PATTERNS, FEW)
def test_matching_agrees_with_its_definition(pattern: str, text: str) -> None:
    assert routing.matches(pattern, text) == oracle(pattern, text)


@given(STARRY, st.text(alphabet="ab", max_size=5))
def test_matching_of_many_stars_agrees_with_its_definition(pattern: str, text: str) -> None:
    assert routing.matches(pattern, text) == oracle(pattern, text)


@given(PATTERNS, st.data())
def test_pattern_matches_the_text_it_was_made_from(pattern: str, data: st.DataObject) -> None:
    text = "".join(data.draw(FEW) if character == "*" else character for character in pattern)
    assert routing.matches(pattern, text)


@given(PATTERNS, FEW)
def test_like_matches_the_same_types(pattern: str, text: str) -> None:
    assert sql_like(routing.like_pattern(pattern), text) == oracle(pattern, text)


@given(PATTERNS)
def test_canonical_pattern_matches_the_same_types(pattern: str) -> None:
    short = routing.canonical(pattern)
    assert "**" not in short
    for text in (pattern.replace("*", ""), pattern.replace("*", "b"), pattern.replace("*", "ab.")):
        assert oracle(short, text)


@pytest.mark.parametrize(
    ("pattern", "event_type", "expected"),
    [
        ("order.created", "order.created", True),
        ("order.created", "order.created2", False),
        ("order.*", "order.", True),
        ("order.*", "orders.created", False),
        ("*.failed", "payment.card.failed", True),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("ab*ba", "aba", False),
        ("*a*b*", "xbxa", False),
        ("*b*b", "b", False),
        ("*a*a*", "a", False),
        ("order.?", "order.x", False),
        ("order.[ab]", "order.a", False),
        ("orderXcreated", "order.created", False),
        ("*", "anything", True),
    ],
)
def test_patterns_by_example(pattern: str, event_type: str, expected: bool) -> None:
    assert routing.matches(pattern, event_type) is expected


def test_matching_stays_quick_when_a_pattern_is_all_stars() -> None:
    pattern = "*a" * 127 + "*b"
    assert not routing.matches(pattern, "a" * 255)


@pytest.mark.parametrize(
    ("pattern", "like"),
    [
        ("order.*", "order.%"),
        ("a_b", r"a\_b"),
        ("100%", r"100\%"),
        ("a\\b", r"a\\b"),
        ("*", "%"),
    ],
)
def test_like_by_example(pattern: str, like: str) -> None:
    assert routing.like_pattern(pattern) == like


@pytest.mark.parametrize(
    "pattern",
    ["", "order created", "order.\n", "bestellung.ü", "\x7f", "\0", "a" * 256, "*" + "a" * 256],
)
def test_pattern_that_no_type_can_match_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches") as refused:
        Routes({pattern: ("events",)})
    assert not pattern or pattern not in str(refused.value)


@pytest.mark.parametrize("pattern", ["a" * 255, "*" * 300, "a" * 250 + "*" * 50, "!~"])
def test_pattern_that_some_type_can_match_is_taken(pattern: str) -> None:
    assert Routes({pattern: ("events",)}).sinks == {"events"}


def test_event_goes_to_the_union_of_matching_routes() -> None:
    routes = Routes({"order.*": ("events", "crm"), "*.created": ("audit", "events"), "payment": ("bank",)})
    assert routes.sinks_for("order.created") == {"events", "crm", "audit"}
    assert routes.sinks_for("order.paid") == {"events", "crm"}
    assert routes.sinks_for("invoice") == frozenset()
    assert routes.routed("payment")
    assert not routes.routed("invoice")
    assert routes.sinks == {"events", "crm", "audit", "bank"}


@given(
    st.dictionaries(PATTERNS, st.lists(st.sampled_from("xyz"), min_size=1).map(tuple), max_size=5),
    st.lists(FEW.filter(bool), max_size=20),
)
def test_sinks_are_the_union_by_definition(table: dict[str, tuple[str, ...]], types: list[str]) -> None:
    routes = Routes(table)
    for event_type in types * 2:
        expected = {sink for pattern, sinks in table.items() for sink in sinks if oracle(pattern, event_type)}
        assert routes.sinks_for(event_type) == expected


def test_answers_stay_right_beyond_the_cache() -> None:
    routes = Routes({"a*": ("events",)})
    for n in range(routing.REMEMBERED_TYPES * 2):
        assert routes.routed(f"a{n}")
        assert not routes.routed(f"b{n}")


def test_cached_types_are_bounded() -> None:
    routes = Routes({"*": ("events",)})
    for n in range(routing.REMEMBERED_TYPES * 3):
        routes.sinks_for(str(n))
        assert len(routes._by_type) <= routing.REMEMBERED_TYPES  # pyright: ignore[reportPrivateUsage]


def test_patterns_of_a_sink_are_sorted_and_reduced() -> None:
    routes = Routes({"z": ("a",), "b*": ("a", "a"), "b**": ("a", "b"), "**": ("b",)})
    assert routes.patterns_for("a") == ("b*", "z")
    assert routes.patterns_for("b") == ("*",)
    assert routes.patterns_for("c") == ()


def test_spellings_of_one_pattern_are_joined() -> None:
    assert Routes({"b**": ("x",), "b*": ("y", "x")}) == Routes({"b*": ("x", "y")})


@given(PATTERNS, PATTERNS)
def test_routes_are_equal_when_their_tables_are(one: str, other: str) -> None:
    assume(routing.canonical(one) != routing.canonical(other))
    looked_up = Routes({one: ("x",)})
    looked_up.sinks_for("a")
    assert looked_up == Routes({one: ("x",)})
    assert looked_up != Routes({other: ("x",)})


def test_notices_match_their_pattern_alone() -> None:
    routes = Routes({"*": ("all",), "*.dead": ("dead",), "o*": ("o",), "outbox*": ("similar",)})
    assert [routes.routed(kind) for kind in sorted(routing.NOTICE_TYPES)] == [False] * len(routing.NOTICE_TYPES)
    assert routes.sinks_for("outboxes.dead") == {"all", "dead", "o", "similar"}
    assert Routes({routing.NOTICES: ("ops",)}).sinks_for("outbox.dead") == {"ops"}


def test_the_types_of_a_sink_name_notices_if_it_receives_them() -> None:
    assert routing.like_patterns(("*",)) is None
    assert routing.like_patterns(("*", routing.NOTICES)) == ("%", "outbox.%")
    assert routing.like_patterns(("a_b.*",)) == (r"a\_b.%",)
