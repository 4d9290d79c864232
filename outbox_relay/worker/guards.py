"""Guards of a worker process, which hold whatever a handler does: its end with the relay, signals, forks, memory."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a service manager sends to all processes. The relay decides when its workers end."""
OOM_SCORE = 500
"""Points by which the kernel prefers a worker to the relay when memory runs out, of 1000."""


def end_with(parent: int, pipe: int) -> None:
    """End this process when the relay ``parent`` ends, whatever a handler does.

    The kernel does it on Linux. A thread does it too, with the processes that handlers have started.
    """
    if sys.platform == "linux":
        with suppress(Exception):  # systems that forbid executable memory refuse ctypes
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end()
    threading.Thread(target=_wait_for_end, args=(pipe,), daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    poll = select.poll()
    poll.register(pipe, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    end()


def end() -> NoReturn:
    """End this process and those that its handlers have started."""
    with suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


def keep_pipe(*descriptors: int) -> None:
    """Keep the pipe to the relay in this process. One that held it too would hide the end of this one, and answer."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=lambda: _let_go(descriptors))


def _let_go(descriptors: tuple[int, ...]) -> None:
    """Replace the pipe in a process that a handler has forked, and let signals end it."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)
    for number in SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Ignore signals that are meant for the relay. Programs that handlers start do not ignore them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in SIGNALS:
        signal.signal(number, _ignore)


def _ignore(_number: int, _frame: FrameType | None, /) -> None:
    """Do nothing. SIG_IGN would be inherited by programs."""


def die_first() -> None:
    """Have the kernel end this process, and not the relay, when memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):
        score.write_text(str(min(1000, int(score.read_text(encoding="ascii")) + OOM_SCORE)), encoding="ascii")
