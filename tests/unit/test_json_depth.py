"""The depth of JSON that was not parsed yet."""

from __future__ import annotations

import pytest

from outbox_relay.sinks.kafka.json_depth import MAX_DEPTH, is_too_deep


@pytest.mark.parametrize("begin", ["[", '{"a":'])
def test_depth_is_that_of_arrays_and_objects_in_each_other(begin: str) -> None:
    assert not is_too_deep(begin * MAX_DEPTH)
    assert is_too_deep(begin * (MAX_DEPTH + 1))


@pytest.mark.parametrize("text", ["[]," * 1000, '"' + "[" * 1000 + '"', r'"\"' + "[" * 1000 + '"', '"' + "{" * 1000])
def test_neighbours_and_texts_do_not_count(text: str) -> None:
    assert not is_too_deep(f"[{text}")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ['"', '\\"', '"\\', "[]", '""'])
def test_time_is_linear(piece: str) -> None:
    """Goes red if a text without an end is searched from each of its quotes: that takes minutes."""
    is_too_deep("[" + "[]" * 200 + piece * 500_000)
