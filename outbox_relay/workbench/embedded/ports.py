"""Free TCP ports on the loopback address for servers that are started here."""

import random
import socket

LOOPBACK = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
"""Below the range from which systems take the ports of outgoing connections, so that a server which restarts finds its
port still free."""
TRIES = 100


def free_port() -> int:
    """A port of the loopback address on which nothing listens now; raises RuntimeError if none was found."""
    for _ in range(TRIES):
        port = random.randint(FIRST, LAST)  # noqa: S311 - that two processes rarely meet is all that is asked of it
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port between {FIRST} and {LAST} in {TRIES} tries: is something using them all?")


def is_listening(port: int) -> bool:
    """Does something accept connections on this port of the loopback address?"""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True
