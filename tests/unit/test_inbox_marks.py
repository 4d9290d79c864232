"""The headers that name an event and its consumer, in Kafka records and in webhooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from outbox_relay.inbox import Headers, InvalidMark, consumer_of, once, once_per_event, uid_of
from outbox_relay.inbox_marks import mark_of
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.webhook.request import Credentials, RequestFormat, make_request

FORGED = '{"webhook-id": "forged", "ID": "x", "Outbox-Replay": "8", "idempotency-key": "y"}'
"""Headers of an application that look like those of the relay."""
EVENT = an_event(headers=FORGED)
UID = UUID("01a1fe9a-d7b3-795c-8af1-aa7f5518f66b")
IN_BYTES = [("id", str(UID).encode())]


def kafka(replay: int | None = None) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record as Kafka clients give them."""
    _, _, headers = RecordFormat(replay=replay).record(EVENT)
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]


def webhook(replay: int | None = None) -> dict[str, str]:
    """Return the headers of a request as web frameworks give them, with an application's header that is forwarded."""
    made = RequestFormat(forward=frozenset({"id", "idempotency-key"}), replay=replay)
    request = make_request(EVENT, made, Credentials([]), attempt=1, now=1.8e9)
    return {name.title(): value for name, value in request.headers}


@pytest.mark.parametrize("headers", [kafka(), dict(kafka()), webhook(), [*webhook().items()]])
def test_the_relays_header_names_the_event_whatever_the_application_sends(headers: Headers) -> None:
    assert uid_of(headers) == UUID(EVENT.uid)
    assert consumer_of("billing", headers) == "billing"


@pytest.mark.parametrize("headers", [kafka(7), dict(kafka(7)), webhook(7), [*webhook(7).items()]])
def test_a_replay_counts_as_another_consumer(headers: Headers) -> None:
    assert uid_of(headers) == UUID(EVENT.uid)
    assert consumer_of("billing", headers) == "billing/replay-7"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (None, "do not name an event"),
        ([], "do not name an event"),
        ({"idempotency-key": str(UID)}, "do not name an event"),
        ({"id": str(UID)}, "do not name an event"),
        ([("webhook-id", str(UID).encode())], "do not name an event"),
        ([("id", None)], "do not name an event"),
        ([*IN_BYTES, ("id", b"another")], "name several events"),
        ({"webhook-id": "msg_2Lh9"}, "uid must be a UUID such as .*, not 'msg_2Lh9'"),
        ([("id", b"\xff")], "uid must be a UUID"),
    ],
)
def test_headers_without_one_uid_are_refused(headers: Headers | None, said: str) -> None:
    with pytest.raises(InvalidMark, match=said):
        uid_of(headers)


@pytest.mark.parametrize("uid", [UID, str(UID), str(UID).upper()])
def test_a_uid_and_its_text_are_one_mark(uid: UUID | str) -> None:
    assert mark_of("billing", uid) == ("billing", str(UID))


@pytest.mark.parametrize(
    ("consumer", "uid", "said"),
    [
        (b"billing", UID, "consumer must be a str, not bytes"),
        (None, UID, "consumer must be a str, not NoneType"),
        ("a\0b", UID, "NUL"),
        ("a\ud800", UID, "lone surrogate"),
        ("billing", None, "uid must be a uuid.UUID or a str, not NoneType"),
        ("billing", UID.bytes, "uid must be a uuid.UUID or a str, not bytes"),
        ("billing", UID.int, "uid must be a uuid.UUID or a str, not int"),
        ("billing", "", "not ''$"),
        ("billing", UID.hex, "uid must be a UUID such as"),
        ("billing", f"{{{UID}}}", "uid must be a UUID such as"),
        ("billing", f" {UID}", "uid must be a UUID such as"),
        ("billing", f"{UID}\n", "uid must be a UUID such as"),
        ("billing", "0x1fe9a-d7b3-795c-8af1-aa7f5518f66b", "uid must be a UUID such as"),
        ("billing", "x" * 5000, f"not '{'x' * 40}'…$"),
    ],
)
def test_a_value_that_cannot_be_sent_is_refused(consumer: Any, uid: Any, said: str) -> None:
    with pytest.raises(InvalidMark, match=said):
        mark_of(consumer, uid)


async def _mark(*_: object) -> bool:
    return True


def _generator(*_: object) -> Any:
    yield


@pytest.mark.parametrize(("handler", "mark"), [(_mark, once), (_generator, once), (print, _mark)])
def test_what_is_asynchronous_is_refused_before_nothing_is_marked(handler: Any, mark: Any) -> None:
    with pytest.raises(TypeError, match="aonce_per_event"):
        once_per_event("billing", mark=mark)(handler)


def test_a_mark_whose_result_is_no_bool_marks_nothing_and_is_refused() -> None:
    handled: list[object] = []

    def unmarked(*_: object) -> Any:
        return object()  # such as a coroutine of a partial function

    def handler(_conn: None, message: object) -> None:
        handled.append(message)

    handle = once_per_event("billing", mark=unmarked)(handler)
    delivery: Any = SimpleNamespace(headers=IN_BYTES)
    with pytest.raises(TypeError, match="use aonce_per_event"):
        handle(None, delivery)
    assert handled == []
