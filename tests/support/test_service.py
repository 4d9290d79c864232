"""A relay process in a test: a session that restarts unexpectedly fails the test."""

import json
import os
import re
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
ENDS: dict[str, Callable[[RelayService], object]] = {
    "left": lambda relay: relay.ready,
    "stopped": RelayService.stop,
    "killed": RelayService.kill,
}
THEN: dict[str, Callable[[RelayService], object]] = {
    "left": lambda _: None,
    "stopped": RelayService.stop,
    "killed": RelayService.kill,
    "started": RelayService.start,
}
"""The next thing that a test does with a process that it does not know to have ended."""


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


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_restarts_that_were_not_declared_fail_the_test(
    database: Database, tmp_path: Path, end: Callable[[RelayService], object]
) -> None:
    with pytest.raises(AssertionError, match=r"(?s)relay: sessions restarted.*sink\.restarted"):
        lose_and_end(database, relay_of(database, tmp_path), end)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_restarts_that_were_declared_pass(
    database: Database, tmp_path: Path, end: Callable[[RelayService], object]
) -> None:
    lose_and_end(database, relay_of(database, tmp_path, LOST), end)


def test_a_restart_that_the_log_leaves_out_is_counted(database: Database, tmp_path: Path) -> None:
    def lose_again(relay: RelayService) -> None:
        until(lambda: relay.ready and _owned(relay), seconds=30, what="the relay works again")
        until(lambda: _restarted_unlogged(database, relay), seconds=30, what="a restart without a line of its own")

    with pytest.raises(AssertionError, match="sessions restarted") as failure:
        lose_and_end(database, relay_of(database, tmp_path), lose_again)
    counts = re.findall(r"'[a-z_]+': (\d+)", str(failure.value))
    assert sum(map(int, counts)) > 1


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


@pytest.mark.parametrize("then", THEN.values(), ids=THEN.keys())
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


def test_what_the_test_itself_raises_is_what_it_reports(database: Database, tmp_path: Path) -> None:
    def fail(_relay: RelayService) -> None:
        raise ValueError("the test's own")

    with pytest.raises(ValueError, match="the test's own"):
        lose_and_end(database, relay_of(database, tmp_path), fail)


def _owned(relay: RelayService) -> bool:
    _, body = relay.ask("/readyz")
    return bool(body) and body["sinks"]["crm"]["shards"] == 64


def _restarted_unlogged(database: Database, relay: RelayService) -> bool:
    """End the relay's backends until that is so: the log has a line for each cause within ten seconds."""
    if sum(_restarts(relay).values()) > relay.log.read_text().count("sink.restarted") > 0:
        return True
    terminate_backends(database)
    return False


def _restarts(relay: RelayService) -> dict[str, int]:
    _, body = relay.ask("/readyz")
    return body["sinks"]["crm"]["restarts"] if body else {}
