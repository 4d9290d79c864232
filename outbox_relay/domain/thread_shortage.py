"""The error of a process that cannot start another thread. A limit of processes or of memory may be the cause."""

from __future__ import annotations


def is_thread_shortage(error: BaseException) -> bool:
    """Return True if ``error`` says that the operating system started no thread. Threads that run are not affected."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)
