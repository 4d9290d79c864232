"""The benchmarks end to end at a tiny scale: figures, report, and that nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from tests.support.child_processes import END_SECONDS, ChildProcess, reachable
from tests.support.command import inside
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.wait import until

TINY = ("--runs", "1", "--scale", "0.005")
DATABASES = "select datname from pg_database where datname like 'outbox_bench%'"


@pytest.mark.slow
def test_backlogs_are_drained_next_to_the_bare_loops_and_nothing_is_left(
    postgres: PostgresServer, real_kafka: KafkaBroker, tmp_path: Path
) -> None:
    """Given servers must be left as they were."""
    given = ("--dsn", postgres.dsn(), "--bootstrap", real_kafka.bootstrap, "--broker", "the tests'")
    ended = inside("bench", *TINY, *given, "--only", "drain", "webhooks", "--json", "--plot", tmp_path)
    assert ended.code == 0, ended.err
    report = ended.json
    assert report["versions"]["broker"] == "the tests'"
    assert report["settings"]["rounds"] == "1 of 1"
    found = {each["name"]: {one["label"]: one for one in each["figures"]} for each in report["scenarios"]}
    assert found.keys() == {"drain", "webhooks"}
    for figures, bare in ((found["drain"], "bare loop"), (found["webhooks"], "bare posts")):
        ratio = figures["relay"]["median"] / figures[bare]["median"]
        assert figures[f"relay / {bare}"]["median"] == pytest.approx(ratio, rel=1e-3)
        assert figures["relay"]["values"] == [figures["relay"]["median"]]
    assert (tmp_path / "drain-ratio.svg").exists()
    with psycopg.connect(postgres.dsn()) as connection:
        assert connection.execute(DATABASES).fetchall() == []
    assert not _topics(real_kafka)


@pytest.mark.slow
def test_queues_are_handled_next_to_the_bare_queue(postgres: PostgresServer) -> None:
    ended = inside("bench", *TINY, "--dsn", postgres.dsn(), "--only", "queue", "tenants", "--json")
    assert ended.code == 0, ended.err
    found = {each["name"]: {one["label"]: one["median"] for one in each["figures"]} for each in ended.json["scenarios"]}
    assert found.keys() == {"queue", "tenants"}
    for label in ("handlers of 2 to 5 ms", "empty handlers"):
        ratio = found["queue"][f"{label}: relay"] / found["queue"][f"{label}: bare queue"]
        assert found["queue"][f"{label}: relay / bare queue"] == pytest.approx(ratio, rel=1e-3)
        assert found["queue"][f"{label}: lapsed leases"] == 0
    for figures, label in ((found["queue"], "handlers of 2 to 5 ms: "), (found["tenants"], "alone: ")):
        assert 0 < figures[f"{label}wait, p50"] <= figures[f"{label}wait, p99"]
    assert found["tenants"].keys() >= {"beside the heap / alone, p50", "beside the heap / alone, p99"}
    with psycopg.connect(postgres.dsn()) as connection:
        assert connection.execute(DATABASES).fetchall() == []


@pytest.mark.slow
def test_signal_leaves_nothing_behind() -> None:
    with reachable() as directory:
        bench = ChildProcess(directory, "bench", "--only", "idle")
        try:
            bench.says("run 1 of 3: idle")
            until(lambda: bench.descendants("relay-"), seconds=END_SECONDS, what="a relay is started")
            bench.process.send_signal(signal.SIGINT)
            assert bench.process.wait(END_SECONDS) == 130
            assert bench.left() == []
            assert bench.err.rstrip().endswith("nothing is left running")
            assert "Traceback" not in bench.err
        finally:
            bench.close()


def _topics(broker: KafkaBroker) -> list[str]:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    return [name for name in admin.list_topics(timeout=10).topics if name.startswith("outbox-bench")]
