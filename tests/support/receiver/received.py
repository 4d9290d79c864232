"""The requests that a receiver has had, in the order of their arrival."""

from __future__ import annotations

from tests.support.receiver import Receiver


def received_types(receiver: Receiver) -> list[str | None]:
    """Return the types of the events."""
    return [request.header("outbox-type") for request in list(receiver.requests)]


def received_bodies(receiver: Receiver) -> list[bytes]:
    """Return the bodies."""
    return [request.body for request in list(receiver.requests)]
