"""The topics that events may name, and how many of them a sink creates."""

import json
from collections.abc import Sequence

import pytest

from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.topic_admission import TopicAdmission
from outbox_relay.sinks.kafka.topic_resolver import TopicResolver


def topics_of(topics: TopicResolver, *wanted: str) -> tuple[Sequence[str | None], dict[int, str]]:
    """Return the topic of each event, and the reasons for those without."""
    refused: dict[int, str] = {}
    batch = [an_event(headers=json.dumps({"to": name})) for name in wanted]
    return topics.resolve(batch, refused.__setitem__), refused


TO = TopicTemplate.parse("{headers.to}")


@pytest.mark.parametrize("name", ["__consumer_offsets", "__", "__transaction_state"])
def test_kafkas_internal_topics_are_refused_whatever_is_allowed(name: str) -> None:
    for allowed in ((), ("*",), (name,)):
        found, refused = topics_of(TopicResolver(TO, allowed), "a", name, "a")
        assert found[1] is None
        assert refused[1] == f"topic {name}: names that begin with __ are Kafka's own"


def test_a_topic_outside_the_list_is_refused_and_its_neighbours_are_not() -> None:
    topics = TopicResolver(TO, ("shop.*", "audit"))
    found, refused = topics_of(topics, "shop.a", "shop", "audit", "audit.b", "shop.", "Shop.a")
    assert found == ["shop.a", None, "audit", None, "shop.", None]
    assert refused[3] == "topic audit.b is not among the topics of this sink: add it to the setting topics"
    assert refused.keys() == {1, 3, 5}
    assert topics.named == {"audit"}


def test_without_a_list_every_other_topic_is_allowed() -> None:
    found, refused = topics_of(TopicResolver(TO), "_schemas", "a.b", "_")
    assert (found, refused) == (["_schemas", "a.b", "_"], {})


def test_the_number_of_remembered_topics_is_bounded() -> None:
    topics = TopicResolver(TO)
    for n in range(10_000):
        topics_of(topics, f"t{n}")
    assert len(topics._known) <= 4096  # pyright: ignore[reportPrivateUsage] - nothing else shows it


class Cluster:
    """A cluster that counts requests."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.asked = 0

    def __call__(self) -> set[str]:
        self.asked += 1
        return self.names


def test_topics_beyond_the_bound_are_refused_unless_they_exist() -> None:
    cluster, admission = Cluster("old"), TopicAdmission(2, ("named",))
    assert admission.refused(["a", "named"], cluster) == {}
    assert cluster.asked == 0
    refused = admission.refused(["a", "b", "c", "named", "old"], cluster)
    assert refused.keys() == {"c"}
    assert refused["c"].startswith("topic c does not exist, and this sink has 2 topics already")
    assert "topics_max" in refused["c"]
    assert admission.refused(["a", "b", "named"], cluster) == {}
    assert cluster.asked == 1


def test_a_topic_created_meanwhile_is_admitted() -> None:
    cluster, admission = Cluster(), TopicAdmission(1)
    assert admission.refused(["a", "b"], cluster).keys() == {"b"}
    cluster.names.add("b")
    assert admission.refused(["b"], cluster) == {}


def test_refused_topics_are_not_remembered() -> None:
    admission = TopicAdmission(3)
    for n in range(1000):
        admission.refused([f"t{n}"], Cluster())
    assert len(admission) == 3
