"""Routes: patterns against a naive oracle and against SQL's LIKE, the union of sinks, the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain import routing
from outbox_relay.domain.routing import Routes

FEW = st.text(alphabet="ab.%_\\[", max_size=8)
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


@pytest.mark.parametrize(
    "pattern",
    ["", "order created", "order.\n", "bestellung.ü", "\x7f", "\0", "a" * 256, "*" + "a" * 256],
)
def test_pattern_that_no_type_can_match_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches") as refused:
        Routes({pattern: ("events",)})
    assert not pattern or pattern not in str(refused.value)


def test_notices_match_their_pattern_alone() -> None:
    routes = Routes({"*": ("all",), "*.dead": ("dead",), "o*": ("o",), "outbox*": ("similar",)})
    assert not any(routes.sinks_for(kind) for kind in routing.NOTICE_TYPES)
    assert routes.sinks_for("outboxes.dead") == {"all", "dead", "o", "similar"}
    assert Routes({routing.NOTICES: ("ops",)}).sinks_for("outbox.dead") == {"ops"}
