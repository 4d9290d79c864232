"""A Kafka sink is made with the values of its settings."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from outbox_relay.service.kafka import kafka_sink
from outbox_relay.settings import KafkaSettings, load
from outbox_relay.sinks.kafka import sink
from outbox_relay.sinks.kafka.topic_resolver import TopicResolver

TEXT = """
[sinks.events]
type = "kafka"
topic = "{headers.to}"
topics = ["shop.*", "audit"]
topics_max = 2
producer = { "bootstrap.servers" = "localhost" }
"""


def test_the_topics_that_events_may_name_and_their_limit_come_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when either is left out between the settings and the resolver, which would allow every topic."""
    made = Mock(wraps=TopicResolver)
    monkeypatch.setattr(sink, "TopicResolver", made)
    file = tmp_path / "relay.toml"
    file.write_text(TEXT)
    settings = load(file, {}).sinks["events"]
    assert isinstance(settings, KafkaSettings)
    kafka_sink("events", settings, 15.0)
    [call] = made.call_args_list
    template, topics, topics_max = call.args
    assert template.text == "{headers.to}"
    assert (list(topics), topics_max) == (["shop.*", "audit"], 2)
