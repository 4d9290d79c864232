"""config show and config diff: of a file, and of the relays that run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import webhook_config, webhook_with_files_config
from tests.support.roles import new_role
from tests.support.service import RelayService
from tests.support.wait import until


@pytest.fixture
def operator(database: Database) -> Iterator[str]:
    """Yield an operator's role."""
    with new_role(database, "operator") as name:
        migrate(database.dsn, grants={"operate": [name]})
        yield name


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


def test_diff_names_what_the_running_relay_has_otherwise(database: Database, operator: str, tmp_path: Path) -> None:
    with Receiver() as receiver:
        text = webhook_config(database.dsn, receiver, tmp_path).replace("[relay]", '[relay]\nname = "first"')
        with RelayService(tmp_path, text) as relay:
            until(lambda: query(database, "select 1 from outbox.relay where config is not null"), seconds=20, what="it")
            options = ("-c", relay.config, "--dsn", database.dsn_as(operator))
            ended = inside("config", "diff", *options)
            assert (ended.code, ended.out, ended.err) == (0, "no difference\n", "")
            changed = relay.config.read_text().replace("[sinks.crm]", "[sinks.crm]\ntimeout_seconds = 7")
            relay.config.write_text(changed.replace('"one"', '"two"').replace('name = "first"', 'name = "other"'))
            ended = inside("config", "diff", *options, "--json")
            assert (ended.code, ended.json) == (0, {
                "differences": [
                    {"setting": "sinks.crm.timeout_seconds", "file": 7.0, "running": 15.0, "relays": ["first"]},
                    {"setting": "sinks.crm.headers.x-tenant", "file": "…", "running": "…", "relays": ["first"]},
                ]
            })  # fmt: skip
            assert "timeout_seconds" in inside("config", "diff", *options).out
            [(stored,)] = query(database, "select config::text from outbox.relay")
            assert not any(secret in stored for secret in (SECRET, '"one"'))
            query(database, "update outbox.relay set config = null returning 1")
            until(lambda: query(database, "select 1 from outbox.relay where config is not null"), seconds=20, what="it")
            assert relay.stop() == 0
    ended = inside("config", "diff", *options)
    assert (ended.code, ended.err) == (0, "no relay is alive\n")


def test_diff_names_relays_that_record_nothing(database: Database, tmp_path: Path) -> None:
    query(
        database,
        "insert into outbox.relay (id, name, version, sinks) values (gen_random_uuid(), 'old', '0', '{}') returning 1",
    )
    with Receiver() as receiver:
        file = tmp_path / "relay.toml"
        file.write_text(webhook_config(database.dsn, receiver, tmp_path))
    ended = inside("config", "diff", "-c", file)
    assert (ended.code, ended.out) == (0, "no difference\n")
    assert ended.err == "these relays have not recorded their settings: old\n"


def test_diff_is_refused_to_a_role_without_the_right(database: Database, tmp_path: Path) -> None:
    with Receiver() as receiver, new_role(database, "reader") as reader:
        migrate(database.dsn, grants={"read": [reader]})
        file = tmp_path / "relay.toml"
        file.write_text(webhook_config(database.dsn_as(reader), receiver, tmp_path))
        ended = inside("config", "diff", "-c", file)
    assert ended.code == 2
    assert "run outbox-relay migrate --grant-operate ROLE" in ended.err
