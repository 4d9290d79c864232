"""An event as a message of NATS."""

import re
from typing import NamedTuple
from urllib.parse import quote

from outbox_relay.sinks import StoredEvent, own_headers

VALUE_SAFE = "".join(map(chr, range(0x20, 0x7F)))
"""Characters of the value of a header that are sent as they are. Others are percent-encoded as UTF-8."""
TOKENS = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
"""The form of a subject without wildcards."""
LINE_BYTES = len(": \r\n")


class Message(NamedTuple):
    """A message to publish."""

    subject: str
    headers: dict[str, str]
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes that the server compares with its `max_payload`: headers and payload."""
        lines = sum(len(name) + len(value) + LINE_BYTES for name, value in self.headers.items())
        return len("NATS/1.0\r\n\r\n") + lines + len(self.payload)


def message(event: StoredEvent, sink: str, subject: str, replay: int | None) -> Message:
    """Return the message for `event`. Raises ValueError, without key or payload, if it cannot be one.

    JetStream drops a message whose `Nats-Msg-Id` it has seen lately, in whatever subject of the stream. So the id names
    the sink, since two sinks may deliver one event to one stream, and the replay, which delivers it once more.
    """
    name = subject.replace("{type}", event.type)
    if not TOKENS.fullmatch(name):
        raise ValueError(f"{name} is no subject without wildcards")
    headers = {
        "Nats-Msg-Id": f"{event.uid}:{sink}" if replay is None else f"{event.uid}:{sink}:{replay}",
        "Outbox-Id": event.uid,
        "Outbox-Type": event.type,
        "Content-Type": _value(event.content_type),
    }
    if event.key is not None:
        headers["Outbox-Key"] = quote(event.key, safe="")
    if replay is not None:
        headers["Outbox-Replay"] = str(replay)
    taken = {each.lower() for each in headers} | {"outbox-key", "outbox-replay"}
    for own, value in own_headers(event.headers):
        # Names that begin with "Nats-" are commands to the server: one of them empties the stream.
        if own.lower() not in taken and not own.lower().startswith("nats-"):
            taken.add(own.lower())
            headers[own] = _value(value)
    return Message(name, headers, event.payload)


def _value(text: str) -> str:
    return quote(text, safe=VALUE_SAFE).strip()
