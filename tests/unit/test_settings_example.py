"""The example file, the JSON Schema and the page about configuration: they load, they are complete, they are true."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import Secret
from outbox_relay.settings import load, schema, warnings
from outbox_relay.settings.webhook import SigningSecret

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "config" / "relay.example.toml"
PAGE = ROOT / "docs" / "configuration.md"
MAKE = "python -m outbox_relay config show --schema > outbox_relay/settings/relay.schema.json"
SETTING = re.compile(r'(#?)("[\w.]+"|\w+) = .+|\[([\w.]+)\]')

NEEDED = {"client_key": "client_certificate", "url": "format", "format": "url"}
NO_DEFAULT = {
    *("dsn_file", "name", "start", "linger.ms", "compression.type", "listen_dsn", "create_topics", "key"),
    *("client_certificate", "client_key", "ca_file", "proxy", "url", "format", "user_info"),
}
"""Commented lines that show an example, or an empty text that stands for none."""


def example() -> Iterator[tuple[str, str, str]]:
    """Yield header, name and line of each setting of the example, commented or not; the name is empty elsewhere."""
    section = ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        found = SETTING.fullmatch(line)
        section = found[3] if found and found[3] else section
        yield section, (found[2] or "").strip('"') if found else "", line


def tables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables of the schema by their headers in the example."""
    places = {"KafkaSettings": "events", "WebhookSettings": "crm", "PythonSettings": "mail"}
    for name, table in schema.json_schema()["$defs"].items():
        sink = f"sinks.{places.get(name, 'events')}"
        match name.removesuffix("Settings").removesuffix("Policy"):
            case "Kafka" | "Webhook" | "Python":
                yield sink, table
            case "Registry" | "Retry" | "Circuit" as part:
                yield f"{sink}.{part.lower()}", table
            case "Schedule":
                yield "schedules.clean_up", table
            case "Secret" | "SigningSecret" | "TopicCreation":
                pass
            case part:
                yield part.lower(), table


def uncommented(section: str, name: str) -> str:
    """Return the example with one commented setting made active, and without the one that it excludes."""
    active = (name, NEEDED.get(name, name))
    excluded = "dsn" if name == "dsn_file" else ""
    return "\n".join(
        line.removeprefix("#") if at == section and each in active else line
        for at, each, line in example()
        if not (at == section and excluded and each == excluded)
    )


def loaded(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "relay.toml"
    path.write_text(text)
    return load(path, {})


def test_example_loads_without_a_warning() -> None:
    settings = load(EXAMPLE, {})
    settings.database.require_dsn()
    assert warnings(settings) == []
    assert {sink.type for sink in settings.sinks.values()} == {"kafka", "webhook", "python"}


def test_every_setting_stands_once_in_the_example_and_is_described() -> None:
    there = [(section, name) for section, name, _ in example() if name]
    assert len(there) == len(set(there))
    parts = {"retry", "circuit", "registry", "producer"}
    for header, table in tables():
        for name, about in table["properties"].items():
            assert name in parts or (header, name) in there
            assert about.get("description") or name in parts, name


def test_there_are_few_settings() -> None:
    """A setting that several types of sinks share is one; so are those of a table that several have."""
    own = [name for table in schema.tables() - {Secret, SigningSecret} for name in table.__annotations__]
    parts = {"retry", "circuit", "registry", "create_topics", "type"}
    assert len([name for name in own if name not in parts] + ["routes", "a sink's type", "a schedule's type"]) <= 76


def test_commented_lines_are_valid_and_show_the_defaults(tmp_path: Path) -> None:
    expected = load(EXAMPLE, {}).model_dump(exclude={"routes"})
    for section, name, line in [*example()]:
        if name and line.startswith("#"):
            settings = loaded(tmp_path, uncommented(section, name))
            assert name in NO_DEFAULT or settings.model_dump(exclude={"routes"}) == expected, (section, name)


def test_shipped_schema_is_fresh() -> None:
    assert json.loads(schema.SHIPPED.read_text(encoding="utf-8")) == schema.json_schema(), MAKE


# -- the page ---------------------------------------------------------------------------------------------------------


def snippets(language: str) -> list[str]:
    """Return the code blocks of the page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", snippets("toml"), ids=lambda text: " ".join(text.split())[:30])
def test_snippet_of_the_page_loads(tmp_path: Path, text: str) -> None:
    assert not [warning for warning in warnings(loaded(tmp_path, text)) if "there is no sink" not in warning]


def test_environment_of_the_page_makes_a_relay() -> None:
    (text,) = [text for text in snippets("sh") if text.startswith("OUTBOX_RELAY_")]
    settings = load(None, dict(line.split("=", 1) for line in text.splitlines()))
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
