"""The benchmarks end to end at a tiny scale: figures, and that given servers are left as they were."""

from __future__ import annotations

import json
import subprocess
import sys

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer

SCENARIOS = {"drain": "bare loop", "fanout": "bare loop", "webhooks": "bare posts", "queue": "bare queue", "emit": ""}
DATABASES = "select datname from pg_database where datname like 'outbox_bench%'"


@pytest.mark.slow
def test_scenarios_are_measured_next_to_bare_loops_and_nothing_is_left(
    postgres: PostgresServer, real_kafka: KafkaBroker
) -> None:
    given = ("--dsn", postgres.dsn(), "--bootstrap", real_kafka.bootstrap, "--broker", "the tests'")
    command = [sys.executable, "-m", "tests.bench.measure", "--runs", "1", "--scale", "0.005", *given]
    done = subprocess.run(
        [*command, "--json", "--only", *SCENARIOS], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["broker"] == "the tests'"
    found = {each["name"]: {one["label"]: one["median"] for one in each["figures"]} for each in report["scenarios"]}
    assert found.keys() == SCENARIOS.keys()
    for name, bare in SCENARIOS.items():
        assert any(bare in label for label in found[name])
        assert all(value > 0 for label, value in found[name].items() if "relay" in label and "ratio" not in label)
    with psycopg.connect(postgres.dsn()) as connection:
        assert connection.execute(DATABASES).fetchall() == []
    topics = AdminClient({"bootstrap.servers": real_kafka.bootstrap}).list_topics(timeout=10).topics
    assert not [topic for topic in topics if topic.startswith("outbox-bench")]
