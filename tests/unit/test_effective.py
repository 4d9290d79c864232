"""Settings as people see them and as relays record them: nothing that may be secret is in either."""

from __future__ import annotations

import json
from pathlib import Path

from outbox_relay.service.recorded_config import CONFIG_BYTES, config_text
from outbox_relay.settings import load
from outbox_relay.settings.effective import recorded, shown
from tests.support.settings_file import DSN, FILE, OTHER, SECRET, load_text

KEY = b"k" * 32
MARK = "hunter2hunter2"
MARKED = (
    FILE.replace("hooks/shop", MARK)
    .replace("relay@localhost", f"relay:{MARK}@localhost")
    .replace(
        'url = "https',
        f'headers = {{ x-tenant = "{MARK}", authorization = {{ env = "{MARK}" }} }}\n'
        f'proxy = "http://{MARK}.example.com:3128"\nurl = "https',
    )
    .replace(
        '"linger.ms" = 5',
        f'"linger.ms" = 5\n"sasl.username" = "{MARK}"\n"sasl.password" = "{MARK}"\n"ssl.key.pem" = "{MARK}"\n'
        f'"sasl.oauthbearer.config" = "{MARK}"\n"ssl.key.password" = 1234567890',
    )
)


def test_no_secret_is_shown_or_recorded(tmp_path: Path) -> None:
    settings = load_text(tmp_path, MARKED)
    for text in (json.dumps(shown(settings)), config_text(settings, KEY)):
        without_proxy = text.replace(f"http://{MARK}.example.com:3128", "")
        assert not any(each in without_proxy for each in (MARK, SECRET, OTHER, DSN, "1234567890"))


def test_every_setting_is_there_by_its_path(tmp_path: Path) -> None:
    found = shown(load_text(tmp_path, FILE))
    assert found["database.dsn"] == "…"
    assert found["relay.lease_seconds"] == 15.0
    assert found["sinks.crm.retry.attempts"] == 12
    assert found["sinks.crm.url"] == "https://crm.example.com/…"
    assert found["sinks.crm.secrets[1].until"] == "2027-01-01 00:00:00+00:00"
    assert found["sinks.crm.allow_networks"] == ["10.1.0.0/16", "fd00::1/128"]
    assert found["sinks.crm.permanent_statuses"] == []
    assert found['sinks.events.producer."bootstrap.servers"'] == "localhost:9092"
    assert found['sinks.events.producer."linger.ms"'] == 5
    assert found['routes."order.*"'] == ["events", "crm"]
    example = load(Path(__file__).parents[2] / "config" / "relay.example.toml", {})
    assert len(shown(example)) > len(found) / 2


def test_equal_secrets_have_equal_hashes_under_one_key_and_one_setting(tmp_path: Path) -> None:
    one, same = load_text(tmp_path, FILE), load_text(tmp_path, FILE)
    assert recorded(one, KEY) == recorded(same, KEY)
    other = recorded(load_text(tmp_path, FILE.replace(SECRET, OTHER)), KEY)
    changed = {name for name, value in recorded(one, KEY).items() if other[name] != value}
    assert changed == {"sinks.crm.secrets[0].secret"}
    assert recorded(one, b"other")["database.dsn"] != recorded(one, KEY)["database.dsn"]
    assert other["sinks.crm.secrets[0].secret"] != other["sinks.crm.secrets[1].secret"], "the path is hashed, too"
    assert "relay.name" not in other


def test_large_settings_are_recorded_by_their_size(tmp_path: Path) -> None:
    routes = "\n".join(f'"type.{n}" = ["events"]' for n in range(4000))
    text = config_text(load_text(tmp_path, FILE + routes), KEY)
    assert list(json.loads(text)) == ["too_large"]
    assert json.loads(text)["too_large"] > CONFIG_BYTES


def test_a_null_character_is_recorded_as_one_that_the_database_takes(tmp_path: Path) -> None:
    text = FILE.replace('"linger.ms" = 5', '"client.id" = "a\\u0000b"')
    assert "\\u0000" not in config_text(load_text(tmp_path, text), KEY)
