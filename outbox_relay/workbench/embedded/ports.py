"""TCP ports of the loopback address."""

import random
import socket

LOOPBACK = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
"""Below the range of outgoing connections, so that a restarted server finds its port free."""
TRIES = 100
_RANDOM = random.SystemRandom()
"""A source that no test can have seeded alike in two processes."""


def free_port() -> int:
    """Return a port of the loopback address that is free now. Raise RuntimeError if none is found."""
    for _ in range(TRIES):
        port = _RANDOM.randint(FIRST, LAST)
        if bind_problem(port) is None:
            return port
    raise RuntimeError(f"no free port between {FIRST} and {LAST} in {TRIES} tries")


def bind_problem(port: int) -> str | None:
    """Return the reason for which a server cannot listen on this port of the loopback address; None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return (error.strerror or type(error).__name__).lower()
    return None


def is_listening(port: int) -> bool:
    """Return True if a server accepts connections on this port of the loopback address."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True
