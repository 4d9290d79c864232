"""Check a steady stream through a real relay process while its brokers fail.

usage: python -m tests.bench.rolling [rolling|frozen|lost] ...

- rolling: three brokers are restarted in turn, in rounds, under 5,000 events/s; counts lost, reordered and duplicate.
- frozen: the leader of a partition is stopped by SIGSTOP for 3, 10 and 60 s; the same counts.
- lost: answers of a broker are discarded, three times for longer than the relay waits for them; the same counts.

Starts PostgreSQL and the brokers. The figures depend on other load of the machine, which is printed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.destinations import EndOffsets
from tests.bench.stream import PARTITIONS, RelayUnderTest, Stream
from tests.contract.kafka import proxied_broker
from tests.support.kafka import KafkaBroker, KafkaCluster
from tests.support.postgres import PostgresServer
from tests.support.shop import Report, compare
from tests.support.wait import until

LOST_SECONDS = 6.0
"""Duration of lost answers, a little longer than the relay waits for them."""


def checked(cluster: KafkaBroker | KafkaCluster, topic: str, committed: dict[str, int], seconds: float = 120) -> Report:
    """Wait until all committed events have arrived and compare them."""
    wanted = sum(committed.values())
    offsets = EndOffsets(cluster.bootstrap, topic)
    until(lambda: offsets.count() >= wanted, seconds=seconds, what=f"{wanted} events arrive")
    found: list[bytes] = []

    def arrived() -> bool:
        found[:] = [record.value or b"" for record in cluster.read_all(topic, seconds=180)]
        return len(set(found)) >= wanted

    until(arrived, seconds=seconds, what=f"{wanted} different events arrive")
    return compare(committed, found)


def under_stream(
    postgres: PostgresServer,
    cluster: KafkaBroker | KafkaCluster,
    topic: str,
    rate: float,
    disturb: Callable[[], None],
    bootstrap: str | None = None,
) -> Report:
    """Call `disturb` during a stream and check what arrives; the relay connects to `bootstrap` if given."""
    cluster.create_topic(topic, PARTITIONS)
    with tempfile.TemporaryDirectory() as directory:
        tested = RelayUnderTest(postgres, bootstrap or cluster.bootstrap, topic, Path(directory))
        with tested.relay.start() as relay, Stream(tested.dsn, rate) as stream:
            until(lambda: stream.emitted > rate, seconds=60, what="the stream flows")
            disturb()
            after = stream.emitted
            until(lambda: stream.emitted > after + rate, seconds=60, what="the stream continues")
            stream.stop()
            report = checked(cluster, topic, stream.committed())
            errors = {line.get("reason") or line.get("event") for line in relay.lines() if line.get("level") == "error"}
            print(
                f"{topic}: {report}; {stream.reached:,.0f} of {rate:,.0f} events/s were emitted; "
                f"relay {tested.memory_mib():.0f} MiB; errors logged: {len(errors)}; {load()}",
                flush=True,
            )
            relay.stop()
    return report


def rolling(postgres: PostgresServer, cluster: KafkaCluster, rounds: int, rate: float) -> bool:
    """Restart every broker in turn, `rounds` times. Return True if nothing was lost or reordered."""

    def disturb() -> None:
        for number in range(rounds):
            began = time.monotonic()
            cluster.restart_each("rolling")
            print(f"round {number + 1}: {time.monotonic() - began:.0f} s, {load()}", flush=True)

    return under_stream(postgres, cluster, "rolling", rate, disturb).sound


def frozen(postgres: PostgresServer, cluster: KafkaCluster, seconds: float, rate: float) -> bool:
    """Freeze the leader of a partition for `seconds`. Return True if nothing was lost or reordered."""
    topic = f"frozen.{seconds:g}"

    def disturb() -> None:
        with cluster.leader(topic).frozen():
            time.sleep(seconds)

    return under_stream(postgres, cluster, topic, rate, disturb).sound


def lost(postgres: PostgresServer, rate: float) -> bool:
    """Discard a broker's answers three times. Return True if events were repeated but none lost or reordered."""
    with proxied_broker() as (kafka, proxy):

        def disturb() -> None:
            for _ in range(3):
                proxy.mute = True
                time.sleep(LOST_SECONDS)
                proxy.mute = False
                # The client waits for the lost answers on the open connections.
                proxy.cut()
                proxy.restore()
                time.sleep(LOST_SECONDS)

        report = under_stream(postgres, kafka, "lost", rate, disturb, proxy.address)
    return report.sound and report.duplicates > 0


def load() -> str:
    """Return the load of the machine."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> int:
    """Run the requested checks. Return 1 if one fails."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", nargs="*", default=["rolling", "frozen", "lost"])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rate", type=float, default=5_000)
    arguments.add_argument("--freeze", type=float, nargs="+", default=[3, 10, 60])
    options = arguments.parse_args()
    freezes: list[float] = options.freeze if "frozen" in options.what else []
    held: dict[str, bool] = {}
    with PostgresServer(settings={"shared_buffers": "1GB", "max_wal_size": "8GB"}) as postgres:
        if {"rolling", "frozen"} & set(options.what):
            with KafkaCluster() as cluster:
                if "rolling" in options.what:
                    held["rolling"] = rolling(postgres, cluster, options.rounds, options.rate)
                for seconds in freezes:
                    held[f"frozen {seconds:g} s"] = frozen(postgres, cluster, seconds, options.rate)
        if "lost" in options.what:
            held["lost answers"] = lost(postgres, options.rate)
    for name, holds in held.items():
        print(f"{name}: {'holds' if holds else 'does NOT hold'}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
