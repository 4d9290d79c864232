"""The tables ``[schedules.NAME]``: what they take, what they refuse by its place, and what a reload applies."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import Settings, differing, load, merged, warnings
from outbox_relay.settings.effective import shown

WHOLE = """
[schedules.nightly]
cron = "30 3 * * MON-FRI"
timezone = "Europe/Berlin"
type = "report.due"
payload = {kind = "daily", parts = [1, 2.5, true], deep = {a = []}}
key = "report"
missed = "all"
"""
SINK = """
[sinks.crm]
type = "webhook"
url = "https://crm.example.com/"
secrets = ["whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"]
[routes]
"order.*" = ["crm"]
"""


def loaded(place: Path, text: str, **environ: str) -> Settings:
    """Return the settings of a file with this text."""
    path = place / "relay.toml"
    path.write_text(dedent(text))
    return load(path, environ)


def refused(place: Path, setting: str) -> str:
    """Return why a schedule with this setting is refused, without the name of the file."""
    with pytest.raises(ConfigurationError) as found:
        loaded(place, f'[schedules.a]\ncron = "* * * * *"\ntype = "a"\n{setting}\n')
    return str(found.value).removeprefix(f"{place}/relay.toml:4: schedules.a.")


def test_a_whole_schedule(tmp_path: Path) -> None:
    assert loaded(tmp_path, WHOLE).registered_schedules() == [
        {
            "name": "nightly",
            "cron": "30 3 * * MON-FRI",
            "timezone": "Europe/Berlin",
            "type": "report.due",
            "payload": {"kind": "daily", "parts": [1, 2.5, True], "deep": {"a": []}},
            "key": "report",
            "missed": "all",
        }
    ]


def test_the_defaults(tmp_path: Path) -> None:
    [found] = loaded(tmp_path, '[schedules.a]\ncron = "* * * * *"\ntype = "a"').registered_schedules()
    defaults: dict[str, object] = {"timezone": "UTC", "payload": {}, "missed": "one"}
    defaults |= {"key": None}
    assert found == {"name": "a", "cron": "* * * * *", "type": "a", **defaults}


def test_variables_set_schedules_too(tmp_path: Path) -> None:
    variables = {
        "OUTBOX_RELAY_SCHEDULES__NIGHTLY__CRON": "0 4 * * *",
        "OUTBOX_RELAY_SCHEDULES__OTHER__CRON": "0 5 * * *",
        "OUTBOX_RELAY_SCHEDULES__OTHER__TYPE": "other",
        "OUTBOX_RELAY_SCHEDULES__OTHER__PAYLOAD": '{"a": null}',
    }
    found = {each["name"]: each for each in loaded(tmp_path, WHOLE, **variables).registered_schedules()}
    assert (found["nightly"]["cron"], found["nightly"]["type"]) == ("0 4 * * *", "report.due")
    assert (found["other"]["cron"], found["other"]["payload"]) == ("0 5 * * *", {"a": None})


def test_half_of_a_surrogate_pair_in_a_variable_is_refused(tmp_path: Path) -> None:
    """A byte that is not UTF-8 comes so."""
    with pytest.raises(ConfigurationError, match="a character that PostgreSQL cannot store"):
        loaded(tmp_path, WHOLE, OUTBOX_RELAY_SCHEDULES__NIGHTLY__KEY="\udcff")


@pytest.mark.parametrize("name", ["A", "1a", "a__b", "a-b", "x" * 41])
def test_a_wrong_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="a schedule's name is 1 to 40 of a-z, 0-9 and _"):
        loaded(tmp_path, f'[schedules.{name}]\ncron = "* * * * *"\ntype = "a"')


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('timezone = "Europe/Berln"', "timezone: there is no such time zone; did you mean Europe/Berlin?"),
        ("payload = {at = 2026-01-01}", "payload.at: JSON has no dates and times: write a string"),
        ("payload = {list = [1, nan]}", "payload.list[1]: JSON has no such number"),
        (r'payload = {a = "\u0000"}', "payload.a: holds a character that JSON in PostgreSQL does not have"),
        (r'payload = {"\u0000" = 1}', "payload: holds a name with a character that JSON in PostgreSQL does not have"),
        ("payload = [1]", "payload: should be a table"),
        (f'key = "{"x" * 1025}"', "key: has more than 1024 bytes"),
        (r'key = "\u0000"', "key: holds a character that PostgreSQL cannot store: U+0000"),
        ('missed = "two"', "missed: should be 'one', 'skip' or 'all'"),
        ('corn = "* * * * *"', "corn: there is no such setting; did you mean cron?"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_place(tmp_path: Path, setting: str, reason: str) -> None:
    assert refused(tmp_path, setting).startswith(reason)


def test_a_payload_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    assert "is nested more than 100 deep" in refused(tmp_path, f"payload = {{a = {'[' * 120}{']' * 120}}}")


@pytest.mark.parametrize("text", ["0 0 30 2 *", "* * * *", "* * * * * *", "61 * * * *"])
def test_a_wrong_expression_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"relay.toml:2: schedules.a.cron: "):
        loaded(tmp_path, f'[schedules.a]\ncron = "{text}"\ntype = "a"')


@pytest.mark.parametrize("text", ["", "a b", "a*", "é", "outbox.dead", "x" * 256])
def test_a_wrong_type_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"relay.toml:3: schedules.a.type: "):
        loaded(tmp_path, f'[schedules.a]\ncron = "* * * * *"\ntype = "{text}"')


def test_payload_is_not_shown(tmp_path: Path) -> None:
    settings = loaded(tmp_path, WHOLE)
    found = shown(settings)
    assert found["schedules.nightly.payload"] == "…"
    assert "daily" not in repr(settings)


def test_a_type_that_no_route_takes_is_a_warning(tmp_path: Path) -> None:
    [said] = warnings(loaded(tmp_path, SINK + WHOLE))
    assert "schedules.nightly.type: no route takes the type report.due" in said
    assert warnings(loaded(tmp_path, (SINK + WHOLE).replace("report.due", "order.due"))) == []


def test_a_reload_applies_schedules(tmp_path: Path) -> None:
    old, new = loaded(tmp_path, SINK), loaded(tmp_path, SINK + WHOLE)
    changed = loaded(tmp_path, SINK + WHOLE.replace("30 3", "30 4"))
    assert differing(new, changed) == [("schedules", "nightly", "cron")]
    assert merged(old, new).schedules == new.schedules
    assert merged(changed, old).schedules == {}
