"""The example shop: its services beside the image, and a receiver that believes only what was signed for it."""

import base64
import time
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook

from examples.shop.receiver import Forged, verify
from tests.packaging import shopping
from tests.packaging.stack import Beside, Stack
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OTHER = "whsec_" + base64.b64encode(bytes(32)).decode()
BODY = '{"id": 1}'


@pytest.mark.slow
def test_the_services_of_compose_do_their_work(
    own_postgres: PostgresServer, kafka: KafkaBroker, tmp_path: Path
) -> None:
    with Stack(Beside(), own_postgres, kafka, tmp_path) as stack:
        shopping.set_up(stack)
        receiver, relay = shopping.open_relay(stack)
        shopping.look(stack)
        shopping.trade(stack, receiver, relay)
        shopping.close(stack, receiver, relay)


def signed(secret: str, now: float, *, body: str = BODY) -> Message:
    """Return the headers of a request, signed by the reference library."""
    headers = Message()
    headers["webhook-id"] = "uid"
    headers["webhook-timestamp"] = str(int(now))
    headers["webhook-signature"] = Webhook(secret).sign("uid", datetime.fromtimestamp(int(now), UTC), body)
    return headers


def test_the_receiver_believes_the_reference_library() -> None:
    now = time.time()
    assert verify([OTHER, SECRET], signed(SECRET, now), BODY.encode(), now) == "uid"


def test_the_receiver_believes_no_other_body_and_no_other_secret() -> None:
    now = time.time()
    with pytest.raises(Forged, match="signature"):
        verify([SECRET], signed(SECRET, now), BODY.encode() + b" ", now)
    with pytest.raises(Forged, match="signature"):
        verify([SECRET], signed(OTHER, now), BODY.encode(), now)
