"""Topic templates: parsing errors and rendered topics."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.formats.topics import TopicTemplate

LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")
WORDS = st.text(alphabet="abcXYZ019._-", min_size=1, max_size=20)
FIELDS = st.sampled_from(["{type}", "{key}", "{headers.tenant}"])


def naive(template: str, event_type: str, key: str, tenant: str) -> str:
    """Render a template by plain replacement; right if no value contains a brace."""
    return template.replace("{type}", event_type).replace("{key}", key).replace("{headers.tenant}", tenant)


@given(st.lists(WORDS | FIELDS, min_size=1, max_size=6), WORDS, WORDS, WORDS)
def test_rendering_replaces_the_fields(pieces: list[str], event_type: str, key: str, tenant: str) -> None:
    text = "".join(pieces)
    expected = naive(text, event_type, key, tenant)
    if expected in (".", ".."):
        with pytest.raises(ValueError, match="does not allow"):
            TopicTemplate.parse(text).render(event_type, key, {"tenant": tenant})
    else:
        assert TopicTemplate.parse(text).render(event_type, key, {"tenant": tenant}) == expected


@given(st.text(max_size=30), st.text(max_size=30), st.none() | st.text(max_size=30), st.text(max_size=30))
def test_every_topic_is_legal_or_refused(text: str, event_type: str, key: str | None, tenant: str) -> None:
    for template in (text, "{type}", "{key}", "a.{headers.tenant}", "{type}{key}"):
        try:
            topic = TopicTemplate.parse(template).render(event_type, key, {"tenant": tenant})
        except ValueError:
            continue
        assert LEGAL.fullmatch(topic)
        assert topic not in (".", "..")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shop.{typ}", "position 6: unknown field {typ}; fields are {type}, {key} and {headers.NAME}"),
        ("{header.tenant}", "position 1: unknown field {header.tenant}; fields are {type}, {key} and {headers.NAME}"),
        ("a{zzz}", "position 2: unknown field {zzz}; fields are {type}, {key} and {headers.NAME}"),
        ("a{}", "position 2: unknown field {}; fields are {type}, {key} and {headers.NAME}"),
        ("a{headers.}", "position 2: unknown field {headers.}; fields are {type}, {key} and {headers.NAME}"),
        ("a{headers.a b}", "position 2: unknown field {headers.a b}; fields are {type}, {key} and {headers.NAME}"),
        ("shop.{type", "position 6: a lone '{'"),
        ("shop.type}", "position 10: a lone '}'"),
        ("{a{type}", "position 1: a lone '{'"),
        ("{{type}}", "position 1: a lone '{'"),
        ("shop type", "position 5: a topic name cannot contain ' '"),
        ("{type}/x", "position 7: a topic name cannot contain '/'"),
        ("übung", "position 1: a topic name cannot contain 'ü'"),
        ("a\n", "position 2: a topic name cannot contain '\\n'"),
        ("", "makes an empty topic name"),
        (".", "makes the topic name '.', which Kafka does not allow"),
        ("..", "makes the topic name '..', which Kafka does not allow"),
        ("a" * 250, "makes a topic name of 250 characters; Kafka allows at most 249"),
        ("{key}" + "a" * 250, "makes topic names of more than 249 characters"),
    ],
)
def test_wrong_template_is_refused_with_its_position(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        TopicTemplate.parse(text)


@pytest.mark.parametrize(
    ("text", "key", "headers", "said"),
    [
        ("{key}", None, {}, "the topic needs {key}, which the event does not have"),
        ("{headers.a}", "k", {"A": "x"}, "the topic needs {headers.a}, which the event does not have"),
        ("a.{key}", "order 77", {}, "{key} contains ' ', which is not allowed in a topic name"),
        ("{headers.a}", "k", {"a": "hunter2/"}, "{headers.a} contains '/', which is not allowed in a topic name"),
        ("{key}", "", {}, "makes an empty topic name"),
        ("{key}", "..", {}, "makes the topic name '..', which Kafka does not allow"),
        ("{key}.", "k" * 249, {}, "makes a topic name of 250 characters; Kafka allows at most 249"),
    ],
)
def test_event_that_makes_no_topic_is_refused_without_its_values(
    text: str, key: str | None, headers: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        TopicTemplate.parse(text).render("order.created", key, headers)


def test_longest_names_are_taken() -> None:
    assert TopicTemplate.parse("a" * 249).render("t", None, {}) == "a" * 249
    assert TopicTemplate.parse("{key}").render("t", "k" * 249, {}) == "k" * 249
