"""The webhook sink under the contract, on a receiver that verifies every signature."""

import socket
from collections.abc import Sequence
from urllib.parse import unquote

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.signatures import parse_key
from outbox_relay.sinks.contract import Received, SinkHarness
from outbox_relay.sinks.posting import PostingSink
from outbox_relay.sinks.webhook import Credentials, Endpoint, ResponsePolicy, WebhookSink
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, head, raw, say
from tests.support.receiver.signatures import SECRET

POISON = b"poison"
KNOCK = "/knock"
DOWN = raw(head(503, [("content-length", "0"), ("connection", "close")]), close=True)


class WebhookHarness(SinkHarness):
    """A receiver, which goes down as services do whose gateway answers 503 for them."""

    def __init__(self) -> None:
        self._up = True
        self._lost = 0
        """Connections up to this number were made while it was down, or before: what they carry is lost."""
        self._taken: list[Request] = []
        self.receiver = Receiver(chosen(self._answer))
        self.receiver.start()

    def stop(self) -> None:
        """End the receiver. Fails if a signature did not verify."""
        self.receiver.stop()
        assert [request for request in self.receiver.unverified if request.target != KNOCK] == []

    def _answer(self, request: Request) -> Behaviour:
        if not self._up or request.target == KNOCK or request.connection <= self._lost:
            return DOWN
        if request.body == POISON:
            return say(400)
        self._taken.append(request)
        return say(204)

    def make_sink(self) -> PostingSink:
        endpoint, credentials = Endpoint(self.receiver.url, lambda _: None), Credentials([parse_key(SECRET)])
        return PostingSink(
            WebhookSink("contract", endpoint, credentials, policy=ResponsePolicy(permanent=frozenset((400,))))
        )

    def received(self) -> Sequence[Received]:
        return [_received(request) for request in self._taken]

    def break_destination(self) -> None:
        self._up = False

    def mend_destination(self) -> None:
        """Wait until connections are accepted in turn again: each request before has one that is counted now."""
        with socket.create_connection((self.receiver.host, self.receiver.port)) as knock:
            knock.sendall(f"POST {KNOCK} HTTP/1.1\r\ncontent-length: 0\r\n\r\n".encode())
            while knock.recv(4096):
                pass
        self._lost, self._up = self.receiver.connections, True

    def poison(self, event: StoredEvent) -> StoredEvent:
        return event._replace(payload=POISON)


def _received(request: Request) -> Received:
    named = dict(request.headers)
    key_of_event = named.get("outbox-key")
    return Received(
        None if key_of_event is None else unquote(key_of_event, errors="strict"),
        named["webhook-id"],
        request.body,
        named["outbox-type"],
        named["content-type"],
        named,
    )
