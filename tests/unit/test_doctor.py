"""The checks of `doctor` at their limits, and the findings as text and JSON."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_relay.admin import findings_text
from outbox_relay.admin.doctor import Finding, log, server, sinks
from outbox_relay.admin.doctor.finding import worst_first
from outbox_relay.retention.wording import LOCKED, locked_text

PACKAGE = Path(sinks.__file__).parent
SINK: dict[str, Any] = {
    "backlog": 0, "oldest_seconds": 0.0, "dead": 0, "circuit": "closed", "circuit_seconds": None, "paused": False,
    "rate_per_second": None, "max_in_flight_total": None,
    "paused_reason": None, "last_error": None, "missing_positions": 0, "waiting": 0, "held": 0,
}  # fmt: skip
RELAY = {"name": "r", "version": "1", "seen_seconds_ago": 1.0, "stale": False, "shards": {"s": 64}}
SERVER: dict[str, Any] = {
    "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on", "seq_cache": 1,
    "uncertain_roles": [],
    "mxid_age": 800_000_000, "mxid_freeze_max_age": 400_000_000,
    "xid_age": 400_000_000, "freeze_max_age": 200_000_000, "sees_all": True, "role": "watcher", "clock": 1000.0,
}  # fmt: skip
RETENTION: dict[str, Any] = {
    "keep_days": 30, "hold_until": None, "archive": False, "idle": False, "last_pass": "2026-11-01T00:00Z", "days": [],
}  # fmt: skip


def status(*, relays: list[dict[str, Any]] | None = None, replays: Any = (), unrouted: Any = (), **sink: Any) -> Any:
    return {
        "sinks": {"s": SINK | sink},
        "relays": [RELAY] if relays is None else relays,
        "replays": list(replays),
        "unrouted": list(unrouted),
    }


def found(findings: Any) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in findings]


@pytest.mark.parametrize(
    ("sink", "wanted"),
    [
        ({}, []),
        ({"missing_positions": 1}, [("missing-positions", "critical")]),
        ({"paused": True}, [("sink-paused", "warning")]),
        ({"paused": True, "oldest_seconds": 1e6}, [("sink-paused", "warning")]),
        ({"circuit": "open", "circuit_seconds": 300.0}, [("destination-down", "warning")]),
        ({"circuit": "half-open", "circuit_seconds": 301.0}, [("destination-down", "critical")]),
        ({"oldest_seconds": 300.0}, []),
        ({"oldest_seconds": 301.0}, [("sink-behind", "warning")]),
        ({"oldest_seconds": 3601.0}, [("sink-behind", "critical")]),
        ({"dead": 1}, [("dead-letters", "warning")]),
    ],
)
def test_sinks(sink: dict[str, Any], wanted: list[tuple[str, str]]) -> None:
    assert found(sinks.examine_sinks(status(**sink))) == wanted


def test_without_a_relay_no_sink_is_named_for_it() -> None:
    alone = status(relays=[])
    unowned = [SimpleNamespace(sink="r", shards=1, served=True), SimpleNamespace(sink="s", shards=64, served=True)]
    assert found(sinks.examine_shards(unowned, alive=False)) == []
    assert found(sinks.examine_shards(unowned, alive=True)) == [
        ("shards-unowned", "warning"), ("shards-unowned", "critical"),
    ]  # fmt: skip
    assert found(sinks.examine_shards([SimpleNamespace(sink="s", shards=64, served=False)], alive=True)) == [
        ("sink-unserved", "critical")
    ]
    assert found(sinks.examine_relays(alone)) == [("no-relay", "critical")]
    assert found(sinks.examine_relays({**alone, "sinks": {}})) == []


DUE: dict[str, Any] = {
    "day": "2026-01-01", "due": True, "due_seconds": 86_400.0, "archived": None, "kept_by": [], "left_because": None,
}  # fmt: skip
HOLDER = {"kind": "transaction", "name": "process 4711, role shop"}
LEFT_AT = "2026-02-01T00:00:00+00:00"
LATE = DUE | {"due_seconds": 86_401.0}
KEPT = DUE | {"day": "2026-01-02", "kept_by": [{"kind": "sink", "name": "s", "paused": True, "shards": 3}]}


@pytest.mark.parametrize(
    ("policy", "days", "wanted"),
    [
        ({}, [], []),
        ({}, [DUE | {"due": False}], []),
        ({}, [DUE], []),
        ({"idle": True}, [], []),
        ({"idle": True}, [DUE], ["retention-idle"]),
        ({}, [DUE, KEPT], ["retention-blocked"]),
        ({}, [LATE], ["retention-late"]),
        ({}, [DUE | {"day": "default", "due_seconds": None}], []),
        ({"idle": True}, [LATE], ["retention-idle"]),
        ({"hold_until": "2026-11-02T00:00:00Z"}, [LATE], ["clock-jumped"]),
        ({"archive": True}, [DUE], []),
        ({"archive": True}, [DUE | {"left_because": LOCKED, "left_at": LEFT_AT}], []),
        ({"archive": True}, [DUE | {"left_because": locked_text([HOLDER]), "left_at": LEFT_AT}], []),
        ({"archive": True}, [DUE | {"left_because": "no space", "left_at": LEFT_AT}], ["archive-missing"]),
        ({"archive": True}, [LATE, KEPT], ["retention-blocked", "archive-missing"]),
        ({"archive": True}, [LATE | {"archived": "file:x"}], ["retention-late"]),
        ({"archive": True, "idle": True}, [DUE], ["retention-idle"]),
        ({"hold_until": "2026-11-02T00:00:00Z"}, [], ["clock-jumped"]),
    ],
)
def test_retention(policy: dict[str, Any], days: list[Any], wanted: list[str]) -> None:
    assert [each.id for each in log.examine_retention(RETENTION | policy | {"days": days})] == wanted


@pytest.mark.parametrize("archive", [True, False])
def test_a_late_day_is_named_with_what_the_newest_pass_said(archive: bool) -> None:
    left = {"left_because": "no space", "left_at": "2026-02-01T00:00:00+00:00"}
    days = [LATE | left, LATE | {"day": "2026-01-02"}]
    [finding] = log.examine_retention(RETENTION | {"archive": archive, "days": days})
    assert "2026-01-01 to 2026-01-02; left at 2026-02-01T00:00:00: no space; last pass" in finding.evidence


@pytest.mark.parametrize(
    ("in_default", "ahead", "wanted"),
    [
        (0, 86_400.0, []),
        (0, 86_399.0, ["partitions-missing"]),
        (0, -5.0, ["partitions-missing"]),
        (1, 1e6, ["default-partition"]),
    ],
)
def test_partitions(in_default: int, ahead: float, wanted: list[str]) -> None:
    assert [each.id for each in log.examine_partitions(in_default, ahead)] == wanted


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, []),
        ({"fsync": "off"}, [("durability-off", "critical")]),
        ({"full_page_writes": "off"}, [("durability-off", "critical")]),
        ({"synchronous_commit": "off"}, [("synchronous-commit-off", "warning")]),
        ({"synchronous_commit": "local"}, []),
        ({"uncertain_roles": ["shop"]}, [("synchronous-commit-off", "warning")]),
        ({"autovacuum": "off"}, [("autovacuum-off", "critical")]),
        ({"seq_cache": 2}, [("sequence-cache", "critical")]),
        ({"xid_age": 400_000_001}, [("wraparound", "warning")]),
        ({"xid_age": 1_500_000_001}, [("wraparound", "critical")]),
        ({"xid_age": 1_500_000_001, "freeze_max_age": 1_000_000_000}, [("wraparound", "critical")]),
        ({"mxid_age": 800_000_001}, [("wraparound", "warning")]),
        ({"mxid_age": 1_500_000_001}, [("wraparound", "critical")]),
        ({"clock": 1008.0}, []),
        ({"clock": 1008.1}, [("clocks-apart", "warning")]),
        ({"clock": 994.9}, [("clocks-apart", "warning")]),
        ({"sees_all": False}, [("sessions-unseen", "ok")]),
    ],
)
def test_settings_of_the_server(settings: dict[str, Any], wanted: list[tuple[str, str]]) -> None:
    assert found(server.examine_server(SimpleNamespace(**SERVER | settings), 1000.0, 1003.0)) == wanted


def test_a_transaction_is_named_with_what_it_holds_back() -> None:
    idle = SimpleNamespace(who="pid 1", seconds=400.0, ending="end 1", held=None, dead=7)
    writes = SimpleNamespace(who="pid 2", seconds=350.0, ending="end 2", held=12, dead=7)
    [finding] = server.examine_transactions([idle, writes])
    assert finding.evidence == (
        "pid 1: 6 min 40 s, holds only its locks; pid 2: 5 min 50 s, keeps what the last 12 transactions deleted or "
        "changed; dead rows in schema outbox now: 7"
    )
    assert finding.statements == ["end 1", "end 2"]


def test_relays_differ_by_the_settings_that_both_have_recorded() -> None:
    def relays(*configs: Any) -> list[Any]:
        return [SimpleNamespace(name=f"r{n}", config=config) for n, config in enumerate(configs)]

    assert found(server.examine_configurations(relays({"a": 1}, {"a": 1}, None))) == []
    [finding] = server.examine_configurations(relays({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}))
    assert (finding.id, finding.evidence) == ("relay-configurations", "settings: b, c; relays: r0, r1")
    assert found(server.examine_configurations(relays({"a": 1}, {"too_large": 70_000}))) == []
    alike = [SimpleNamespace(name="relay", config={"a": n}) for n in range(2)]
    assert found(server.examine_configurations(alike)) == [("relay-configurations", "warning")]


def test_findings_come_worst_first_and_say_what_to_do() -> None:
    ok, warning, critical = (Finding(f"x-{s}", s, "it is", "so", "do it") for s in ("ok", "warning", "critical"))
    assert worst_first([ok, warning, critical]) == [critical, warning, ok]
    assert findings_text([critical]).splitlines()[:3] == [
        "CRITICAL  it is", "  so", "  do: do it (docs/runbook.md#x-critical)",
    ]  # fmt: skip
    assert critical.as_dict() == {
        "id": "x-critical", "severity": "critical", "summary": "it is", "evidence": "so", "advice": "do it",
        "statements": [], "runbook": "docs/runbook.md#x-critical",
    }  # fmt: skip
    assert findings_text([]).startswith("no problems found")
    assert findings_text([ok]).endswith("nothing else was found")


def test_names_with_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in findings_text([Finding("x", "warning", "\x1b[2J", "\x1b", "\x1b")])


def ids_in_the_code() -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.py"))
    return set(re.findall(r'Finding\(\s*"([a-z-]+)"', text))


def test_the_runbook_leaves_statements_to_the_findings() -> None:
    """A statement with a name to be replaced is a mistake at night: doctor prints it complete."""
    quoted = re.findall(r"`([^`]+)`", (PACKAGE.parents[2] / "docs/runbook.md").read_text(encoding="utf-8"))
    sql = r"(select|show|alter|vacuum|grant|revoke|update|delete|insert|rollback|set|drop|create)\s"
    assert [text for text in quoted if re.match(sql, text, re.IGNORECASE)] == []


def test_the_runbook_has_a_section_for_each_finding() -> None:
    page = (PACKAGE.parents[2] / "docs/runbook.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    of_findings = {section.partition("\n")[0] for section in sections if "**Alert" not in section}
    assert of_findings <= ids_in_the_code() <= {section.partition("\n")[0] for section in sections}
    for section in sections:
        assert all(f"**{part}**" in section for part in ("Means", "Look at", "Do", "Resolved when")), section


def test_the_page_shows_findings_as_they_are_printed() -> None:
    paused = SINK | {"paused": True, "paused_reason": "maintenance until 14:00"}
    keeper = {"kind": "sink", "name": "crm", "paused": True, "shards": 64, "since": "2026-11-20"}
    days = [KEPT | {"day": f"2026-10-{number}", "kept_by": [keeper]} for number in (18, 19, 20)]
    printed = findings_text(
        [
            *sinks.examine_sinks({**status(), "sinks": {"crm": paused}}),
            *log.examine_retention(RETENTION | {"days": days}),
        ]
    )
    page = (PACKAGE.parents[2] / "docs/commands.md").read_text(encoding="utf-8")
    assert indent(printed.rstrip(), "    ") in page
