"""The settings that a reload applies, and those that need a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_relay.settings import differing, load, merged
from outbox_relay.settings.problems import dotted
from tests.support.settings_file import FILE, SECRET, load_text


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        (('"order.*"', '"shipment.*"'), ""),
        ((SECRET, "whsec_" + "eHh4" * 8), ""),
        (("hooks/shop", "hooks/other"), ""),
        (("localhost/shop", "localhost/other"), "database.dsn"),
        (("127.0.0.1:8080", "127.0.0.1:8081"), "http.listen"),
        (("[http]", "[relay]\nlease_seconds = 5\n[http]"), "relay.lease_seconds"),
        (("[http]", "[retention]\nkeep_days = 5\n[http]"), "retention.keep_days"),
        (('url = "https', 'claim = "rows"\nurl = "https'), "sinks.crm.claim"),
    ],
)
def test_a_reload_applies_all_but_the_process_and_the_claim(
    tmp_path: Path, replaced: tuple[str, str], named: str
) -> None:
    assert replaced[0] in FILE
    old, new = load_text(tmp_path, FILE), load_text(tmp_path, FILE.replace(*replaced, 1))
    assert differing(old, old) == []
    assert differing(old, new)
    assert [dotted(path) for path in differing(merged(old, new), new)] == ([named] if named else [])


def test_every_setting_is_compared() -> None:
    """Goes red when a setting that is added later is ignored by a reload without a word."""
    example = load(Path(__file__).parents[2] / "config" / "relay.example.toml", {})
    for name, sink in example.sinks.items():
        for setting in type(sink).model_fields:
            if setting not in ("type", "retry", "circuit", "registry"):
                other = sink.model_copy(update={setting: object()})
                new = example.model_copy(update={"sinks": {**example.sinks, name: other}})
                assert [dotted(path[:3]) for path in differing(example, new)] == [f"sinks.{name}.{setting}"]
