"""A relay process in a test: a session that restarts unexpectedly fails the test."""

import json
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.ports import free_port
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.crm]
type = "webhook"
url = "http://127.0.0.1:{port}/"
secrets = ["whsec_bWlzc2luZ3Bvc2l0aW9uc21pc3NpbmdwbyEh"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
[routes]
"*" = ["crm"]
"""
TERMINATE = """select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()"""


def relay_of(database: Database, directory: Path, expects: Collection[str] = ()) -> RelayService:
    """Return a relay with one sink to which nothing is routed yet."""
    return RelayService(directory, CONFIG.format(dsn=database.dsn, port=free_port()), expects=expects)


def terminate_backends(database: Database) -> None:
    """End every connection to the database."""
    with database.connect(autocommit=True) as connection:
        connection.execute(TERMINATE)


def lose_connections(database: Database, relay: RelayService) -> None:
    """End the relay's backends, and wait until the log says that a session restarted."""
    terminate_backends(database)
    until(lambda: "sink.restarted" in relay.log.read_text(), seconds=30, what="the session restarts")


def lose_and_end(database: Database, relay: RelayService, end: Callable[[RelayService], object]) -> None:
    """Run a test that makes a session restart, and then ends the process."""
    with relay:
        lose_connections(database, relay)
        end(relay)


@pytest.mark.parametrize(
    "end", [lambda _: None, RelayService.stop, RelayService.kill], ids=["left", "stopped", "killed"]
)
def test_restarts_that_were_not_declared_fail_the_test(
    database: Database, tmp_path: Path, end: Callable[[RelayService], object]
) -> None:
    with pytest.raises(AssertionError, match=r"(?s)relay: sessions restarted.*sink\.restarted"):
        lose_and_end(database, relay_of(database, tmp_path), end)


def test_restarts_that_were_declared_pass(database: Database, tmp_path: Path) -> None:
    lose_and_end(database, relay_of(database, tmp_path, LOST), RelayService.stop)


def test_a_restart_that_the_log_leaves_out_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has a line for each cause within ten seconds; /readyz counts every restart."""
    relay = RelayService(tmp_path, "")
    relay.log.write_text(json.dumps({"event": "sink.restarted", "cause": "connection_lost"}))
    monkeypatch.setattr(relay, "ask", lambda _: (200, {"sinks": {"crm": {"restarts": {"connection_lost": 2}}}}))
    relay._count_restarts()  # pyright: ignore[reportPrivateUsage] - of a process that is not started
    with pytest.raises(AssertionError, match=r"did not cause: {'connection_lost': 2}"):
        relay.judge()


@pytest.mark.parametrize(
    "event", ["sink.restarted", "part.restarted", "sink crm starts again", "heartbeat starts again"]
)
def test_a_restart_of_any_part_is_judged(tmp_path: Path, event: str) -> None:
    relay = RelayService(tmp_path, "", expects={"statement_failed"})
    relay.log.write_text(
        "\n".join(json.dumps({"event": event, "cause": cause}) for cause in ("statement_failed", None))
    )
    with pytest.raises(AssertionError, match=r"did not cause: {'unknown': 1}"):
        relay.judge()


@pytest.mark.parametrize(
    "then", [lambda _: None, RelayService.stop, RelayService.start], ids=["left", "stopped", "again"]
)
def test_a_process_that_ended_by_itself_fails_the_test(tmp_path: Path, then: Callable[[RelayService], object]) -> None:
    def run(relay: RelayService) -> None:
        with relay.start(wait=False):
            relay.process.wait(30)
            then(relay)

    with pytest.raises(AssertionError, match=r"relay ended by itself with 2: "):
        run(RelayService(tmp_path, "no = 'setting'"))


def test_a_process_that_was_killed_by_another_fails_the_test(database: Database, tmp_path: Path) -> None:
    def run(relay: RelayService) -> None:
        with relay:
            os.kill(relay.process.pid, signal.SIGKILL)
            relay.process.wait(30)

    with pytest.raises(AssertionError, match=r"relay ended by itself with -9: "):
        run(relay_of(database, tmp_path))


def test_a_process_may_end_in_a_way_that_the_test_knows(database: Database, tmp_path: Path) -> None:
    with RelayService(tmp_path, "no = 'setting'").start(wait=False) as relay:
        assert relay.ended(30) == 2
    with relay_of(database, tmp_path) as relay:
        relay.send(signal.SIGTERM)
        relay.process.wait(30)
