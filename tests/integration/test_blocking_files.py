"""Files of the configuration that block: a reload is refused, commands say so, and a relay still stops."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.command import inside
from tests.support.database import Database
from tests.support.emitting import emit_types
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

SINK = '[sinks.crm]\ntype = "webhook"\nurl = "https://example.com"\n'
ROUTES = '[routes]\n"*" = ["crm"]\n'
FILES = {
    "dsn_file": ('[database]\ndsn_file = "{file}"\n', SINK + 'secrets = ["whsec_{key}"]\n', ["status"]),
    "secrets[0]": ("", SINK + 'secrets = [{{ file = "{file}" }}]\n', ["check"]),
    "ca_file": ("", SINK + 'secrets = ["whsec_{key}"]\nca_file = "{file}"\n', ["check"]),
}
KEY = "MDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDA="


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def relay(database: Database, tmp_path: Path) -> Generator[RelayService]:
    """Yield a relay that runs, and delivers to a receiver."""
    with Receiver() as receiver:
        relay = RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"reload"})
        with relay:
            yield relay
            emit_types(database, "a.last")
            until(lambda: "a.last" in received_types(receiver), seconds=20, what="it delivers")
            relay.stop()


def being_read(pipe: Path) -> int:
    """Return a descriptor to write to a pipe, or 0 if no process reads it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return 0


def replaced_by_pipe(relay: RelayService) -> str:
    """Replace the relay's file by a pipe, and return its text."""
    text = relay.config.read_text()
    relay.config.unlink()
    os.mkfifo(relay.config)
    return text


def lines(relay: RelayService, event: str) -> list[str]:
    return [str(line.get("reason")) for line in relay.lines() if line.get("event") == event]


def test_a_relay_stops_while_its_file_blocks(database: Database, tmp_path: Path) -> None:
    with Receiver() as receiver:
        relay = RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"reload"}).start()
        replaced_by_pipe(relay)
        relay.send(signal.SIGHUP)
        writer = until(lambda: being_read(relay.config), seconds=20, what="the relay reads the pipe")
        relay.stop()
        os.close(writer)


def test_a_reload_reads_a_pipe_that_is_written(relay: RelayService) -> None:
    text = replaced_by_pipe(relay)
    relay.send(signal.SIGHUP)
    writer = until(lambda: being_read(relay.config), seconds=20, what="the relay reads the pipe")
    os.write(writer, text.replace('"a.*" =', '"b.*" = ["crm"]\n"a.*" =').encode())
    os.close(writer)
    until(lambda: lines(relay, "config.reloaded"), seconds=20, what="it is reloaded")


@pytest.mark.thorough  # waits for the limit of ten seconds
def test_a_reload_whose_file_blocks_is_refused_and_the_next_one_works(relay: RelayService) -> None:
    text = replaced_by_pipe(relay)
    relay.send(signal.SIGHUP)
    until(lambda: lines(relay, "config.reload_refused"), seconds=30, what="the reload is refused")
    [reason] = lines(relay, "config.reload_refused")
    assert reason.startswith(f"{relay.config}: its contents did not arrive within 10 s")
    assert not relay.ask("/readyz")[1]["config_last_reload_successful"]
    relay.config.unlink()
    relay.config.write_text(text.replace('"a.*" =', '"b.*" = ["crm"]\n"a.*" ='))
    relay.send(signal.SIGHUP)
    until(lambda: lines(relay, "config.reloaded"), seconds=20, what="the next one works")
    assert relay.ask("/readyz")[1]["config_last_reload_successful"]


@pytest.mark.parametrize("command", [["check"], ["config", "show"], ["status"], ["run"]])
def test_a_command_whose_file_blocks_says_so(pipe: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr("outbox_relay.domain.files.READ_SECONDS", 0.1)
    end = inside(*command, "-c", str(pipe))
    assert end.code == 2
    assert f"{pipe}: its contents did not arrive within 0.1 s" in end.err


@pytest.mark.parametrize("setting", FILES)
def test_a_file_that_the_settings_name_and_that_blocks_is_named(
    pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr("outbox_relay.domain.files.READ_SECONDS", 0.1)
    database, sink, command = FILES[setting]
    config = tmp_path / "relay.toml"
    config.write_text((database + sink).format(file=pipe, key=KEY) + ROUTES, encoding="utf-8")
    end = inside(*command, "-c", str(config))
    fault = "is not a regular file" if setting == "ca_file" else "its contents did not arrive within 0.1 s"
    [line] = [line for line in end.err.splitlines() if line.endswith(f"{pipe}: {fault}")]
    assert setting in line
    assert end.code == (2 if setting == "dsn_file" else 0)
