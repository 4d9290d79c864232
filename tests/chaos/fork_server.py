"""The server from which relays are forked that kill themselves at a point."""

from __future__ import annotations

from typing import cast

from tests.chaos.relay_that_dies import POINTS, SIGNALS, Point, listen
from tests.support.fork_server import MODULES, serve


def _prepare(armed: str | None) -> None:
    listen()
    if armed:
        POINTS[cast(Point, armed)]()


if __name__ == "__main__":
    serve((*MODULES, "tests.chaos.relay_that_dies"), _prepare, SIGNALS.values())
