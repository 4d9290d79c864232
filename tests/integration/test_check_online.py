"""The findings of `check --online` about the database, by the command itself."""

from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.ports import free_port
from tests.support.command import Ended, inside
from tests.support.database import Database
from tests.support.receiver import Receiver
from tests.support.relay_config import kafka_config, webhook_config
from tests.support.roles import new_role


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def check(directory: Path, text: str) -> Ended:
    """Run the command with a file of this text."""
    file = directory / "relay.toml"
    file.write_text(text)
    file.chmod(0o600)
    if (secrets := directory / "secrets").exists():
        secrets.chmod(0o600)
    return inside("check", "--online", "-c", file)


def listening(text: str, dsn: str) -> str:
    """Return the configuration behind a pooler, with a connection of its own for notifications."""
    return text.replace("[relay]", f'pooler = "transaction"\nlisten_dsn = "{dsn}"\n[relay]')


def test_privileges_that_no_role_should_have_are_warnings(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    text = webhook_config(database.dsn, receiver, tmp_path)
    with new_role(database, "stranger") as stranger:
        before = check(tmp_path, text)
        assert (before.code, stranger in before.err) == (0, False)
        with database.connect(autocommit=True) as connection:
            connection.execute(f'grant select on outbox.event to "{stranger}"'.encode())
        ended = check(tmp_path, text)
    assert ended.code == 0
    [line] = [line for line in ended.err.splitlines() if stranger in line]
    assert line.startswith(f'warning: database: role "{stranger}" has SELECT on table event')


def test_a_database_that_does_not_answer_is_a_failure_unless_something_else_is_wrong(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    away = f"postgresql://relay:SECRET@127.0.0.1:{free_port()}/shop"
    text = webhook_config(away, receiver, tmp_path)
    ended = check(tmp_path, text)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (1, "", 1)
    assert ended.err.startswith("database: ")
    assert "SECRET" not in ended.err
    ended = check(tmp_path, text.replace(receiver.url, f"http://127.0.0.1:{free_port()}/"))
    assert (ended.code, ended.out) == (2, "")
    assert [line.partition(": ")[0] for line in ended.err.splitlines()] == ["database", "sinks.crm"]
    ended = check(tmp_path, listening(webhook_config(database.dsn, receiver, tmp_path), away))
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (1, "", 1)
    assert ended.err.startswith("database.listen_dsn: ")


def test_a_topic_that_brokers_may_create_is_a_warning(database: Database, tmp_path: Path) -> None:
    """Brokers that do not tell their settings may create it for its first record."""
    with Broker() as broker:
        ended = check(tmp_path, kafka_config(database.dsn, broker, "shop.new"))
    assert ended.code == 0, ended.err
    assert "warning: sinks.events: topic shop.new does not exist, and the brokers do not tell" in ended.err
    assert "UNKNOWN" not in ended.err
