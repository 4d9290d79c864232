"""Program that receives webhooks and verifies every signature with the reference library."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from outbox_relay.workbench.embedded.ports import LOOPBACK
from outbox_relay.workbench.shop.arrivals import REFUSED, UNREADABLE, Arrival, JournalWriter

SECRET = "OUTBOX_SHOP_SECRET"  # noqa: S105 - the name of an environment variable
"""Name of the environment variable with the signing secret."""
PATH = "/hooks/shop"
DAMAGED = b'"damaged"'
"""Part of the payload of each damaged order."""
STOP_SECONDS = 1.0


class VerifyingReceiver:
    """Writes requests that are signed with `secret` to `journal` before it answers them.

    While the file `broken` exists, it answers damaged orders with the status that they name, and does not record them.
    """

    def __init__(self, secret: str, journal: JournalWriter, broken: Path) -> None:
        self._webhook = Webhook(secret)
        self._journal = journal
        self._broken = broken

    async def take(self, request: web.Request) -> web.Response:
        """Answer 204 to a request with a valid signature, 401 to any other."""
        body = await request.read()
        arrived_at = time.time()
        try:
            self._webhook.verify(body, dict(request.headers), json_parse=False)
        except (WebhookVerificationError, ValueError):
            self._journal.write(REFUSED)
            return web.Response(status=401)
        if status := self._refusal(body):
            return web.Response(status=status)
        try:
            arrival = _arrival(body, request, arrived_at)
        except (ValueError, KeyError, TypeError):
            arrival = UNREADABLE
        self._journal.write(arrival)
        return web.Response(status=204)

    def _refusal(self, body: bytes) -> int | None:
        """Return the status that refuses this order; None if it is accepted."""
        if DAMAGED not in body or not self._broken.exists():
            return None
        return int(json.loads(body)["damaged"])


def _arrival(body: bytes, request: web.Request, arrived_at: float) -> Arrival:
    """Parse a request. Raise ValueError, KeyError or TypeError if it is not an event of the shop."""
    event = json.loads(body)
    return Arrival(
        key=unquote(request.headers["outbox-key"]),
        number=int(event["number"]),
        uid=request.headers["webhook-id"],
        emitted_at=float(event["emitted_at"]),
        arrived_at=arrived_at,
    )


def main() -> int:
    """Listen until SIGTERM."""
    parser = argparse.ArgumentParser(prog="outbox-relay shop: receiver")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--broken", type=Path, required=True)
    arguments = parser.parse_args()
    with JournalWriter(arguments.journal) as journal:
        receiver = VerifyingReceiver(os.environ[SECRET], journal, arguments.broken)
        app = web.Application()
        app.add_routes([web.post(PATH, receiver.take)])
        web.run_app(app, host=LOOPBACK, port=arguments.port, access_log=None, print=None, shutdown_timeout=STOP_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
