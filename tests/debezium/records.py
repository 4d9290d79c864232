"""Records of the relay beside those of a connector, as a consumer sees them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tests.support.kafka import KafkaBroker, Record

SECONDS = 60
CONTEXT = "__debezium.context."
"""Headers that the connector writes about itself begin with this."""
RELAY = {"type", "content-type", "aggregatetype", "partition"}
"""Headers that the relay may write where the connector does not."""

Reading = Callable[[bytes | None], object]


def as_bytes(value: bytes | None) -> object:
    """Return a value as text or bytes, unchanged."""
    return value


def uid(record: Record) -> bytes:
    """Return the header that both write first."""
    found = record.headers["id"]
    assert found is not None
    return found


def read(kafka: KafkaBroker, topic: str, count: int) -> list[Record]:
    """Return all records of a topic: at least the expected number, and any after them."""
    kafka.consume(topic, count=count, seconds=SECONDS)
    return kafka.read_all(topic)


def compare(ours: Sequence[Record], theirs: Sequence[Record], reading: Reading = as_bytes) -> None:
    """Assert that the relay's records are the connector's: each once, and those of each key in the same order."""
    assert sorted(map(uid, ours)) == sorted(map(uid, theirs))
    wanted = {uid(record): record for record in theirs}
    for record in ours:
        _compare(record, wanted[uid(record)], reading)
    assert _by_key(ours) == _by_key(theirs)


def headers(record: Record) -> Mapping[str, bytes]:
    """Return the last header of each name, without those that have no value or are the connector's own."""
    return {name: value for name, value in record.headers.items() if value is not None and not name.startswith(CONTEXT)}


def _compare(ours: Record, theirs: Record, reading: Reading) -> None:
    assert ours.key == theirs.key
    assert reading(ours.value) == reading(theirs.value)
    if theirs.key is not None:
        assert ours.partition == theirs.partition
    wanted = headers(theirs)
    found = headers(ours)
    assert {name: found.get(name) for name in wanted} == wanted
    assert found.keys() - wanted.keys() <= RELAY


def _by_key(records: Sequence[Record]) -> Mapping[bytes, Sequence[bytes]]:
    """Return the ids of each key in the order of its partition."""
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for record in records:
        if record.key is not None:
            found[record.key].append(uid(record))
    return found
