"""The example of a plug-in: its settings and messages."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nats_sink.message import message
from nats_sink.settings import NatsSettings
from outbox_relay.sinks.contract.handing import an_event

REFUSED = {
    "server": ("http://localhost:4222", "nats://HOST:PORT"),
    "subject": ("shop.*", "a subject without wildcards"),
    "stream": ("a b", "match pattern"),
}


@pytest.mark.parametrize(("name", "value", "said"), [(name, *row) for name, row in REFUSED.items()])
def test_a_setting_that_cannot_work_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        NatsSettings.model_validate({"type": "nats", "stream": "SHOP", name: value})


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValidationError) as refused:
        NatsSettings.model_validate({"type": "nats", "stream": "SHOP", "server": "nats://u:canary@h"})
    assert "canary" not in str(refused.value)


def test_commands_to_the_server_in_headers_of_an_event_are_left_out() -> None:
    """Goes red when an application's header empties the stream."""
    event = an_event(headers='{"Nats-Rollup": "all", "nats-msg-id": "x", "trace": "a\\r\\nb", "outbox-id": "y"}')
    assert message(event, "stream", "shop.{type}", None).headers == {
        "Nats-Msg-Id": f"{event.uid}:stream",
        "Outbox-Id": event.uid,
        "Outbox-Type": "order.created",
        "Outbox-Key": "k",
        "Content-Type": "application/json",
        "trace": "a%0D%0Ab",
    }


def test_the_size_of_a_message_is_at_least_that_of_the_bytes_on_the_wire() -> None:
    made = message(an_event("ключ", b"x" * 10), "stream", "shop.{type}", None)
    lines = "".join(f"{name}: {value}\r\n" for name, value in made.headers.items())
    assert made.size == len(f"NATS/1.0\r\n{lines}\r\n".encode()) + 10
