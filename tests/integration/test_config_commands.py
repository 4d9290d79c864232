"""config show: of a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.command import inside
from tests.support.receiver import Receiver
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import webhook_config, webhook_with_files_config


def test_show_needs_no_database_and_hides_secrets(tmp_path: Path) -> None:
    with Receiver() as receiver:
        file = tmp_path / "relay.toml"
        file.write_text(webhook_config("postgresql://relay:hunter2@nowhere.invalid/shop", receiver, tmp_path))
    ended = inside("config", "show", "-c", file)
    assert (ended.code, ended.err) == (0, "")
    assert 'database.dsn = "…"' in ended.out
    assert "hunter2" not in ended.out
    assert inside("config", "show", "-c", file, "--json").json["relay.lease_seconds"] == 3.0


def test_show_tells_that_a_secret_was_rotated(tmp_path: Path) -> None:
    file, secrets, tenant = tmp_path / "relay.toml", tmp_path / "secrets", tmp_path / "tenant"
    file.write_text(webhook_with_files_config('dsn = "host=nowhere"', "http://127.0.0.1:1/", tmp_path))

    def shown(token: str = "its value") -> dict[str, Any]:  # noqa: S107 - of a test
        ended = inside("config", "show", "-c", file, "--json", CRM_TOKEN=token)
        assert not any(secret in ended.out for secret in (SECRET, '"one"', '"two"', token))
        return ended.json["fingerprints"]

    first = shown()
    assert shown() == first
    for place, change in {
        "sinks.crm.secrets_file": lambda: secrets.write_text(f"{SECRET}\n{SECRET}"),
        "sinks.crm.headers.x-tenant": lambda: tenant.write_text("two\n"),
    }.items():
        change()
        other = shown()
        assert {name for name in first if other[name]["digest"] != first[name]["digest"]} == {place}
        assert other[place]["since"].endswith("+00:00")
        text = inside("config", "show", "-c", file).out
        assert re.search(rf"^{place} = .*  # {other[place]['digest']}, since 20", text, re.MULTILINE)
        first = other
    assert shown("other")["sinks.crm.headers.authorization"] != first["sinks.crm.headers.authorization"]
    secrets.unlink()
    assert "sinks.crm.secrets_file" not in shown(), "a file that is only where the relay runs"
