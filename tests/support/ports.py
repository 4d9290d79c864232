"""TCP ports of the loopback address: free ones as the product chooses them, and ports that do not answer."""

import errno
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from outbox_relay.workbench.embedded.ports import LOOPBACK, free_port, is_listening

__all__ = ["LOOPBACK", "free_port", "is_listening", "unanswering_port"]

PENDING = 8
"""Connections that fill the queue of a port."""


@contextmanager
def unanswering_port() -> Generator[int]:
    """Yield a port whose queue is full, so that the system drops each SYN and connecting to it gets no answer."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket())
        listening.bind((LOOPBACK, 0))
        listening.listen(0)
        for _ in range(PENDING):
            pending = sockets.enter_context(socket.socket())
            pending.setblocking(False)
            assert pending.connect_ex(listening.getsockname()) in (0, errno.EINPROGRESS)
        yield int(listening.getsockname()[1])
