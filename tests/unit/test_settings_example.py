"""The example file and the page about configuration: they load, they are complete, the defaults in them are true."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import fields, table
from outbox_relay.settings import Settings, load, warnings
from outbox_relay.settings.schedules import ScheduleSettings
from tests.support.own_models import SINKS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "config" / "relay.example.toml"
PAGE = ROOT / "docs" / "configuration.md"

HEADER = re.compile(r"\[([\w.]+)\]")
COMMENTED = re.compile(r'#("[\w.]+"|\w+) = .+')
SETTING = re.compile(r'#?("[\w.]+"|\w+) =')
ALTERNATIVE = {"dsn_file": "dsn", "secrets_file": "secrets"}
NEEDED = {
    "client_key": "client_certificate",
    "proxy_authorization_file": "proxy",
    "url": "format",
    "format": "url",
    "password": "username",
    "password_file": "username",
}
NO_DEFAULT = {
    *("dsn_file", "secrets_file", "name", "start", "linger.ms", "compression.type", "listen_dsn"),
    *("client_certificate", "client_key", "ca_file", "proxy", "proxy_authorization_file"),
    *("partitions", "replication_factor", "key", "tenant"),
    *("url", "format", "username", "password", "password_file"),
}
"""Commented lines that show an example, or an empty text that stands for none."""


@cache
def example() -> Sequence[tuple[str, str]]:
    """Return the lines of the example, each with its header."""
    found: list[tuple[str, str]] = []
    section = ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if header := HEADER.fullmatch(line):
            section = header[1]
        found.append((section, line))
    return found


def commented() -> list[tuple[str, str]]:
    """Header and name of each setting that is commented out."""
    return [(section, found[1].strip('"')) for section, line in example() if (found := COMMENTED.fullmatch(line))]


def uncommented(section: str, name: str) -> str:
    """Return the example with one commented setting made active, and without those that exclude it."""
    lines: list[str] = []
    opened = False
    for at, line in example():
        if at == section and any(
            re.match(rf'#"?{re.escape(active)}"? =', line) for active in (name, NEEDED.get(name, name))
        ):
            lines.append(line.removeprefix("#"))
            continue
        if at == section and name in ALTERNATIVE and line.startswith(f"{ALTERNATIVE[name]} ="):
            opened = line.endswith("[")
            continue
        if opened:
            opened = line != "]"
            continue
        lines.append(line)
    return "\n".join(lines)


def wanted() -> list[str]:
    """Return every setting of the models by header and name; sinks as they are named in the example."""

    def walk(at: str, model: type[BaseModel]) -> list[str]:
        found: list[str] = []
        for name, field in fields(model).items():
            inner = table(field)
            found += walk(f"{at}.{name}".removeprefix("."), inner) if inner else [f"{at} {name}"]
        return found

    tables = (" sinks", " routes", " schedules", "sinks.events producer")
    every = [
        *walk("", Settings),
        *walk("schedules.clean_up", ScheduleSettings),
        *walk("sinks.events", SINKS["kafka"]),
        *walk("sinks.crm", SINKS["webhook"]),
    ]
    return [name for name in every if name not in tables]


def test_example_loads_without_a_warning() -> None:
    settings = load(EXAMPLE, {})
    settings.database.require_dsn()
    assert warnings(settings) == []
    assert {sink.type for sink in settings.sinks.values()} == SINKS.keys()


def test_walk_over_the_models_sees_the_settings() -> None:
    assert {"database dsn", "sinks.events.retry jitter", "sinks.crm.circuit open_after", "http listen"} <= set(wanted())


@pytest.mark.parametrize("setting", wanted())
def test_every_setting_stands_in_the_example(setting: str) -> None:
    there = [f"{section} {found[1]}" for section, line in example() if (found := SETTING.match(line))]
    assert there.count(setting) == 1


def test_every_table_stands_in_the_example() -> None:
    headers = {section for section, _ in example() if section}
    assert headers >= {setting.split(" ")[0] for setting in wanted()} | {"routes", "sinks.events.producer"}


def test_every_line_of_the_example_is_prose_or_a_setting() -> None:
    for section, line in example():
        if line.startswith("#") and not line.startswith(("# ", "#\n")) and line != "#":
            assert COMMENTED.fullmatch(line), (section, line)


@pytest.mark.parametrize(("section", "name"), commented())
def test_commented_setting_is_valid(tmp_path: Path, section: str, name: str) -> None:
    text = uncommented(section, name)
    path = tmp_path / "relay.toml"
    path.write_text(text)
    found: Any = tomllib.loads(text)
    for step in section.split("."):
        found = found[step]
    assert name in found
    load(path, {})


@pytest.mark.parametrize(("section", "name"), [row for row in commented() if row[1] not in NO_DEFAULT])
def test_commented_value_is_the_default(tmp_path: Path, section: str, name: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(uncommented(section, name))
    assert load(path, {}).model_dump(exclude={"routes"}) == values_of_the_example()


@cache
def values_of_the_example() -> dict[str, Any]:
    """Return all settings of the example but its routes."""
    return load(EXAMPLE, {}).model_dump(exclude={"routes"})


def snippets(language: str) -> list[str]:
    """Return the code blocks of the page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", snippets("toml"), ids=lambda text: " ".join(text.split())[:30])
def test_snippet_of_the_page_loads(tmp_path: Path, text: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(text)
    assert not [said for said in warnings(load(path, {})) if "there is no sink" not in said]


def test_page_has_snippets_of_every_kind() -> None:
    text = "\n".join(snippets("toml"))
    assert all(
        part in text for part in ("[database]", 'type = "kafka"', 'type = "webhook"', "secrets_file", "[routes]")
    )


def test_environment_of_the_page_makes_a_relay() -> None:
    (text,) = [text for text in snippets("sh") if text.startswith("OUTBOX_RELAY_")]
    environ = dict(line.split("=", 1) for line in text.splitlines())
    settings = load(None, environ)
    settings.database.require_dsn()
    assert warnings(settings) == []
    assert settings.routes.sinks_for("anything") == {"events"}


def test_problems_of_the_page_are_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = snippets("toml")[0].replace("{type}", "{typ}").replace('captured" = ["events"]', 'captured" = ["event"]')
    Path("relay.toml").write_text(wrong)
    with pytest.raises(ConfigurationError) as refused:
        load(Path("relay.toml"), {})
    assert str(refused.value).splitlines() == snippets("text")[0].splitlines()
