"""Both sinks at once on real parts: one event for Kafka and for a webhook, each with a state of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.command import inside
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.ports import free_port
from tests.support.receiver import Receiver
from tests.support.receiver.fault_modes import is_refused
from tests.support.receiver.process import Arrival, ReceiverProcess
from tests.support.relay_config import kafka_and_webhook_config
from tests.support.service import RelayService
from tests.support.shop import Writers, compare
from tests.support.wait import until

EVENTS = int(os.environ.get("OUTBOX_TEST_BOTH_EVENTS", "3000"))
"""`make proof` runs 20,000."""


def emit(database: Database, count: int = 1) -> list[str]:
    """Emit events of 50 keys in turn; their uids."""
    with database.connect() as connection:
        rows = connection.execute(
            "select outbox.emit('order.created', to_jsonb(n), key => 'k' || mod(n, 50))::text"
            " from generate_series(1, %s) n",
            (count,),
        ).fetchall()
    return [uid for (uid,) in rows]


def in_order(uids: Sequence[str], arrived: Sequence[str]) -> bool:
    """Return True if exactly these events arrived, for the first time in the order of each key."""
    first = list(dict.fromkeys(arrived))
    keys = {uid: n % 50 for n, uid in enumerate(uids)}
    return set(first) == set(uids) and all(
        [uid for uid in first if keys[uid] == key] == list(uids[key::50]) for key in range(50)
    )


def in_topic(kafka: KafkaBroker, topic: str) -> list[str]:
    """Return the uids in the topic."""
    return [str(record.headers["id"], "ascii") for record in kafka.read_all(topic) if record.headers["id"]]


def status(relay: RelayService) -> dict[str, dict[str, Any]]:
    """Return the sinks' part of `status --json`."""
    return inside("status", "--json", "-c", relay.config).json["sinks"]


def test_a_receiver_that_is_down_does_not_touch_kafka(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/hooks"
    with RelayService(tmp_path, kafka_and_webhook_config(database.dsn, kafka.bootstrap, topic, url)) as relay:
        uids = emit(database, 300)
        until(lambda: len(in_topic(kafka, topic)) == 300, seconds=60, what="Kafka has everything")
        until(lambda: status(relay)["crm"]["circuit"] != "closed", seconds=60, what="the circuit is open")
        # At a broker that has just started the topic may not be known yet.
        until(lambda: status(relay)["events"]["circuit"] == "closed", seconds=60, what="Kafka's circuit is closed")
        sinks = status(relay)
        assert (sinks["crm"]["backlog"], sinks["crm"]["dead"]) == (300, 0)
        assert sinks["events"]["backlog"] == 0
        with Receiver(port=port) as receiver:
            until(lambda: status(relay)["crm"]["backlog"] == 0, seconds=60, what="the webhook has everything")
            assert in_order(uids, receiver.uids)
            assert receiver.unverified == []
        assert in_order(uids, in_topic(kafka, topic))
        assert relay.stop() == 0


class Letter(NamedTuple):
    """A dead letter."""

    uid: str
    payload: bytes
    code: int | None
    reason: str | None


def dead(database: Database) -> list[Letter]:
    """Return the dead letters of the webhook."""
    with database.connect() as connection:
        return [
            Letter(*row)
            for row in connection.execute(
                "select uid::text, payload, last_status, last_error from outbox.delivery"
                " where sink = 'crm' and state = 'dead'"
            ).fetchall()
        ]


def assert_all_settled(committed: dict[str, int], arrivals: Sequence[Arrival], letters: Sequence[Letter]) -> None:
    """Assert that nothing is lost, invented or reordered, and that exactly the refused events are dead."""
    came = compare(committed, (arrival.payload for arrival in arrivals))
    assert (came.lost, came.phantom, came.reordered) == (0, 0, 0)
    taken = compare(committed, (arrival.payload for arrival in arrivals if arrival.answer == "200"))
    assert (taken.lost, taken.phantom, taken.reordered) == (len(letters), 0, 0)
    assert {letter.uid for letter in letters} == {arrival.uid for arrival in arrivals if is_refused(arrival.uid)}
    assert {letter.code for letter in letters} == {400}
    assert all("400" in (letter.reason or "") for letter in letters)
    assert [arrival for arrival in arrivals if arrival.problem] == []


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_both_sinks_get_everything_though_a_relay_is_killed_and_the_receiver_misbehaves(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Every fifth event fails twice, one in fifty is refused, some hang, the receiver throttles now and then."""
    kafka.create_topic(topic, partitions=6)
    writers = Writers(database.dsn, keys=2_000, keys_per_transaction=20)
    writers.prepare()
    with ReceiverProcess(tmp_path, "--fault-modes") as receiver:
        text = kafka_and_webhook_config(database.dsn, kafka.bootstrap, topic, receiver.url)
        with RelayService(tmp_path, text, "one") as one, RelayService(tmp_path, text, "two") as two:
            began = time.monotonic()
            writers.start()
            until(lambda: writers.total() > EVENTS * 0.5, seconds=200, what="half is committed")
            until(lambda: any(True for _ in receiver.arrivals()), seconds=60, what="deliveries go on")
            one.kill()
            until(lambda: writers.total() > EVENTS, seconds=600, what="everything is committed")
            writers.stop()
            emitted = time.monotonic()
            until(lambda: _at_rest(two), seconds=600, what="both sinks are done")
            ended = time.monotonic()
            assert two.stop() == 0
    committed, arrivals, letters = writers.committed(), list(receiver.arrivals()), dead(database)
    assert_all_settled(committed, arrivals, letters)
    in_kafka = compare(committed, [record.value or b"" for record in kafka.read_all(topic, seconds=60)])
    assert in_kafka.sound
    answers = sorted({arrival.answer for arrival in arrivals})
    print(
        f"\n{sum(committed.values())} events emitted in {emitted - began:.1f} s, settled {ended - emitted:.1f} s later;"
        f"\nKafka: {in_kafka};\nwebhook: {len(arrivals)} requests answered {answers}, every signature verified,"
        f" {len(letters)} dead with 400; {json.dumps(_counts(arrivals))}"
    )
    assert {"200", "400", "429", "500", "hang"} <= set(answers)


def _counts(arrivals: Sequence[Arrival]) -> dict[str, int]:
    found: dict[str, int] = {}
    for arrival in arrivals:
        found[arrival.answer] = found.get(arrival.answer, 0) + 1
    return found


def _at_rest(relay: RelayService) -> bool:
    return all(sink["backlog"] == 0 for sink in status(relay).values())
