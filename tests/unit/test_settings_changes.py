"""Settings that a reload can change: every other one that differs is named, without its value."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_relay.settings import Settings, applied, load, merged, restart_needed
from outbox_relay.settings.changes import differing
from outbox_relay.settings.problems import dotted
from tests.support.settings_file import FILE, OTHER, SECRET, load_text


def changed(tmp_path: Path, *replaced: tuple[str, str]) -> tuple[Settings, Settings]:
    """Return the settings of the file, and those after replacements, the first of each text."""
    text = FILE
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new, 1)
    old = load_text(tmp_path, FILE)
    return old, load_text(tmp_path, text)


def test_nothing_differs_from_itself(tmp_path: Path) -> None:
    old, new = changed(tmp_path)
    assert differing(old, new) == []
    assert restart_needed(old, new) == []


@pytest.mark.parametrize(
    "replaced",
    [
        ('"order.*"', '"shipment.*"'),
        ("[routes]", '[notify]\nsink = "crm"\n[routes]'),
        (SECRET, "whsec_" + "eHh4" * 8),
        ("2027-01-01", "2028-01-01"),
        ('"linger.ms" = 5', '"linger.ms" = 6'),
        ('"linger.ms" = 5', ""),
        ('url = "https', 'start = "now"\nurl = "https'),
        ('url = "https', 'headers = { x-tenant = "one" }\nurl = "https'),
    ],
)
def test_what_a_reload_applies(tmp_path: Path, replaced: tuple[str, str]) -> None:
    old, new = changed(tmp_path, replaced)
    assert differing(old, new)
    assert restart_needed(old, new) == []


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        (("attempts = 12", "attempts = 13"), "sinks.crm.retry.attempts"),
        (("attempts = 12\n", ""), "sinks.crm.retry.attempts"),
        (("hooks/shop", "hooks/other"), "sinks.crm.url"),
        (('"10.1.0.0/16"', '"10.2.0.0/16"'), "sinks.crm.allow_networks"),
        (('url = "https', 'order = "none"\nurl = "https'), "sinks.crm.order"),
        (('url = "https', 'when_dead = "hold"\nurl = "https'), "sinks.crm.when_dead"),
        (('url = "https', 'max_in_flight = 9\nurl = "https'), "sinks.crm.max_in_flight"),
        (('url = "https', 'timeout_seconds = 9\nurl = "https'), "sinks.crm.timeout_seconds"),
        (('url = "https', 'ca_file = "/etc/ssl/ca.pem"\nurl = "https'), "sinks.crm.ca_file"),
        (("shop.{type}", "other.{type}"), "sinks.events.topic"),
    ],
)
def test_settings_of_a_sink_are_applied(tmp_path: Path, replaced: tuple[str, str], named: str) -> None:
    old, new = changed(tmp_path, replaced, ('"payment.captured"', '"payment.made"'))
    assert named in [dotted(path) for path in applied(old, new)]
    assert restart_needed(old, new) == []
    assert differing(merged(old, new), new) == []


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        (("localhost/shop", "localhost/other"), "database.dsn"),
        (("127.0.0.1:8080", "127.0.0.1:8081"), "http.listen"),
        (("[http]", "[relay]\nlease_seconds = 5\n[http]"), "relay.lease_seconds"),
        (("[http]", "[retention]\nkeep_days = 5\n[http]"), "retention.keep_days"),
    ],
)
def test_what_takes_a_restart_is_named_with_its_place(tmp_path: Path, replaced: tuple[str, str], named: str) -> None:
    old, new = changed(tmp_path, replaced, ('"payment.captured"', '"payment.made"'))
    [line] = restart_needed(old, new)
    assert line.startswith(str(tmp_path / "relay.toml"))
    assert line.endswith(f": {named}: needs a restart")
    assert not any(secret in line for secret in (SECRET, OTHER, "localhost", "hooks"))
    assert [dotted(path) for path in differing(merged(old, new), new)] == [named]


def test_the_claim_of_a_sink_takes_a_restart(tmp_path: Path) -> None:
    old, new = changed(tmp_path, ('url = "https', 'claim = "rows"\nurl = "https'))
    [line] = restart_needed(old, new)
    assert line.endswith(": sinks.crm.claim: needs a restart")
    assert merged(old, new).sinks["crm"].claim == "log"


def test_sinks_that_come_or_go_keep_the_routes_as_they_are(tmp_path: Path) -> None:
    webhook = FILE[FILE.index("[sinks.crm]") : FILE.index("[routes]")]
    other = webhook.replace("sinks.crm", "sinks.erp")
    old, added = changed(
        tmp_path,
        ("[routes]", f"{other}\n[routes]"),
        ('["events"]', '["events", "erp"]'),
        ("attempts = 12", "attempts = 13"),
    )
    assert [line.partition(": ")[2] for line in restart_needed(old, added)] == [
        "sinks.erp: was added: needs a restart",
        "routes: needs a restart",
    ]
    assert [dotted(path) for path in applied(old, added)] == ["sinks.crm.retry.attempts"]
    after = merged(old, added)
    assert (after.routes, after.sinks.keys()) == (old.routes, old.sinks.keys())
    assert "sinks.erp: was removed: needs a restart" in restart_needed(added, old)


def test_every_setting_is_compared() -> None:
    """Goes red when a setting that is added later is ignored by a reload without a word."""
    example = load(Path(__file__).parents[2] / "config" / "relay.example.toml", {})
    for name, sink in example.sinks.items():
        for setting in type(sink).model_fields:
            if setting not in ("type", "retry", "circuit", "registry"):
                other = sink.model_copy(update={setting: object()})
                new = example.model_copy(update={"sinks": {**example.sinks, name: other}})
                assert [dotted(path[:3]) for path in differing(example, new)] == [f"sinks.{name}.{setting}"]
