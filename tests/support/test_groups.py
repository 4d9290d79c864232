"""Tests are distributed over processes by the groups that `tests/conftest.py` gives them."""

from __future__ import annotations

import pytest


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """Return the group that pytest-xdist distributes the test by, which it appends to the test's name."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("the tests run in one process, or are not distributed by groups")
    return request.node.nodeid.rpartition("@")[2]


def test_quick_tests_of_a_file_stay_together(group: str) -> None:
    assert group == "test_groups.py"


@pytest.mark.xdist_group("chosen")
def test_group_of_a_test_is_kept(group: str) -> None:
    assert group == "chosen"


@pytest.mark.postgres
def test_test_of_a_database_may_run_in_any_process(group: str) -> None:
    assert group.startswith("tests/support/")
