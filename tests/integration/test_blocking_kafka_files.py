"""Files of a Kafka sink that block: its events wait, and nothing else does."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import some_events, soon
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.blocking_files import held, reading_threads
from tests.support.command import inside
from tests.support.database import Database
from tests.support.emitting import emit_types
from tests.support.kafka import KafkaBroker
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_types
from tests.support.relay_config import kafka_and_webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

NAME = 'producer_files."client.id"'
QUICK_SECONDS = 3.0
"""Time for what would take eleven seconds if it read the file."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "client-id"
    path.write_text("relay", encoding="ascii")
    return path


@pytest.mark.slow
async def test_a_file_that_blocks_when_a_running_sink_opens_it_again_keeps_no_call_waiting(
    kafka: KafkaBroker, topic: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when the thread of the producer waits for the file: neither call is answered."""
    monkeypatch.setattr("outbox_relay.domain.file_reading.READ_SECONDS", -0.5)
    producer, files = {"bootstrap.servers": kafka.bootstrap}, {"client.id": file}
    sink = KafkaSink("blocked", TopicTemplate.parse(topic), producer, 3.0, files=files)
    await sink.open()
    assert await sink.deliver(some_events(1), soon()) == [DELIVERED]
    sink.use_settings(await sink.validated_settings(producer, files))
    with held(file):
        for _ in range(3):
            [verdict] = await asyncio.wait_for(sink.deliver(some_events(1), soon()), QUICK_SECONDS)
            assert isinstance(verdict, Unavailable)
            assert verdict.reason.startswith(f"{NAME}: {file}: could not be read within")
        await asyncio.wait_for(sink.reset(), QUICK_SECONDS)
        with pytest.raises(ConfigurationError, match=rf"^sinks\.blocked\.{NAME}: {file}: could not be read within"):
            await sink.validated_settings(producer, files)
        assert reading_threads() == 1
    until(lambda: reading_threads() == 0, seconds=10, what="the file was read")
    assert await sink.deliver(some_events(1), soon()) == [DELIVERED]
    await sink.close()


def lines(relay: RelayService, event: str) -> list[str]:
    return [str(line.get("reason")) for line in relay.lines() if line.get("event") == event]


def reload(relay: RelayService, event: str, seconds: float) -> str:
    """Ask for a reload, wait for the line ``event``, and return its reason."""
    before = len(lines(relay, event))
    relay.send(signal.SIGHUP)
    return until(lambda: lines(relay, event)[before:], seconds=seconds, what=event)[0]


def replayed(database: Database) -> None:
    """Replay the events of the webhook, and wait until that is done."""
    started = inside("replay", "start", "--sink", "crm", "--since", "1h", "--yes", "--dsn", database.dsn)
    number = started.out.split()[-1]

    def done() -> bool:
        return inside("replay", "show", number, "--json", "--dsn", database.dsn).json["state"] == "done"

    until(done, seconds=9, what="the events are delivered again")


@pytest.mark.thorough  # waits for the limit of eleven seconds
def test_a_file_of_one_sink_that_blocks_holds_up_no_other(
    database: Database, kafka: KafkaBroker, topic: str, file: Path, tmp_path: Path
) -> None:
    """Goes red when all sinks share a reader of files: the replay of the webhook is not served."""
    with Receiver() as receiver:
        config = kafka_and_webhook_config(database.dsn, kafka.bootstrap, topic, receiver.url)
        config = config.replace('topic = "', f'producer_files = {{"client.id" = "{file}"}}\ntopic = "')
        with RelayService(tmp_path, config, expects={"reload"}) as relay:
            emit_types(database, "a.first")
            until(lambda: "a.first" in received_types(receiver), seconds=20, what="the webhook has the first event")
            reload(relay, "config.reloaded", 20)
            with held(file):
                emit_types(database, "a.second")
                until(lambda: "a.second" in received_types(receiver), seconds=5, what="it has the second one")
                assert reload(relay, "config.reload_refused", 15).startswith(f"sinks.events.{NAME}: {file}: could not")
                replayed(database)
                began = time.monotonic()
                assert str(file) in reload(relay, "config.reload_refused", QUICK_SECONDS)
                assert relay.ask("/livez")[0] == 200
                assert time.monotonic() - began < QUICK_SECONDS
            reload(relay, "config.reloaded", 20)
            until(lambda: len(kafka.read_all(topic)) >= 2, seconds=40, what="the broker has both")
            reload(relay, "config.reloaded", 20)
            with held(file):
                emit_types(database, "a.third")
                until(lambda: "a.third" in received_types(receiver), seconds=5, what="it has the third one")
                assert relay.stop() == 0
