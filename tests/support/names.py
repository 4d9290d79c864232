"""Names that resolve to what a test says.

A fake, since name servers that lie, fail or hang would require changing the machine's own resolution. It replaces
`socket.getaddrinfo`, which all lookups call, for names under `.test` alone.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Answer: TypeAlias = Sequence[str] | BaseException
Answers: TypeAlias = Answer | Callable[[], Answer]

NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
SERVER_FAILED = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
HANG_SECONDS = 60


class Names:
    """A resolver: each name has addresses, an exception, or a function that returns one of these at each call.

    Use it as `socket.getaddrinfo`. `asked` counts the calls for each name.
    """

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self._told: dict[str, Answers] = {}
        self._released = threading.Event()
        self.asked: Counter[str] = Counter()

    def say(self, name: str, answer: Answers) -> None:
        """Resolve `name` to `answer`."""
        self._told[name] = answer

    def in_turn(self, name: str, *answers: Answer) -> None:
        """Give one answer after the other; repeat the last one."""
        left = list(answers)
        self._told[name] = lambda: left.pop(0) if len(left) > 1 else left[0]

    def hang(self, name: str) -> None:
        """Block the thread that looks `name` up, as a name server does that never answers."""

        def wait() -> Answer:
            self._released.wait(HANG_SECONDS)
            return SERVER_FAILED

        self._told[name] = wait

    def release(self) -> None:
        """End every call that hangs."""
        self._released.set()

    def __call__(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or not name.rstrip(".").lower().endswith(".test"):
            return self._real(host, port, *arguments, **options)
        self.asked[name] += 1
        told = self._told.get(name.rstrip(".").lower(), NO_SUCH_NAME)
        answer = told() if callable(told) else told
        if isinstance(answer, BaseException):
            raise answer
        return [_entry(address, int(port or 0)) for address in answer]


def _entry(address: str, port: int) -> tuple[Any, ...]:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))
